"""The process beside the storage: it dies, it fails, it is stopped, its session is killed. Nothing hangs or is left."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import weakref
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import pytest

import forebay
from forebay.arenas import arenas
from forebay.errors import ConfigError, ForebayError, HostOutOfMemory, StorageError
from forebay.memory import Ledger, Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.runtime.storage_orders import Order
from forebay.runtime.storage_side import StoragePolicy, StorageWorker
from forebay.tiers.shared import SharedArena, mapped
from tests.faults.programs import SOON, until
from tests.faults.residue import nothing_left_behind
from tests.faults.trained import Trained, disk_plan, network

__all__ = ["nothing_left_behind"]

STATES = ("exp_avg", "exp_avg_sq")


def at_storage(folder: Path) -> Plan:
    """Parameters and states of every block on disk, updated there a few chunks a block."""
    plan = disk_plan(folder)
    placements = tuple(p.updating(Update.STORAGE) for p in plan.placements)
    sizes = arenas(find_blocks(network()).model, placements, plan.streaming, STATES)
    return replace(plan, placements=placements, host=sizes.host, disk=sizes.disk)


def worker_of(run: Trained) -> StorageWorker:
    beside = session_of(run.model).session.store.beside
    assert beside is not None
    return beside.worker


def alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has 0.2 seconds for everything."""
    quick = StoragePolicy(patience=0.2, grace=0.2)
    monkeypatch.setattr("forebay.runtime.storage_side.StoragePolicy", lambda: quick)


def stepped(run: Trained) -> None:
    """A step, and what it has asked for."""
    run.backward()
    run.optimizer.step()
    forebay.synchronize(run.model)


def test_it_dies_and_every_step_says_so(tmp_path: Path) -> None:
    run = Trained(at_storage(tmp_path), tmp_path)
    run.steps(1)
    run.assert_equal()
    worker = worker_of(run)
    # An interrupt is not for it: who presses Ctrl-C stops the session, which is not done with it yet.
    os.kill(worker.process_id, signal.SIGINT)
    run.steps(1)
    run.assert_equal()
    os.kill(worker.process_id, signal.SIGKILL)
    with pytest.raises(
        StorageError, match=r"was ended by signal 9, asked to update block 0.*resume from what was saved"
    ):
        stepped(run)
    for _ in range(2):
        with pytest.raises(StorageError, match="was ended by signal 9"):
            stepped(run)
    with contextlib.suppress(ForebayError):
        forebay.close(run.model)
    run.device.close()
    assert run.device.usage().live == 0 and not alive(worker.process_id)


def test_what_fails_there_is_told_here_and_a_dropped_model_leaves_nothing(tmp_path: Path) -> None:
    run = Trained(at_storage(tmp_path), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    worker = worker_of(run)
    process, gone = worker.process_id, weakref.ref(run.model)
    with pytest.raises(StorageError, match=r"failed, asked to update block 0: IndexError"):
        worker.update(Order("0", 999, 0, {}))
    with pytest.raises(StorageError, match="failed, asked to update block 0"):
        worker.update(Order("1", 0, 0, {}))
    device = run.device
    del run, worker
    gc.collect()
    assert gone() is None and device.usage().live == 0
    device.close()
    assert not alive(process)


def test_one_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    monkeypatch.setattr("forebay.runtime.storage_side._PROGRAM", "import time; time.sleep(600)")
    run = Trained(at_storage(tmp_path), tmp_path)
    worker = worker_of(run)
    with pytest.raises(StorageError, match=r"has not answered for 0.2 seconds, asked to be started; check the disk"):
        stepped(run)
    with contextlib.suppress(ForebayError):
        forebay.close(run.model)
    run.device.close()
    assert not alive(worker.process_id)


class Paused:
    """A channel at which both processes stand still when first an answer is looked for."""

    def __init__(self, channel: Connection[Any, Any]) -> None:
        self._channel = channel
        self.send, self.recv, self.close = channel.send, channel.recv, channel.close
        self.looks = 0

    def poll(self, seconds: float) -> bool:
        self.looks += 1
        return self.looks > 1 and self._channel.poll(seconds)


def test_a_pause_of_both_is_not_a_process_that_does_not_answer(tmp_path: Path) -> None:
    run = Trained(at_storage(tmp_path), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    worker = worker_of(run)
    paused = Paused(worker._channel)
    worker._channel = cast("Connection[Any, Any]", paused)
    run.steps(1)
    run.assert_equal()
    assert paused.looks > 1
    forebay.close(run.model)
    run.device.close()


def test_one_that_is_stopped_is_given_up_and_cannot_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Trained(at_storage(tmp_path), tmp_path)
    run.steps(1)
    forebay.synchronize(run.model)
    worker = worker_of(run)
    worker._policy = StoragePolicy(patience=0.2, grace=0.2)
    os.kill(worker.process_id, signal.SIGSTOP)
    with pytest.raises(StorageError, match=r"0.2 seconds, asked to update block 0; a signal has stopped it"):
        stepped(run)
    # It is ended, and not left to write states at some time when somebody lets it run.
    assert until(lambda: not alive(worker.process_id))
    with pytest.raises(StorageError, match=r"a signal has stopped it.*resume from what was saved"):
        stepped(run)
    with contextlib.suppress(ForebayError):
        forebay.close(run.model)
    run.device.close()


@pytest.mark.parametrize("wrong", [{"patience": 0.0}, {"grace": -1.0}, {"patience": float("nan")}])
def test_patience_is_more_than_nothing(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be more than 0 seconds"):
        StoragePolicy(**wrong)


@pytest.mark.parametrize(
    ("error", "raised"),
    [(KeyboardInterrupt, KeyboardInterrupt), (RuntimeError, RuntimeError), (OSError, StorageError)],
)
def test_whatever_stops_it_at_its_start_leaves_nothing_open(
    error: type[BaseException], raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``nothing_left_behind`` looks for files, threads and processes."""
    pipes: list[Any] = []

    def watched() -> Any:
        pipes.extend(Pipe())
        return pipes

    def refuse(*command: Any, **how: Any) -> Any:
        raise error("no more of them")

    monkeypatch.setattr("forebay.runtime.storage_side.Pipe", watched)
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(raised):
        Trained(at_storage(tmp_path), tmp_path)
    gc.collect()
    assert len(pipes) == 2 and all(end.closed for end in pipes)


def test_it_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no-such-python"))
    with pytest.raises(StorageError, match=r"cannot be started.*no-such-python.*choose another policy"):
        Trained(at_storage(tmp_path), tmp_path)
    gc.collect()


def test_it_does_not_find_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.runtime.storage_side._PROGRAM", "raise SystemExit('no torch today')")
    run = Trained(at_storage(tmp_path), tmp_path)
    with pytest.raises(StorageError, match=r"exit code 1, asked to be started; its last words: no torch today"):
        stepped(run)
    with contextlib.suppress(ForebayError):
        forebay.close(run.model)
    run.device.close()


SESSION = """
import sys, torch
from pathlib import Path
from tests.faults.test_storage_side_faults import Trained, at_storage, worker_of
run = Trained(at_storage(Path(sys.argv[1])), Path(sys.argv[1]))
run.steps(1)
forebay = __import__("forebay")
forebay.synchronize(run.model)
print(worker_of(run).process_id, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)], ids=str)
def test_it_ends_with_its_session(how: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SESSION, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as session:
        assert session.stdout is not None and session.stdin is not None
        process = int(session.stdout.readline())
        assert alive(process)
        session.send_signal(how)
        session.wait(SOON)
        assert until(lambda: not alive(process))
    # The files have no names; an interpreter that was killed leaves its empty folder, as with any disk.
    for folder in tmp_path.iterdir():
        assert how is signal.SIGKILL and not any(folder.iterdir())
        folder.rmdir()


# Memory that two processes have.


def test_shared_memory_is_counted_and_given_back() -> None:
    ledger = Ledger(Tier.HOST, 10_000)
    with SharedArena(10_000, ledger=ledger, what="cells") as arena:
        assert ledger.usage().live == 10_000 and arena.memory.numel() == 10_000 and not arena.memory.any()
        assert arena.memory.data_ptr() % 4096 == 0
        arena.memory[-1] = 7
        assert mapped(arena.descriptor, 10_000)[-1] == 7
        with pytest.raises(HostOutOfMemory):
            SharedArena(1, ledger=ledger, what="more")
    arena.close()
    assert ledger.usage().live == 0 and arena.memory.numel() == 0


def test_the_machine_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, flags: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    ledger = Ledger(Tier.HOST, None)
    with pytest.raises(HostOutOfMemory, match=r"cells: the machine refused .* of shared memory .*Too many open files"):
        SharedArena(64, ledger=ledger, what="cells")
    assert ledger.usage().live == 0


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), ValueError("too large")], ids=lambda error: type(error).__name__
)
def test_whatever_stops_it_counts_nothing_and_closes_what_it_has_opened(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []

    def refuse(descriptor: int, nbytes: int) -> None:
        opened.append(descriptor)
        raise error

    monkeypatch.setattr("forebay.tiers.shared.mapped", refuse)
    ledger = Ledger(Tier.HOST, None)
    with pytest.raises(type(error)):
        SharedArena(64, ledger=ledger, what="cells")
    assert ledger.usage().live == 0
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])
