"""The README does what it says: every command in it is known to this test, and run where that is cheap."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ENVIRONMENT = (ROOT / "scripts" / "environment").read_text(encoding="utf-8")
FENCE = re.compile(r"(<!-- run by tests/null/test_readme\.py -->\n)?^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [(language, bool(marked), body) for marked, language, body in FENCE.findall(README)]
COMMANDS = [
    line.removeprefix("$ ")
    for language, _, body in BLOCKS
    if language in ("bash", "console")
    for line in body.splitlines()
    if line.startswith("$ ")
]
PROGRAMS = [body for language, marked, body in BLOCKS if language == "python" and marked]


LINES = (3,)
"""Lines that each of the programs prints."""


@cache
def forebay(*arguments: str) -> str:
    """Output of the installed command, which must say yes."""
    # Help is laid out for the width of the terminal: a narrow one would cut the names of flags short.
    environment = os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    command = [str(Path(sys.executable).with_name("forebay")), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def flags_of(words: list[str]) -> list[str]:
    return [word for word in words if word.startswith("-")]


def test_shell_blocks_hold_commands_only() -> None:
    # A line that is neither would be read by a person and checked by nobody.
    for language, _, body in BLOCKS:
        if language in ("bash", "console"):
            assert all(line.startswith("$ ") for line in body.splitlines())


def test_the_two_commands_come_first() -> None:
    assert [command for command in COMMANDS if " " not in command] == ["scripts/demo", "scripts/test"]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # That there is a plan is all that is asked here: a search simulates hardly any.
    monkeypatch.setattr("forebay.planners.bench.SIMULATIONS", 1)
    program, *arguments = shlex.split(command)
    if program.startswith("scripts/"):
        # Not run: scripts/test would run this test, and the demo has a test of its own.
        assert os.access(ROOT / program, os.X_OK)
        if program == "scripts/demo":
            known = forebay("demo", "--help")
            assert all(re.search(rf"{flag}\b", known) for flag in flags_of(arguments))
    elif program == "forebay" and arguments[-1] == "--help":
        assert "Usage:" in forebay(*arguments)
    elif program == "forebay" and arguments[0] == "plan":
        # In this process, which has torch already: that the command is installed is seen above.
        done = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
        assert done.exit_code == 0 and "fits on" in done.stdout, done.output
    elif program == "forebay":
        known = forebay(arguments[0], "--help")
        for flag in flags_of(arguments):
            assert re.search(rf"{flag}\b", known), f"forebay {arguments[0]} has no {flag}"
    elif program == "source":
        assert arguments == [".venv/bin/activate"] and 'python" -m venv .venv' in ENVIRONMENT
    else:
        assert (program, arguments[0]) == ("pip", "install"), f"no check is known for {command!r}"
        extras = re.search(r"\[(.*)\]", arguments[-1])
        pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        assert extras is not None
        assert all(f"\n{extra} = [" in pyproject for extra in extras.group(1).split(","))


def test_there_are_programs_to_run() -> None:
    assert len(PROGRAMS) == len(LINES)


@pytest.mark.parametrize(("program", "lines"), list(zip(PROGRAMS, LINES, strict=False)))
def test_program(program: str, lines: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    # What a program finds out about this machine is remembered where no other test looks.
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("own"))}
    result = subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", "-c", program],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env=environment,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == lines
    assert not list(tmp_path.iterdir())


def test_scripts_are_executable_and_parse() -> None:
    for script in ("scripts/environment", "scripts/check", "scripts/test", "scripts/demo", ".ci/run"):
        assert os.access(ROOT / script, os.X_OK)
        subprocess.run(["bash", "-n", str(ROOT / script)], check=True, timeout=10)
