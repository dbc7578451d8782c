"""PyTorch's memory snapshots: what was there before, what was given back, and files that are none."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.errors import ConfigError
from forebay.snapshot import read_snapshot
from forebay.units import MiB


def frame(name: str, line: int, file: str) -> dict[str, Any]:
    return {"name": name, "line": line, "filename": file}


def entry(action: str, addr: int, size: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 0, "frames": list(frames)}


STACK = (
    frame("empty", 0, "??"),
    frame("forward", 7, "/env/torch/nn/modules/linear.py"),
    frame("attend", 41, "/home/me/model.py"),
)
SNAPSHOT: dict[str, Any] = {
    "segments": [
        {
            "device": 0,
            "address": 1000 * MiB,
            "total_size": 20 * MiB,
            "stream": 0,
            "segment_type": "large",
            "blocks": [
                {"size": 6 * MiB, "requested_size": 6 * MiB - 5, "state": "active_allocated", "frames": []},
                {"size": 4 * MiB, "requested_size": 4 * MiB, "state": "active_allocated", "frames": list(STACK)},
                {"size": 10 * MiB, "requested_size": 0, "state": "inactive", "frames": []},
            ],
        }
    ],
    "device_traces": [
        [
            entry("free_requested", 1010 * MiB, 10 * MiB),
            entry("free_completed", 1010 * MiB, 10 * MiB),
            entry("segment_alloc", 5000 * MiB, 20 * MiB),
            entry("alloc", 1006 * MiB, 4 * MiB, *STACK),
            entry("alloc", 1010 * MiB, 2 * MiB, *STACK[:2]),
            entry("free_completed", 1010 * MiB, 2 * MiB),
        ]
    ],
}


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    return path


def test_what_was_there_before_comes_first(snapshot: Path) -> None:
    found = read_snapshot(snapshot)
    # 10 MiB were given back in the history and 6 are still there: both were there before. Sizes are those asked for.
    assert found.live == (10 * MiB, 16 * MiB - 5, 6 * MiB - 5, 10 * MiB - 5, 12 * MiB - 5, 10 * MiB - 5)
    names = [found.requests[event].what for event in found.events if event >= 0]
    assert names == ["unknown", "unknown", "model.py:41 attend", "?? empty"]
    assert found.observed == 20 * MiB
    assert "2 requests were there before" in found.notes[0]


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"not a pickle", "cannot be read"),
        (pickle.dumps(Evil()), "plain values alone"),
        (pickle.dumps([1, 2]), "that forebay knows"),
        (pickle.dumps({"segments": [], "device_traces": [[]]}), "no history"),
        (pickle.dumps({"segments": []}), "that forebay knows"),
        (pickle.dumps({"segments": [], "device_traces": [[entry("alloc", 1, -512)]]}), "a request of -512 bytes"),
        (pickle.dumps({"segments": [], "device_traces": [[entry("alloc", 1, 1 << 60)]]}), f"a request of {1 << 60}"),
        (pickle.dumps({"segments": [], "device_traces": [[entry("alloc", 1, "x")]]}), "a request of 'x'"),  # type: ignore[arg-type]
    ],
)
def test_files_that_are_no_snapshots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_snapshot(path)
    assert not (tmp_path / "ran").exists()


def test_the_verb_shows_every_allocator_and_draws_them(snapshot: Path, tmp_path: Path) -> None:
    picture = tmp_path / "addresses.png"
    done = CliRunner().invoke(app, ["fragmentation", str(snapshot), "--plot", str(picture), "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    names = [one["allocator"] for one in told["allocators"]]
    assert names == ["caching", "expandable", "gmlake", "zero-contiguous", "arena"]
    assert told["live"] == 16 * MiB - 5
    assert all(one["peak_reserved"] >= one["fits_in"] >= told["live"] for one in told["allocators"])
    assert told["allocators"][-1]["over"] < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(app, ["fragmentation", str(snapshot)])
    assert shown.exit_code == 0 and "does with the smallest device" in " ".join(shown.output.split())


@pytest.mark.parametrize(("nbytes", "told"), [(9, False), (3 * MiB, True)])
def test_no_share_of_less_than_an_allocator_takes_at_the_least_is_shown(
    tmp_path: Path, nbytes: int, told: bool
) -> None:
    file = tmp_path / "buffers.csv"
    file.write_text(f"id,lower,upper,size\na,0,2,{nbytes}\n")
    done = CliRunner().invoke(app, ["fragmentation", str(file)])
    assert done.exit_code == 0, done.output
    assert ("%" in done.output, "at the least" not in " ".join(done.output.split())) == (told, told)


def test_misuse_of_the_verb(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    for arguments, words in (
        ([str(tmp_path / "missing.pickle")], "cannot read"),
        ([str(tmp_path / "empty")], "no run in it"),
        ([str(tmp_path / "bad.json")], "bad.json"),
        ([str(tmp_path / "missing.pickle"), "--plot", "picture.gif"], "--plot"),
    ):
        done = CliRunner().invoke(app, ["fragmentation", *arguments])
        assert (done.exit_code, words in " ".join(done.output.split())) == (2, True), done.output
