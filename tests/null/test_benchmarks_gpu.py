"""``scripts/gpu``: parts that are started, timed, continued and kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.case import DeviceKind
from benchmarks.cases import CASES
from tests.null.benching import Clock


def part(name: str, seconds: int = 100, command: tuple[str, ...] = ()) -> gpu.Part:
    return gpu.Part(name, seconds, command, f"{name}.log")


class Machine:
    """Runs parts by a script: name -> (seconds it takes, exit code). Unlisted parts take 10 seconds and pass."""

    def __init__(self, folder: Path, script: Mapping[str, tuple[float, int | None]] | None = None) -> None:
        self.folder, self.script, self.clock = folder, dict(script or {}), Clock()
        self.ran: list[str] = []

    def call(self, work: list[gpu.Part], budget: float = 300.0, run: Callable[..., int | None] | None = None) -> int:
        self.ran = []
        return gpu.advance(work, self.folder, budget, run=run or self._run, clock=self.clock, say=lambda line: None)

    def _run(self, part: gpu.Part, log: Path) -> int | None:
        self.ran.append(part.name)
        seconds, code = self.script.get(part.name, (10.0, 0))
        self.clock.now += seconds
        return code


def test_parts_are_started_while_their_limit_fits_and_continued_later(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"a": (90.0, 0), "b": (90.0, 0), "c": (30.0, 0)})
    work = [part("a"), part("b"), part("c", seconds=150)]
    assert machine.call(work) == gpu.MORE
    assert machine.ran == ["a", "b"]
    assert machine.call(work) == gpu.FINISHED
    assert machine.ran == ["c"]
    assert machine.call(work) == gpu.FINISHED
    assert machine.ran == []


def test_a_failure_and_a_timeout_do_not_hold_up_the_rest(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"a": (5.0, 2), "b": (100.0, None)})
    work = [part("a"), part("b"), part("c")]
    assert machine.call(work) == gpu.FAILED
    assert machine.ran == ["a", "b", "c"]
    kept = json.loads((tmp_path / "state.json").read_text())["parts"]
    assert [(name, record["status"], record["exit_code"]) for name, record in kept.items()] == [
        ("a", "failed", 2),
        ("b", "timed out", None),
        ("c", "done", 0),
    ]
    # The next call has nothing new to do: it tries again what failed.
    machine.script = {"b": (100.0, None)}
    assert machine.call(work) == gpu.FAILED
    assert machine.ran == ["a", "b"]
    machine.script = {}
    assert machine.call(work) == gpu.FINISHED
    assert machine.ran == ["b"]


def test_what_never_ran_comes_before_what_failed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, {"a": (100.0, 1), "b": (150.0, 0)})
    work = [part("a"), part("b", seconds=150), part("c")]
    assert machine.call(work) == gpu.MORE
    assert machine.call(work) == gpu.FAILED
    assert machine.ran == ["c"]


def test_a_part_cut_off_with_its_machine_runs_again(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    work = [part("a"), part("b")]

    def cut_off(part: gpu.Part, log: Path) -> int | None:
        if part.name == "b":
            raise KeyboardInterrupt
        return 0

    with pytest.raises(KeyboardInterrupt):
        machine.call(work, run=cut_off)
    assert machine.call(work) == gpu.FINISHED
    assert machine.ran == ["b"]


def shell(text: str, seconds: int = 60) -> gpu.Part:
    return part("shell", seconds, ("bash", "-c", text))


def test_a_part_writes_its_log_and_gives_its_exit_code(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert gpu.execute(shell("echo to stdout; echo to stderr >&2; exit 4"), log, {}) == 4
    assert log.read_text() == "== shell\nto stdout\nto stderr\n"
    assert gpu.execute(part("gone", command=("./no-such-program",)), log, {}) == 127
    assert "cannot run ./no-such-program" in log.read_text()


def test_a_part_ends_at_its_limit_with_all_it_started(tmp_path: Path) -> None:
    pipe, log = tmp_path / "pipe", tmp_path / "log"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    text = f"(echo started; sleep 1000) >{pipe} & wait"
    assert gpu.execute(shell(text, seconds=1), log, {"PATH": "/usr/bin:/bin"}) is None
    assert "ended at its limit of 1 s" in log.read_text()
    os.set_blocking(reader, True)
    with os.fdopen(reader, "rb") as file:
        assert file.read() == b"started\n"  # the end of a pipe: nobody holds the other side any more


def test_a_log_keeps_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "LOG_BYTES", 1000)
    log = tmp_path / "log"
    assert gpu.execute(shell("seq 1000"), log, {"PATH": "/usr/bin:/bin"}) == 0
    assert log.stat().st_size < 1100
    assert log.read_text().endswith("999\n1000\n")


def test_the_folder_of_a_whole_run_can_travel(tmp_path: Path) -> None:
    work = gpu.parts(tmp_path, revision="abc")
    assert [part.name for part in work[:3]] == ["machine", "measuring", "tests"]
    assert {part.name for part in work[3:]} == {case.name for case in CASES if case.device is DeviceKind.CUDA}
    files = {part.log for part in work} | {"state.json", "tests.xml", "results.jsonl"}
    assert len(files) <= 8


def test_a_machine_without_a_card_is_told_so(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-P", "-m", "benchmarks.gpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, env={"PYTHONPATH": str(root)}, capture_output=True, text=True, check=False)
    assert done.returncode == gpu.FAILED
    assert "has no NVIDIA card" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_budget_too_short_for_a_part_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu.main(["--out", str(tmp_path), "--budget-seconds", "100"])
    assert ended.value.code == 2
    assert "--budget-seconds must be at least 360" in capsys.readouterr().err
