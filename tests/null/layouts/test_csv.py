"""minimalloc's CSV: what is written is read again, and what is wrong is named with its line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given

from forebay.buffer_csv import read_buffers, write_offsets
from forebay.buffers import Addresses, Buffer, BufferSet
from forebay.errors import ConfigError, StorageError
from tests.null.layouts.making import buffer_tuples

EXAMPLE = "id,lower,upper,size\nb1,0,3,4\nb2,3,9,4\nb3,0,9,4\nb4,9,21,4\nb5,0,21,4\n"
"""That of minimalloc's own manual; it fits into 12 bytes."""


@given(buffers=buffer_tuples(alignments=(1, 16)))
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, buffers: tuple[Buffer, ...]) -> None:
    path = tmp_path_factory.mktemp("csv") / "out.csv"
    write_offsets(Addresses(BufferSet(buffers), tuple(range(len(buffers))), "", False, 0.0), path)
    assert read_buffers(path) == buffers


def test_columns_may_come_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("size, upper,id,lower\r\n4,3,b 1,0\r\n\r\n7,9,b2,-3\r\n")
    assert read_buffers(path) == (Buffer("b 1", 0, 3, 4), Buffer("b2", -3, 9, 7))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "first line must name"),
        ("id,lower,upper\n1,0,2\n", "first line must name"),
        ("buffer,start,end,size\n1,0,2,3\n", "older versions .* call these columns id,lower,upper"),
        ("id,lower,upper,size,gaps\n1,0,2,3,0-1\n", "first line must name"),
        ("id,lower,upper,size\n1,0,2\n", "line 2: 4 values"),
        ("id,lower,upper,size\n1,0,2,x\n", "line 2: .*whole numbers"),
        ("id,lower,upper,size\n1,0,2,3\n2,2,2,3\n", "line 3: buffer 2"),
        ("id,lower,upper,size\n1,0,2,-3\n", "line 2: buffer 1"),
        ("id,lower,upper,size\n1,0,2,1e3\n", "whole numbers"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "in.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_buffers(path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_buffers(tmp_path / "missing.csv")
    (tmp_path / "picture.csv").write_bytes(b"\x89PNG\xff\x00")
    with pytest.raises(ConfigError, match="not a CSV file"):
        read_buffers(tmp_path / "picture.csv")
    empty = Addresses(BufferSet(()), (), "", True, 0.0)
    with pytest.raises(StorageError, match="cannot write"):
        write_offsets(empty, tmp_path)
