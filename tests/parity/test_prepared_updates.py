"""Updates made ready once: what lies in memory is looked up and not found out again, what passes through a ring is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.fasthost.timed import AMPLE, TimedModel, plan_by_hand
from forebay import api
from forebay.budgets import DiskBudget
from forebay.memory import Tier
from forebay.runtime.applying import Task
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.runtime.session import Session
from forebay.runtime.updates import KEPT

LAYERS, ROWS, CHUNKS = 2, 64, 4


class Ops(TorchDispatchMode):
    """Counts the ops of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        self.count += 1
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def trained(states: Tier, folder: Path) -> tuple[TimedModel, Session]:
    """A model that has taken steps with its updates ahead, and steps that were clipped."""
    model = TimedModel(LAYERS, ROWS * TimedModel.WIDTH)
    names = [b.name for b in find_blocks(model).model.blocks if b.gradient_nbytes]
    disk = DiskBudget(str(folder)) if states is Tier.DISK else None
    chunk = ROWS * TimedModel.WIDTH // CHUNKS
    plan = plan_by_hand(model, states=states, overlap=True, speculate=names, chunk=chunk, own_slots=True, disk=disk)
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    where = None if disk is None else str(folder)
    prepared, optimizer = api.prepare(model, given, plan=plan, device_memory=AMPLE, disk=where, device="cpu")
    for limit in (1e9, 1e9, 1e9, 1e-3, 1e9, 1e-3):
        prepared(torch.zeros(1, TimedModel.WIDTH)).backward()
        torch.nn.utils.clip_grad_norm_(prepared.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
    api.synchronize(prepared)
    attachment = session_of(prepared)
    assert attachment is not None
    return model, attachment.session


@pytest.mark.parametrize("states", [Tier.HOST, Tier.DISK])
def test_what_is_in_memory_is_made_ready_once(states: Tier, tmp_path: Path) -> None:
    model, session = trained(states, tmp_path)
    try:
        kept = [len(state.prepared) for state in session.store.blocks.values() if state.gradients]
        # From either copy into the other, and in place in either.
        assert kept == [4 * CHUNKS if states is Tier.HOST else 0] * LAYERS
    finally:
        api.close(model)
        model.pace.compute.close()


def test_an_update_that_is_ready_asks_torch_for_nothing(tmp_path: Path) -> None:
    """Each op would give the interpreter away, and wait for it while the model's own Python runs."""
    model, session = trained(Tier.HOST, tmp_path)
    try:
        state = next(state for state in session.store.blocks.values() if state.gradients)
        (name,) = state.gradients
        chunk, group = state.layout.chunks[1], session.stepping.hyperparameters([name])[name]
        landed = {name: state.gradients[name].host}
        current = state.current
        loan = current.parameters.check_out(0, current.parameters.nbytes, "", current.parameters)
        states = current.states.check_out(chunk.offset, chunk.nbytes, "", current.states)
        for made_ready in (False, True):
            if not made_ready:
                # As many as are kept, of parameters that have no gradient now.
                state.prepared.clear()
                state.prepared.update(dict.fromkeys(range(KEPT * CHUNKS), lambda step, group: None))
            with Ops() as ops:
                task = {name: Task(7, group)}
                session.stepping._updater.run_chunk(state, chunk, loan, states, task, landed, {name: 0.5})
            assert (ops.count == 0) is made_ready
        assert len(state.prepared) == 1
    finally:
        api.close(model)
        model.pace.compute.close()
