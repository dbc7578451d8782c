"""docs/long-sequences.md: its commands are known. They take some 10 s each, and run where slow tests do."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.catalogue import read_machine
from forebay.recipes import recipe_names

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "long-sequences.md").read_text(encoding="utf-8")
COMMANDS = [
    line.removeprefix("$ ")
    for body in re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)
    for line in body.splitlines()
]
REFUSED = [c for c in COMMANDS if "rtx-4090" in c and "--seq 32768" in c and "--loss" not in c]


def forebay(*arguments: str) -> tuple[int, str]:
    """Exit code and output of the installed command."""
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    command = [str(Path(sys.executable).with_name("forebay")), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, check=False)
    assert result.returncode in (0, 1), result.stderr
    return result.returncode, result.stdout


def expect(command: str) -> None:
    code, shown = forebay(*shlex.split(command)[1:])
    if command in REFUSED:
        assert (code, "does not fit on" in shown) == (1, True)
        # The page tells the reader to go on with this.
        assert "What would fit" in shown and "--loss chunked" in shown
    else:
        assert code == 0
        assert " fits on " in shown
        assert "Why" in shown


def test_the_page_has_what_it_compares() -> None:
    asked = {(machine, seq) for c in COMMANDS for machine, seq in re.findall(r"--machine (\S+) .*--seq (\d+)", c)}
    assert asked == {(machine, seq) for machine in ("rtx-4090", "h200") for seq in ("8192", "32768")}
    assert len(REFUSED) == 1


def test_every_command_is_known() -> None:
    code, known = forebay("plan", "--help")
    assert code == 0
    for command in COMMANDS:
        program, verb, model, *rest = shlex.split(command)
        assert (program, verb) == ("forebay", "plan")
        assert model in recipe_names()
        assert read_machine(rest[rest.index("--machine") + 1]).source == "catalogue"
        for flag in (word for word in rest if word.startswith("-")):
            assert re.search(rf"{flag}\b", known), f"forebay plan has no {flag}"


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str) -> None:
    expect(command)
