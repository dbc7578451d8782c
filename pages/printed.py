"""A page whose programs and commands are run, in order, in one interpreter and one folder.

What a ``python`` or a ``console`` block prints stands in the ``text`` block behind it; one that prints nothing has
none. A line of a ``console`` block may end in ``# exit code 1``. Where figures are measured, which are others in every
run, a line ``<!-- figures are those of one run -->`` stands before the ``text`` block.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any, final

from pages.markdown import Block, blocks

__all__ = ["ONE_RUN", "PageError", "Session", "printed", "settled"]

ONE_RUN = "<!-- figures are those of one run -->"
RUN = ("python", "console")
_EXPECTED = re.compile(r"# exit code (\d)$")


class PageError(Exception):
    """A page does not do what it says."""


@final
class Session:
    """What the programs of one page share. Commands run in the current folder, on a terminal of 100 columns."""

    def __init__(self) -> None:
        self._names: dict[str, Any] = {"__name__": "page"}

    def run(self, block: Block, page: str = "page") -> str:
        """What ``block`` prints. Raises ``PageError`` for a command that ends otherwise than the page says, and what a
        program raises."""
        if block.language == "console":
            return "".join(map(self._command, block.body.splitlines()))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(block.body, page, "exec"), self._names)
        return out.getvalue()

    def _command(self, line: str) -> str:
        from typer.testing import CliRunner

        from forebay.cli.main import app

        words = shlex.split(line.removeprefix("$ "), comments=True)
        if not line.startswith("$ ") or words[:1] != ["forebay"]:
            raise PageError(f"a command is written '$ forebay VERB ...', this is not: {line}")
        expected = _EXPECTED.search(line)
        done = CliRunner().invoke(app, words[1:], env={"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"})
        if done.exit_code != (int(expected[1]) if expected else 0):
            raise PageError(f"{line}: exit code {done.exit_code}\n{done.output}")
        return "".join(f"{printed.rstrip()}\n" for printed in done.stdout.splitlines())


def printed(path: Path) -> str:
    """The page at ``path`` with what its programs and commands print now. Raises ``PageError`` where something is
    printed and there is no block for it."""
    text, session, made, last = path.read_text(encoding="utf-8"), Session(), "", 0
    found = list(blocks(text))
    for block, behind in zip(found, [*found[1:], None], strict=True):
        if block.language not in RUN:
            continue
        output = session.run(block, path.name).strip("\n") + "\n"
        has = behind is not None and behind.language == "text" and text[block.end : behind.start].count("\n") <= 4
        if not has and output.strip():
            raise PageError(f"{path.name}: there is no text block for what is printed by\n{block.body}")
        if has and behind is not None:
            made += text[last : behind.start] + output
            last = behind.end
    return made + text[last:]


def settled(text: str) -> str:
    """``text`` without what is other in another run: of blocks that say so only titles are left, which are lines that
    begin at the left and have no figure."""
    made, last = "", 0
    for block in blocks(text):
        if ONE_RUN in text[last : block.start]:
            titles = [line for line in block.body.splitlines() if re.match(r"\w\D*$", line)]
            made += text[last : block.start] + "\n".join([*titles, ""])
            last = block.end
    return made + text[last:]
