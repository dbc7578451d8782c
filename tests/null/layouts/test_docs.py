"""docs/layout.md does what it says: its file, its commands, its program."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.buffer_csv import read_buffers
from forebay.buffers import Addresses, BufferSet
from forebay.checking.addresses import check_addresses
from forebay.cli.main import app

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "layout.md").read_text(encoding="utf-8")
FILE = re.findall(r"^```csv\n(.*?)^```$", PAGE, re.M | re.S)[0]
COMMANDS = [
    shlex.split(line.removeprefix("$ "))[1:]
    for body in re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)
    for line in body.splitlines()
    if "buffers.csv" in line  # those of a model are in tests/parity/test_layout_cli.py
]
PROGRAMS = re.findall(r"<!-- run by \S+ -->\n```python\n(.*?)^```$", PAGE, re.M | re.S)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "buffers.csv").write_text(FILE)
    return tmp_path


def test_the_commands_lay_out_the_file(page: Path) -> None:
    assert len(COMMANDS) == 3
    answers = []
    for command in COMMANDS:
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        answers.append(done.output)
    assert "which no layout can better" in " ".join(answers[0].split())
    told = json.loads(answers[2])
    assert (told["height"], told["lower_bound"], told["capacity"], told["feasible"]) == (12, 12, 12, True)
    check_addresses(
        Addresses(BufferSet(read_buffers(page / "buffers.csv")), tuple(told["offsets"].values()), "", True, 0.0)
    )
    placed = (page / "placed.csv").read_text().splitlines()
    assert placed[0] == "id,lower,upper,size,offset"
    assert [line.rsplit(",", 1)[0] for line in placed[1:]] == FILE.splitlines()[1:]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["buffers.csv", "--capacity", "11"], 1, "12 bytes are live at one time"),
        (["buffers.csv", "--capacity", "much"], 2, "--capacity"),
        (["missing.csv"], 2, "cannot read missing.csv"),
        (["buffers.csv", "--layout", "worst-fit"], 2, "there is no layout 'worst-fit'"),
        (["buffers.csv", "--seconds", "0"], 2, "more than 0"),
        (["buffers.csv", "--out", "no/such/folder.csv"], 2, "--out no/such/folder.csv: there is no folder"),
        (["buffers.csv", "--out", "."], 1, "cannot write the addresses"),
    ],
)
def test_what_does_not_fit_and_what_is_wrong(page: Path, arguments: list[str], code: int, words: str) -> None:
    done = CliRunner().invoke(app, ["layout", *arguments])
    assert (done.exit_code, words in " ".join(done.output.split())) == (code, True), done.output
    assert "Traceback" not in done.output


def test_the_program_runs() -> None:
    assert len(PROGRAMS) == 1
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(PROGRAMS[0], "docs/layout.md", "exec"), {"__name__": "page"})
    assert out.getvalue() == "8 8 True\n"
