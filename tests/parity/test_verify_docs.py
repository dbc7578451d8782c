"""docs/verify.md and docs/export.md do what they say, and the commands of all pages are known."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from forebay.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("verify", "export")}
PROGRAM = re.compile(r"<!-- run by tests/parity/test_verify_docs\.py -->\n```python\n(.*?)^```$", re.M | re.S)
COMMANDS = [
    line.removeprefix("$ ")
    for page in sorted((ROOT / "docs").glob("*.md"))
    for body in re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
    for line in body.splitlines()
    if line.startswith("$ forebay ")
]


@pytest.mark.parametrize("name", PAGES)
def test_the_program_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (program,) = PROGRAM.findall(PAGES[name])
    exec(compile(program, f"docs/{name}.md", "exec"), {"__name__": "page"})


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_are_known(command: str) -> None:
    program, verb, *arguments = shlex.split(command)
    known = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    context = known.make_context(verb, arguments)
    assert program == "forebay" and context.params


def test_every_check_is_described() -> None:
    table = PAGES["verify"].partition("| check |")[2].partition("\n\n")[0]
    for name in ("loss", "random numbers", "gradients", "accumulated gradients", "parameters after one step"):
        assert f"| {name} |" in table


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files(name: str) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", PAGES[name])
    assert [target for target in targets if not (ROOT / "docs" / target).exists()] == []
