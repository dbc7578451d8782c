"""A headless Chromium that opens a page of ours, says what it complains of, and takes pictures of it.

    python -m tests.null.browsing PAGE.html PICTURE.png [--width 390] [--height 800] [--dark] [--section Plan] [--whole]

It speaks the DevTools protocol over two pipes, so that nothing beside the browser has to be installed.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["Browser", "chromium"]

SECONDS = 60
"""After which a browser that says nothing is given up."""


def chromium() -> str | None:
    """The browser's program; None where there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One page in a browser of its own, ``width`` pixels wide, dark or light. ``complaints`` are errors and warnings of
    its console, ``requests`` the addresses that it asked for."""

    def __init__(self, folder: Path, width: int = 1100, height: int = 900, *, dark: bool = False) -> None:
        program = chromium()
        assert program is not None
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._number = 0
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        os.set_inheritable(read, True)
        os.set_inheritable(write, True)
        # The browser reads commands from its descriptor 3 and answers on 4.
        command = f'exec 3<&{read} 4>&{write}; exec "$@"'
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={folder}", "--no-first-run", "--disable-dev-shm-usage"]
        self._process = subprocess.Popen(
            ["bash", "-c", command, "browser", program, *options, "about:blank"],
            pass_fds=(read, write),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self._answers = os.fdopen(self._from, "rb")
        target = next(one for one in self.send("Target.getTargets")["targetInfos"] if one["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    _session: str | None = None

    def send(self, method: str, **parameters: Any) -> Any:
        """Has the browser do something and returns what it answers; what happens meanwhile is noted."""
        self._number += 1
        asked: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            asked["sessionId"] = self._session
        os.write(self._to, json.dumps(asked).encode() + b"\0")
        while True:
            said = self._next()
            if said.get("id") == self._number:
                assert "error" not in said, said["error"]
                return said["result"]

    def _next(self) -> Any:
        found = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            found += byte
        said = json.loads(found)
        self._note(said.get("method", ""), said.get("params", {}))
        return said

    def _note(self, method: str, said: Any) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.complaints.append(said["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(said["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.complaints.append(json.dumps(said["args"]))

    def open(self, path: Path) -> None:
        """Shows the page and waits until its charts are drawn."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.ask("new Promise(done => { if (document.readyState === 'complete') done(); else onload = done; })")
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))")

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page, awaited if it is a promise."""
        found = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, wherever the focus is."""
        for key in keys:
            for kind in ("keyDown", "keyUp"):
                text = {"text": key} if len(key) == 1 and kind == "keyDown" else {}
                code = {"Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}.get(key, 0)
                self.send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the page, or of what of it is on the screen."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._extent(whole))
        path.write_bytes(base64.b64decode(found["data"]))

    def _extent(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**size, "scale": 1}}

    def close(self) -> None:
        """Ends the browser."""
        os.close(self._to)
        try:
            self._process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def main() -> None:
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--width", type=int, default=1100)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--section", help="what is on the screen from this heading on, not from the top")
    parser.add_argument("--whole", action="store_true", help="all of the page, however high")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Browser(Path(folder), given.width, given.height, dark=given.dark) as browser,
    ):
        browser.open(given.page)
        if given.section:
            heading = json.dumps(given.section)
            browser.ask(f"[...document.querySelectorAll('h2')].find(h => h.textContent === {heading}).scrollIntoView()")
            browser.ask("new Promise(done => setTimeout(done, 200))")
        browser.picture(given.picture, whole=given.whole)
        for words in browser.complaints:
            print(words)


if __name__ == "__main__":
    main()
