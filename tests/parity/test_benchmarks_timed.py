"""The model of timed waits: its steps are those of any model, whatever is hidden behind them."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.fasthost.disk_step import STATE_BYTES
from benchmarks.fasthost.engine import moved
from benchmarks.fasthost.hidden import Parts
from benchmarks.fasthost.queued import Compute, QueuedDevice
from benchmarks.fasthost.stepped import ALWAYS, NEVER, Stepped
from benchmarks.fasthost.timed import TimedModel, plan_by_hand, spread
from forebay.budgets import DiskBudget
from forebay.calls import Calls
from forebay.device.base import Completion
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.timeline import Lane

LAYERS, ELEMENTS = 4, 64 * TimedModel.WIDTH


def names_of(model: TimedModel) -> list[str]:
    return [block.name for block in find_blocks(model).model.blocks if block.gradient_nbytes]


def trained(states: Tier, folder: Path, *, overlap: bool, speculate: bool, own_slots: bool = False) -> list[float]:
    def plan(model: TimedModel) -> Plan:
        return plan_by_hand(
            model,
            states=states,
            overlap=overlap,
            speculate=names_of(model)[1:] if speculate else (),
            chunk=16 * 1024,
            own_slots=own_slots,
            disk=DiskBudget(str(folder)) if states is Tier.DISK else None,
            reads=Calls(depth=2),
        )

    stepped = Stepped(LAYERS, ELEMENTS, plan)
    try:
        for max_norm in (NEVER, NEVER, ALWAYS, NEVER):
            stepped.step(max_norm)
        stepped.settle()
        return stepped.losses
    finally:
        stepped.close()


def test_a_step_trains_the_same_in_every_mode(tmp_path: Path) -> None:
    waited = trained(Tier.HOST, tmp_path, overlap=False, speculate=False)
    assert len(set(waited)) == len(waited) == 4  # parameters move, and each forward sees it
    for states in (Tier.HOST, Tier.DISK):
        assert trained(states, tmp_path, overlap=True, speculate=False) == waited
        assert trained(states, tmp_path, overlap=True, speculate=True) == waited
    for speculate in (False, True):
        assert trained(Tier.HOST, tmp_path, overlap=True, speculate=speculate, own_slots=True) == waited
    assert not any(tmp_path.iterdir())


def test_states_on_disk_have_the_bytes_that_the_benchmark_counts(tmp_path: Path) -> None:
    model = TimedModel(LAYERS, ELEMENTS)
    plan = plan_by_hand(model, states=Tier.DISK, overlap=True, chunk=16 * 1024, disk=DiskBudget(str(tmp_path)))
    assert plan.disk == LAYERS * ELEMENTS * STATE_BYTES
    twice = plan_by_hand(
        model,
        states=Tier.DISK,
        overlap=True,
        speculate=names_of(model),
        chunk=16 * 1024,
        disk=DiskBudget(str(tmp_path)),
    )
    assert twice.disk == 2 * plan.disk


def test_without_a_plan_there_is_forward_and_backward_only() -> None:
    plain = Stepped(LAYERS, ELEMENTS, None)
    plain.step(NEVER)
    assert plain.losses == [] and all(p.grad is None for p in plain.model.parameters())
    layer, x = plain.model.layers[0], torch.zeros(1, TimedModel.WIDTH)
    (gradient,) = torch.autograd.grad(layer(x).sum(), layer.weight)
    assert gradient.eq(torch.tensor(1e-3, dtype=torch.bfloat16)).all()
    plain.model.pace.spread(3.0, LAYERS)
    assert (plain.model.pace.forward, plain.model.pace.backward) == (1.0 / LAYERS, 2.0 / LAYERS)
    plain.close()


class Arrived(Completion):
    """Something that was there at a moment of ``time.perf_counter``."""

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def wait(self) -> float:
        return self._moment

    def done(self) -> bool:
        return True


def test_compute_waits_for_bytes_and_not_for_a_core() -> None:
    compute, seen = Compute(), list[int]()
    compute.launch(partial(seen.append, 0), 0.0)
    compute.hold(Arrived(time.perf_counter() - 1.0))
    compute.launch(partial(seen.append, 1), 0.01)
    compute.synchronize()
    assert compute.stalled == 0.0  # whenever the thread came to look
    compute.hold(Arrived(time.perf_counter() + 0.01))
    last = compute.mark()
    compute.launch(partial(seen.append, 2), 0.0)
    assert compute.mark() is not last
    compute.synchronize()
    assert 0.0 < compute.stalled <= 0.01
    assert seen == [0, 1, 2]
    compute.close()


def test_floors_of_a_step() -> None:
    """Of 10 blocks on 2 cores: forward and backward 30 s, the update 15, copies 2 and 1, norms 1."""
    parts = Parts(forward_backward=30.0, update=15.0, fetches=2.0, landings=1.0, norms=1.0)

    def floor(mode: str, *, clipped: bool = False, fetches: float = 1, threads: int = 2) -> float:
        return parts.floor(mode, clipped=clipped, fetches=fetches, layers=10, cores=2, threads=threads)

    first = (1.0 + 15.0 + 2.0) / 10
    assert floor("plain") == pytest.approx(30.0 + 0.1 + 15.0 + 0.2)
    assert floor("speculative") == pytest.approx(30.0 + first)
    # The update does not fit under forward: forward waits for it, and its last block comes after.
    assert floor("deferred") == pytest.approx(20.0 + 0.1 + 15.0 + 2.0 / 2 + 10.0 / 10)
    assert floor("deferred", clipped=True) == floor("speculative", clipped=True)
    assert floor("deferred", clipped=True) == pytest.approx(floor("deferred") + 2.0 / 2)
    # Fetched so often that the cores have no time for anything else.
    assert floor("speculative", fetches=40) == pytest.approx(15.0 + (80.0 + 2.0) / 2)
    # Updates on one core leave the other to what is copied.
    assert floor("deferred", threads=1) == pytest.approx(20.0 + 0.1 + 15.0 + 10.0 / 10)
    assert floor("speculative", fetches=40, threads=1) == pytest.approx((15.0 + 80.0 + 2.0) / 2)


def test_what_is_updated_ahead_is_spread_over_the_model() -> None:
    model = TimedModel(8, TimedModel.WIDTH)
    assert spread(model, 3 / 8) == ["layers.7", "layers.5", "layers.2"]
    assert spread(model, 1.0) == [f"layers.{number}" for number in range(7, -1, -1)]
    assert spread(model, 3 / 4, first=True) == [f"layers.{number}" for number in (0, 1, 3, 4, 5, 7)]
    assert spread(model, 1.0, first=True) == [f"layers.{number}" for number in range(8)]


@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 200, 4096 + 17])
def test_the_copy_engine_copies_wherever_bytes_begin(nbytes: int) -> None:
    """Whole lines of the target go past the caches; what is before and behind is copied, and nothing around it is."""
    moment = np.zeros(2, np.int64)
    source = np.random.default_rng(0).integers(0, 256, nbytes + 128, np.uint8)
    for here in (0, 1, 40):
        for there in (0, 1, 40):
            room = np.full(nbytes + 128, 7, np.uint8)
            moved(room.ctypes.data + there, source.ctypes.data + here, nbytes, moment.ctypes.data)
            assert np.array_equal(room[there : there + nbytes], source[here : here + nbytes])
            assert (room[:there] == 7).all() and (room[there + nbytes :] == 7).all()


def test_the_training_thread_waits_until_a_copy_can_be_issued() -> None:
    """As on a device: for what the copy comes after on the host, and not for compute, nor for the copy itself."""
    compute, going = Compute(), threading.Event()
    device = QueuedDevice(compute)
    source, target = torch.ones(4), torch.zeros(4)
    try:
        update = device.submit(Lane.UPDATE, partial(going.wait, 30.0))
        compute.launch(partial(going.wait, 30.0), 0.0)
        copied = device.copy(Lane.H2D, target, source, after=(device.mark(),))
        device.hold_compute(copied)
        assert not copied.done()
        updated = device.copy(Lane.H2D, target, source, after=(device.mark(), update))
        threading.Timer(0.05, going.set).start()
        device.hold_compute(updated)
        assert update.done()
        updated.wait()
        assert torch.equal(target, source)
        failed = device.copy(Lane.H2D, target, source, after=(device.submit(Lane.UPDATE, partial(int, "x")),))
        device.hold_compute(failed)  # and is not waited for in vain
        with pytest.raises(ValueError, match="invalid literal"):
            failed.wait()
    finally:
        going.set()
        with contextlib.suppress(ValueError):
            device.close()
        compute.close()
