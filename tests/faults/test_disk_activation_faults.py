"""Activations on their way to disk when things go wrong: that is told, the next step is right, nothing is left."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import DISK_BLOCK, DISK_BOUNCE
from forebay.budgets import DiskBudget
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import DiskFull, DoesNotFit, ForebayError, SessionClosed, StorageError
from forebay.plans import Plan
from forebay.runtime.hooks import session_of
from forebay.timeline import Lane
from forebay.treatments import Fate
from tests.faults.test_offload_faults import (
    DEPTH,
    EACH,
    Refuses,
    Stop,
    Tower,
    assert_a_step_like_plain_pytorch,
    assert_closed,
    batch,
    plan_moving,
)
from tests.parity.compare import adamw
from tests.parity.recomputing import AMPLE

FILE = 2 * DEPTH * EACH
RING = 3 * EACH


def plan_to_disk(model: nn.Module, folder: Path) -> Plan:
    """Two results of each layer go to disk, by way of a ring that holds three."""
    plan = plan_moving(model)
    chosen = tuple(
        replace(s, treatments=tuple(replace(t, fate=Fate.DISK) for t in s.treatments)) for s in plan.activations
    )
    return replace(
        plan,
        activations=chosen,
        streaming=replace(plan.streaming, host_activations=0, disk_activations=FILE, disk_window=RING),
        budget=replace(plan.budget, disk=DiskBudget(str(folder))),
        host=plan.host - FILE + RING + DISK_BLOCK * DISK_BOUNCE,
        disk=FILE,
    )


class Trial:
    """A tower whose activations go to ``folder``, and what there was before."""

    def __init__(self, folder: Path, model: Tower | None = None, delays: Delays | None = None) -> None:
        self.folder = folder
        # Before everything else: see ``assert_right_and_close``.
        self.leaf = torch.ones((), requires_grad=True)
        self.oldest = 1.0 * self.leaf
        self.threads = threading.active_count()
        self.device = CpuDevice(AMPLE, delays=delays)
        model = model or Tower()
        self.model, self.optimizer = forebay.prepare(
            model,
            adamw(list(model.parameters())),
            plan=plan_to_disk(model, folder),
            device_memory=AMPLE,
            disk=str(folder),
            device=self.device,
        )
        attachment = session_of(self.model)
        assert attachment is not None
        self.session = attachment.session
        self.standing = self.ledgers()

    def ledgers(self) -> tuple[int, ...]:
        """Live bytes of every tier."""
        tiers = self.session.resources.ledgers
        return self.device.ledger.live, tiers.host.live, tiers.pinned.live, tiers.disk.live

    def assert_right_and_close(self) -> None:
        """A step is as it should be, and everything is where it was before."""
        # torch's engine keeps what is left of a backward that failed in the thread's queue, the newest node first: it
        # is let go when a later backward has come to an older node. And the error's frames and the completion that
        # raised it hold each other, but for those that the lane is about to let go.
        torch.autograd.grad(self.oldest, self.leaf)
        self.device.synchronize()
        gc.collect()
        assert_a_step_like_plain_pytorch(self.model, self.optimizer)
        self.optimizer.zero_grad()
        forebay.synchronize(self.model)
        assert self.session.stash.kept == self.session.stash.taken == 0
        assert self.ledgers() == self.standing
        self.close()

    def close(self) -> None:
        assert_closed(self.model, self.device)
        assert self.ledgers() == (0, 0, 0, 0)
        assert not list(self.folder.iterdir())
        assert threading.active_count() == self.threads


class Faulty:
    """Makes the ``nth`` call (from 0) of one method of a disk file fail, as the disk would."""

    def __init__(self, trial: Trial, verb: str, nth: int) -> None:
        depot = trial.session.store.depots[Fate.DISK]
        self.file = depot._file  # type: ignore[attr-defined]
        self.call: Callable[..., None] = getattr(self.file, verb)
        self.verb, self.left = verb, nth

    def __call__(self, offset: int, buffer: torch.Tensor) -> None:
        self.left -= 1
        if self.left == -1:
            raise StorageError(f"cannot {self.verb}: the disk is gone")
        self.call(offset, buffer)


@contextmanager
def failing(trial: Trial, verb: str, nth: int) -> Iterator[None]:
    faulty = Faulty(trial, verb, nth)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(faulty.file), verb, lambda self, offset, buffer: faulty(offset, buffer))
        yield


@pytest.mark.parametrize("nth", [0, 3, 2 * DEPTH - 1])
@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_job_that_fails_is_told_in_backward(verb: str, nth: int, tmp_path: Path) -> None:
    """And whoever has the same bytes of the ring afterwards has no part in it."""
    trial = Trial(tmp_path)
    with failing(trial, verb, nth):
        loss = trial.model(batch())
        with pytest.raises(StorageError, match=f"cannot {verb}: the disk is gone"):
            loss.backward()
    del loss
    trial.assert_right_and_close()


def test_a_write_that_fails_in_a_pass_without_backward(tmp_path: Path) -> None:
    """Told by whoever waits for all, once."""
    trial = Trial(tmp_path)
    with failing(trial, "write", 1):
        trial.model(batch())
        with pytest.raises(StorageError, match="the disk is gone"):
            forebay.synchronize(trial.model)
    trial.assert_right_and_close()


@pytest.mark.parametrize("nth", [0, 4])
@pytest.mark.parametrize("verb", ["offload", "write", "read", "reload"])
def test_a_job_that_no_lane_takes(verb: str, nth: int, tmp_path: Path) -> None:
    trial = Trial(tmp_path, delays=Refuses(verb, nth))
    with pytest.raises(ForebayError, match=f"refused: {verb} layers"):
        trial.model(batch()).backward()
    trial.assert_right_and_close()


LATE = (Lane.D2H, Lane.DISK_WRITE, Lane.DISK_READ, Lane.H2D)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_step_after_a_failed_forward(error: type[BaseException], tmp_path: Path) -> None:
    model = Tower(on_layer=Stop(error))
    trial = Trial(tmp_path, model, RandomDelays(1, 0.002, LATE))
    with pytest.raises(error):
        trial.model(batch())
    trial.assert_right_and_close()


def test_an_error_between_forward_and_backward(tmp_path: Path) -> None:
    """The ring, the file and the device are for the next pass, late as the jobs of the last one are."""
    trial = Trial(tmp_path, delays=RandomDelays(2, 0.002, LATE))
    for _ in range(3):
        loss = trial.model(batch())
        del loss
    trial.assert_right_and_close()


def test_an_error_in_the_middle_of_backward(tmp_path: Path) -> None:
    """What was read ahead, and nobody came for, is let go."""
    trial = Trial(tmp_path, delays=RandomDelays(3, 0.002, LATE))

    def stop(gradient: torch.Tensor) -> None:
        raise RuntimeError("stop")

    handle = trial.model.layers[2].register_forward_hook(lambda m, a, out: out.register_hook(stop) and None)
    with pytest.raises(RuntimeError, match="stop"):
        trial.model(batch()).backward()
    handle.remove()
    trial.assert_right_and_close()


def test_a_forward_while_another_graph_is_read_ahead(tmp_path: Path) -> None:
    """A part of the first graph's backward has begun, and its second part comes after another forward."""
    trial = Trial(tmp_path, delays=RandomDelays(4, 0.002, LATE))
    plain = Tower()
    gradients = []
    for model in (trial.model, plain):
        loss = model(batch())
        last = list(model.layers[DEPTH - 1].parameters())
        part = torch.autograd.grad(loss, last, retain_graph=True)
        model(batch() + 1)
        loss.backward()
        made = forebay.gradients(model) if model is trial.model else {n: p.grad for n, p in model.named_parameters()}
        gradients.append([*part, *(g.clone() for _, g in sorted(made.items()) if g is not None)])
        del loss, part, made
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    gradients.clear()
    trial.optimizer.zero_grad()
    gc.collect()
    trial.close()


@pytest.mark.parametrize("begun", [False, True], ids=["before backward", "in backward"])
def test_close_with_a_live_graph(begun: bool, tmp_path: Path) -> None:
    trial = Trial(tmp_path, delays=RandomDelays(5, 0.002, LATE))
    loss = trial.model(batch())
    if begun:
        last = list(trial.model.layers[DEPTH - 1].parameters())
        torch.autograd.grad(loss, last, retain_graph=True)
    forebay.close(trial.model)
    with pytest.raises(SessionClosed, match="went when the model was closed"):
        loss.backward()
    del loss
    trial.close()


def test_a_model_that_is_dropped_gives_everything_back(tmp_path: Path) -> None:
    trial = Trial(tmp_path)
    trial.model(batch()).backward()
    ledgers, device, threads = trial.session.resources.ledgers, trial.device, trial.threads
    del trial
    gc.collect()
    assert ledgers.host.live == ledgers.disk.live == 0
    assert not list(tmp_path.iterdir())
    device.close()
    assert threading.active_count() == threads


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the file is made: nothing is left, and the model is as it was."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("os.posix_fallocate", full)
    model, threads = Tower(), threading.active_count()
    device = CpuDevice(AMPLE)
    with pytest.raises(DiskFull, match="No space left"):
        forebay.prepare(
            model,
            adamw(list(model.parameters())),
            plan=plan_to_disk(model, tmp_path),
            device_memory=AMPLE,
            disk=str(tmp_path),
            device=device,
        )
    assert not list(tmp_path.iterdir())
    assert device.ledger.live == 0
    assert not model._forward_pre_hooks
    device.close()
    assert threading.active_count() == threads
    model(batch()).backward()


def test_a_disk_that_is_full_when_micro_batches_pass_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was opened for them before goes again, and is in no account."""

    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    trial = Trial(tmp_path)
    store = trial.session.store
    arenas = store.arenas
    with monkeypatch.context() as refusing:
        refusing.setattr("os.posix_fallocate", full)
        with pytest.raises(DiskFull, match="No space left"):
            store.make_room(3)
    assert trial.ledgers() == trial.standing
    assert store.arenas == arenas
    store.make_room(3)
    assert len(store.arenas) == len(arenas) + 1
    trial.close()


def test_a_disk_budget_that_is_too_small(tmp_path: Path) -> None:
    model = Tower()
    with pytest.raises(DoesNotFit, match=r"disk: the plan needs .* are allowed"):
        forebay.prepare(
            model,
            adamw(list(model.parameters())),
            plan=plan_to_disk(model, tmp_path),
            device_memory=AMPLE,
            disk=f"{tmp_path}:{FILE - 1}",
            device="cpu",
        )
    assert not list(tmp_path.iterdir())
