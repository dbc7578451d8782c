"""Where commands print to: how wide it is, and that it is closed or takes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path

import pytest
import typer
from rich.console import Console
from rich.table import Table

from forebay.cli.console import LEAST, USUAL, console, print_answer, print_json, print_lines
from forebay.cli.messages import errors_as_messages
from forebay.cli.progress import PlainProgress
from forebay.cli.streams import print_any_name
from forebay.errors import ConfigError, StorageError

WAYS: list[Callable[[], None]] = [
    lambda: print_answer(Table("tier", title="of 24 GiB")),
    lambda: print_lines("a line", "one more"),
    lambda: print_json({"fits": True}),
]


@pytest.mark.parametrize(("said", "taken"), [(0, USUAL), (1, USUAL), (LEAST - 1, USUAL), (LEAST, LEAST), (133, 133)])
def test_a_terminal_without_columns_has_the_usual_ones(monkeypatch: pytest.MonkeyPatch, said: int, taken: int) -> None:
    monkeypatch.setenv("COLUMNS", str(said))
    assert console().width == console(stderr=True).width == taken


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_stdout_does_not_take_is_refused(
    monkeypatch: pytest.MonkeyPatch, way: Callable[[], None]
) -> None:
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:  # to close it fails where text is left in it
        patch.setattr(sys, "stdout", full)
        with pytest.raises(StorageError, match="cannot write the answer to stdout: No space left on device"):
            way()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        with pytest.raises(StorageError, match="cannot write the answer to stdout: it is closed"):
            way()


@errors_as_messages()
def refuse() -> None:
    PlainProgress(Console(stderr=True)).note("a line of a run")
    raise ConfigError("refused")


def test_a_command_that_stderr_does_not_serve_ends_as_it_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        for stream in (None, full):
            with monkeypatch.context() as patch:
                patch.setattr(sys, "stderr", stream)
                with pytest.raises(typer.Exit) as ended:
                    refuse()
            assert ended.value.exit_code == 2
    assert capsys.readouterr().out == "", "what is for stderr is no answer"


@pytest.mark.parametrize(
    ("encoding", "printed", "bytes_of_it"),
    [
        ("utf-8", "caf\udce9, café", b"caf\xe9, caf\xc3\xa9\n"),
        ("ascii", "caf\udcc3\udca9\u2026 caf\xe9", b"caf\xc3\xa9? caf?\n"),
    ],
    ids=["no UTF-8", "what the encoding lacks"],
)
def test_a_name_is_printed_as_it_is_and_what_stdout_lacks_as_a_question_mark(
    encoding: str, printed: str, bytes_of_it: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding=encoding))
    print_any_name()
    print_lines(printed)
    assert written.getvalue() == bytes_of_it


def test_a_name_that_this_process_cannot_write_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for encoding, told in (("ascii", typer.Exit), ("utf-8", UnicodeEncodeError)):
        with pytest.raises(told), errors_as_messages():
            "caf\xe9\udce9".encode(encoding)
    said = r"forebay: 'caf\xe9\udce9' cannot be written in ascii, as names of files are here; set PYTHONUTF8=1"
    assert capsys.readouterr().err.startswith(said)


def test_a_process_whose_streams_are_closed_or_full(tmp_path: Path) -> None:
    buffers = tmp_path / "buffers.csv"
    buffers.write_text("id,lower,upper,size\n1,0,4,100\n")
    python = f"exec {sys.executable} -m forebay layout {buffers} "
    full = subprocess.run(["sh", "-c", python + ">/dev/full"], stderr=subprocess.PIPE, text=True, check=False)
    said = "forebay: cannot write the answer to stdout: No space left on device\n"
    assert (full.returncode, full.stderr) == (1, said)
    opened = (
        "import os; from forebay.cli.streams import keep_standard_descriptors as keep; keep();"
        "file = os.open('file', os.O_CREAT | os.O_WRONLY); os.write(1, b'words'); os.write(file, b'weights')"
    )
    subprocess.run(["sh", "-c", f'exec {sys.executable} -c "{opened}" >&-'], cwd=tmp_path, check=True)
    assert (tmp_path / "file").read_bytes() == b"weights", "what is said on a closed stream goes to no file"
