"""The tests and cases that need a card, in calls of minutes.

    scripts/gpu --out FOLDER --budget-seconds 540 --wheels DIR --revision "$(git rev-parse HEAD)"

The work is a list of parts: the card's own account of itself, the tests marked ``gpu``, every CUDA case. Each part is
a process with a limit of its own. A call starts parts as long as the limit of the next one fits in what is left of
its budget, and the same call again continues. Exit code 0: all is done; 3: call again; 1: a part failed, or this
machine cannot run them (a call after that runs the failed parts again).

No network is used: packages that the machine lacks come as a folder of wheels. Only the standard library is imported
here, because the wheels are not installed yet when this starts. FOLDER ends up with six files at most.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from benchmarks.case import DeviceKind
from benchmarks.cases import CASES

__all__ = ["FAILED", "FINISHED", "MORE", "Part", "PartRecord", "State", "Status", "advance", "execute", "main", "parts"]

FINISHED, FAILED, MORE = 0, 1, 3
"""Exit codes."""

LOG_BYTES = 4 * 1024 * 1024
"""Bytes: a log keeps its last ones only, so that the folder can travel."""

_ROOT = Path(__file__).resolve().parent.parent
_TESTS_SECONDS = 180
_MEASURING = "tests/gpu/test_probe_cuda.py"
"""What it measures is kept only where nobody else is busy: it runs alone, and the other tests eight at a time."""

_STATE = "state.json"
_CHECK = """
import importlib.util, sys
needed = ("torch", "transformers", "numpy", "psutil", "pydantic", "yaml", "rich", "safetensors", "typer", "pytest",
          "pytest_timeout", "xdist", "hypothesis")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"python3 lacks {', '.join(missing)}; carry wheels of them in and name their folder: --wheels DIR")
import torch
if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11):
    sys.exit(f"torch {torch.__version__} is installed, 2.11 or later is needed")
if not torch.cuda.is_available():
    sys.exit(f"this machine has no NVIDIA card that torch {torch.__version__} can use; run this on one that has")
"""


class Status(StrEnum):
    """How a part that has ended came out."""

    DONE = "done"
    FAILED = "failed"
    TIMED_OUT = "timed out"


@dataclass(frozen=True)
class Part:
    """One command: its limit in seconds, and the file in the folder that its output is appended to."""

    name: str
    seconds: int
    command: tuple[str, ...]
    log: str


@dataclass(frozen=True)
class PartRecord:
    """How a part ended: its exit code (None: it ran into its limit) and the seconds it took."""

    status: Status
    exit_code: int | None
    seconds: float


class State:
    """Which parts have ended, kept in one file. A part cut off with its machine is not in it, and runs again."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ended: dict[str, PartRecord] = {}
        if path.exists():
            for name, record in json.loads(path.read_text())["parts"].items():
                self._ended[name] = PartRecord(Status(record["status"]), record["exit_code"], record["seconds"])

    def status(self, part: Part) -> Status | None:
        """How ``part`` ended; None if it has not."""
        record = self._ended.get(part.name)
        return None if record is None else record.status

    def end(self, part: Part, record: PartRecord) -> None:
        """Notes that ``part`` ended, on disk too."""
        self._ended[part.name] = record
        text = json.dumps({"parts": {name: asdict(ended) for name, ended in self._ended.items()}}, indent=2)
        # The machine may go at any instant: the file is the old one or the new one, never half of one.
        draft = self._path.with_suffix(".new")
        draft.write_text(text + "\n")
        draft.replace(self._path)


def parts(folder: Path, revision: str | None) -> tuple[Part, ...]:
    """Everything there is to do, in order. Logs and results go to ``folder``."""
    python = sys.executable
    tests = (python, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider")
    named = () if revision is None else ("--revision", revision)
    cases = [
        Part(
            case.name,
            case.limit_seconds,
            (python, "-m", "benchmarks", "run", case.name, "--append-to", str(folder / "results.jsonl"), *named),
            "cases.log",
        )
        for case in CASES
        if case.device is DeviceKind.CUDA
    ]
    return (
        Part("machine", 60, ("nvidia-smi",), "machine.txt"),
        Part("measuring", 90, (*tests, _MEASURING), "tests.log"),
        Part(
            "tests",
            _TESTS_SECONDS,
            (*tests, "tests/gpu", f"--ignore={_MEASURING}", "-n", "8", f"--junitxml={folder / 'tests.xml'}"),
            "tests.log",
        ),
        *cases,
    )


def advance(
    work: Sequence[Part],
    folder: Path,
    budget: float,
    *,
    run: Callable[[Part, Path], int | None],
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> int:
    """Runs parts of ``work`` until ``budget`` (seconds) has no room for the next; returns the exit code.

    ``run`` takes a part and its log, and returns the exit code or None when the part ran into its limit. Parts that
    have not ended come first; when there are none, those that failed run again.
    """
    start = clock()
    state = State(folder / _STATE)
    todo = [part for part in work if state.status(part) is None]
    todo = todo or [part for part in work if state.status(part) is not Status.DONE]
    for done, part in enumerate(todo):
        left = budget - (clock() - start)
        if part.seconds > left:
            say(f"{len(todo) - done} parts are left, {part.name} next: call again with the same folder")
            return MORE
        began = clock()
        say(f"{part.name}: at most {part.seconds} s")
        code = run(part, folder / part.log)
        status = Status.TIMED_OUT if code is None else Status.DONE if code == 0 else Status.FAILED
        record = PartRecord(status, code, clock() - began)
        state.end(part, record)
        say(f"{part.name}: {status.value} after {record.seconds:.0f} s")
    bad = [part for part in work if state.status(part) is not Status.DONE]
    for part in bad:
        say(f"{part.name} did not pass: see {part.log}")
    return FAILED if bad else FINISHED


def execute(part: Part, log: Path, environment: dict[str, str]) -> int | None:
    """Runs ``part`` from the repository's root; returns its exit code, or None after its limit.

    Everything that the part started ends with it, and ``log`` keeps its last ``LOG_BYTES``.
    """
    with log.open("ab") as output:
        output.write(f"== {part.name}\n".encode())
        output.flush()
        try:
            process = subprocess.Popen(
                part.command,
                cwd=_ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            output.write(f"cannot run {part.command[0]}: {error.strerror}\n".encode())
            return 127
        code: int | None
        try:
            code = process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            output.write(f"== {part.name}: ended at its limit of {part.seconds} s\n".encode())
            code = None
        finally:
            _end_group(process)
    _keep_end(log)
    return code


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever the part left running: a contender's process would hold the card's memory."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _keep_end(log: Path) -> None:
    if log.stat().st_size > LOG_BYTES:
        with log.open("rb") as file:
            file.seek(-LOG_BYTES, os.SEEK_END)
            end = file.read()
        log.write_bytes(b"[the beginning was cut]\n" + end)


@contextmanager
def _environment(wheels: Path | None) -> Iterator[dict[str, str]]:
    """The parts' environment: this tree, and ``wheels`` unpacked in a folder that is gone afterwards.

    Raises ``OSError`` or ``CalledProcessError`` where a wheel cannot be installed.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-wheels-") as site:
        path = [str(_ROOT / "src"), str(_ROOT)]
        if wheels is not None:
            files = sorted(str(file) for file in wheels.glob("*.whl"))
            if not files:
                raise FileNotFoundError(f"--wheels {wheels}: there is no wheel in this folder")
            install = ["install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--target", site, *files]
            subprocess.run([sys.executable, "-m", "pip", *install], check=True)
            path.insert(0, site)
        path.extend(filter(None, [os.environ.get("PYTHONPATH")]))
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTHONUNBUFFERED": "1"}


def _say(line: str) -> None:
    print(f"gpu: {line}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="scripts/gpu", description="GPU tests and cases, resumable.")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="state, logs and results")
    parser.add_argument("--budget-seconds", type=float, default=540, help="this call's time (default %(default)s)")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="packages that the machine lacks")
    parser.add_argument("--revision", help="the commit, where the code is a copy and no repository")
    options = parser.parse_args(arguments)
    start = time.monotonic()
    folder: Path = options.out.resolve()
    work = parts(folder, options.revision)
    longest = max(work, key=lambda part: part.seconds)
    # A start takes seconds of the budget: a part as long as the budget would never begin.
    if options.budget_seconds < longest.seconds + 60:
        parser.error(f"--budget-seconds must be at least {longest.seconds + 60}: {longest.name} may take that long")
    try:
        with _environment(options.wheels) as environment:
            subprocess.run([sys.executable, "-c", _CHECK], env=environment, cwd=_ROOT, check=True)
            folder.mkdir(parents=True, exist_ok=True)
            left = options.budget_seconds - (time.monotonic() - start)
            return advance(
                work,
                folder,
                left,
                run=lambda part, log: execute(part, log, environment),
                clock=time.monotonic,
                say=_say,
            )
    except FileNotFoundError as error:
        _say(str(error))
    except subprocess.CalledProcessError:
        _say("nothing was run: this machine cannot run the tests and cases; the reason is above")
    return FAILED


if __name__ == "__main__":
    sys.exit(main())
