"""The model of timed waits: its steps are those of any model, whatever is hidden behind them."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.fasthost.disk_step import STATE_BYTES
from benchmarks.fasthost.hidden import ALWAYS, NEVER, Stepped
from benchmarks.fasthost.timed import TimedModel, plan_by_hand, spread
from forebay.memory import Tier
from forebay.plans import DiskBudget, Plan
from forebay.runtime.blocks import find_blocks

LAYERS, ELEMENTS = 4, 64 * TimedModel.WIDTH


def names_of(model: TimedModel) -> list[str]:
    return [block.name for block in find_blocks(model).model.blocks if block.gradient_nbytes]


def trained(states: Tier, folder: Path, *, overlap: bool, speculate: bool) -> list[float]:
    def plan(model: TimedModel) -> Plan:
        return plan_by_hand(
            model,
            states=states,
            overlap=overlap,
            speculate=names_of(model)[1:] if speculate else (),
            chunk=16 * 1024,
            disk=DiskBudget(str(folder)) if states is Tier.DISK else None,
            disk_depth=2,
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


def test_what_is_updated_ahead_is_spread_over_the_model() -> None:
    model = TimedModel(8, TimedModel.WIDTH)
    assert spread(model, 3 / 8) == ["layers.7", "layers.5", "layers.2"]
    assert spread(model, 1.0) == [f"layers.{number}" for number in range(7, -1, -1)]
    assert spread(model, 3 / 4, first=True) == [f"layers.{number}" for number in (0, 1, 2, 4, 5, 6)]
