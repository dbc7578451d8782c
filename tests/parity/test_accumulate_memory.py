"""What several micro-batches take that pass the model together: never more than the formula says, and not far less."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.arenas import arenas
from forebay.errors import DoesNotFit, NoRoomTogether
from forebay.lowering import accumulation_of
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import session_of
from forebay.states import Masters
from tests.parity.accumulating import assert_same_accumulation, loss_of, opened
from tests.parity.compare import adamw
from tests.parity.models import CASES, Case
from tests.parity.offloading import SUBJECTS, larger, offload_plan, trace_of
from tests.parity.recomputing import AMPLE, STATES, plan_for, recomputable

F32 = torch.float32
FEW, MANY = 2, 5


def peaks(case: Case, plan: Plan) -> tuple[int, int]:
    """The device's peak in a step of few micro-batches, and in one of many."""
    found = []
    with opened(case, F32, plan=plan, device_memory=AMPLE) as (model, optimizer):
        attachment = session_of(model)
        assert attachment is not None
        session = attachment.session
        for count in (FEW, MANY):
            session.device.reset_peak()
            forebay.accumulate(model, [case.inputs(micro, F32) for micro in range(count)], loss_of)
            session.synchronize()
            found.append(session.device.usage().peak)
            optimizer.step()
            optimizer.zero_grad()
        assert forebay.report(model).timeline.counters["activations_kept"] == 0
    return found[0], found[1]


def assert_bounded(case: Case, plan: Plan) -> float:
    """Returns the share of the bytes reckoned for a further micro-batch that one takes."""
    need = accumulation_of(trace_of(case, F32), plan)
    assert need is not None
    few, many = peaks(case, plan)
    assert few <= need.needed(Tier.DEVICE, FEW)
    assert many <= need.needed(Tier.DEVICE, MANY)
    # Of a gradient that has landed the lane lets go a moment later: sometimes after the peak, sometimes before.
    assert many - few <= (MANY - FEW) * need.device_further + 1024
    return (many - few) / (MANY - FEW) / need.device_further


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["llama", "t5", "vit", "mixtral"])
def test_a_further_micro_batch_takes_what_it_keeps(name: str) -> None:
    """The activations that one keeps between forward and backward, but for some bytes of losses: with nothing
    recomputed the most wait in front of the last block."""
    case = larger(CASES[name])
    plan = plan_for(case, F32, (), resident=False, slots=2)
    share = assert_bounded(case, plan)
    assert share > 0.99


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_with_recomputation_it_takes_the_boundaries(name: str) -> None:
    case = larger(CASES[name])
    blocks = recomputable(find_blocks(case.model(F32)).model)
    share = assert_bounded(case, plan_for(case, F32, blocks, resident=False, slots=2))
    assert share > 0.6


def test_what_moves_to_the_host_takes_no_room_on_the_device() -> None:
    case = SUBJECTS["llama"]
    plan = offload_plan(case, F32, resident=False, offload_window=20_000, reload_window=20_000)
    assert assert_bounded(case, plan) > 0.99


def test_what_came_back_for_the_last_block_is_gone() -> None:
    """Its backward comes between the forwards, where no pass ends: what had left goes with its storage, as what it was
    replaced by does. With a head that stays the last block that is passed in turn has something that moves."""
    case = SUBJECTS["llama"]
    plan = offload_plan(case, F32, resident=False)
    last = max(number for number, placement in enumerate(plan.placements) if ".layers." in placement.block)
    stay = [replace(p, parameters=Tier.DEVICE, gradients=Tier.DEVICE, states=Tier.DEVICE) for p in plan.placements]
    placements = (*plan.placements[: last + 1], *stay[last + 1 :])
    assert any(name == plan.placements[last].block for chosen in plan.activations for name in chosen.blocks)
    sizes = arenas(find_blocks(case.model(F32)).model, placements, plan.streaming, STATES)
    assert assert_bounded(case, replace(plan, placements=placements, host=sizes.host, disk=sizes.disk)) > 0.9


def test_more_than_a_budget_has_room_for_is_refused_beforehand() -> None:
    """And as many as are said to fit do."""
    case = larger(CASES["llama"])
    blocks = recomputable(find_blocks(case.model(F32)).model)
    plan = plan_for(case, F32, blocks, resident=False, slots=2)
    need = accumulation_of(trace_of(case, F32), plan)
    assert need is not None
    budget = need.needed(Tier.DEVICE, 4) - 1
    with opened(case, F32, policy="stream-recompute", device_memory=budget) as (model, _):
        made = forebay.report(model).plan.accumulation
        assert made is not None
        most = made.most(Tier.DEVICE, budget)
        assert most > 1
        batches = [case.inputs(micro, F32) for micro in range(most + 1)]
        with pytest.raises(DoesNotFit, match=f"device: {most + 1} micro-batches .* at most {most} fit") as info:
            forebay.accumulate(model, batches, loss_of)
        assert (info.value.tier, info.value.allowed) == ("device", budget)
        assert info.value.needed == made.needed(Tier.DEVICE, most + 1)
        forebay.accumulate(model, batches[:most], loss_of)


@pytest.mark.slow
def test_a_plan_can_leave_room() -> None:
    """Where a step of one micro-batch would use all of the budget; with the numbers of the loop, and within it."""
    case = larger(CASES["llama"])
    budget, count = 1_400_000, 4
    with opened(case, F32, device_memory=budget) as (model, _):
        tight = forebay.report(model).plan
        assert tight.accumulation is not None
        assert tight.accumulation.most(Tier.DEVICE, budget) < count
    model = assert_same_accumulation(case, F32, count=count, steps=1, device_memory=budget, micro_batches=count)
    report = forebay.report(model)
    forebay.close(model)
    assert report.plan.accumulation is not None
    assert report.plan.accumulation.most(Tier.DEVICE, budget) >= count
    assert report.plan.budget.device == budget
    assert any(f"room for {count} micro-batches" in reason for reason in report.plan.reasons)
    assert report.timeline.peaks[Tier.DEVICE] <= budget


def test_no_plan_leaves_room() -> None:
    case = larger(CASES["llama"])
    budgets: dict[str, Any] = {"policy": "stream", "device_memory": 3_000_000, "micro_batches": 64}
    says = "no plan leaves room for 64 micro-batches at a time; use fewer"
    with pytest.raises(DoesNotFit, match=says), opened(case, F32, **budgets):
        pass


def test_what_fits_with_whole_masters_alone_is_for_one_at_a_time() -> None:
    """Halves of masters need more of the host here: the plan for one micro-batch is one with whole ones."""

    def refused(**asked: Any) -> DoesNotFit:
        model = torch.nn.Sequential(*[torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16) for _ in range(2)])
        optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(2048, 32, dtype=torch.bfloat16)
        with pytest.raises(DoesNotFit) as caught:
            forebay.prepare(model, optimizer, batch, policy="stream", **asked)
        return caught.value

    device = refused(device_memory=1).needed
    host = refused(device_memory=device, host_memory=1).needed
    together = refused(device_memory=device, host_memory=host, micro_batches=FEW)
    assert isinstance(together, NoRoomTogether)
    assert together.alone.streaming.masters is Masters.WHOLE
    assert (together.alone.device, together.alone.host) == (device, host)


class Staying(nn.Module):
    """Its peak is in the backward of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x.square().mean()


def test_the_losses_of_a_step_and_of_the_one_before_are_in_no_budget() -> None:
    """A loop has those of the step before as long as it has no others. Nothing of this model streams, so that its
    micro-batches take what one of them takes."""
    batches = [torch.randn(64, 32) for _ in range(4)]
    model = Staying()
    asked: dict[str, Any] = {"policy": "resident", "micro_batches": 4, "loss_fn": Staying.__call__, "device": "cpu"}
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(model, adamw(list(model.parameters())), batches[0], device_memory=1024, **asked)
    needed = refused.value.needed
    _, optimizer = forebay.prepare(model, adamw(list(model.parameters())), batches[0], device_memory=needed, **asked)
    for _ in range(3):
        losses = forebay.accumulate(model, batches, Staying.__call__)
        optimizer.step()
        optimizer.zero_grad()
    assert len(losses) == 4
    assert forebay.report(model).measured_peaks()[Tier.DEVICE] <= needed
    forebay.close(model)


def test_what_is_saved_between_the_last_two_blocks_is_there_while_others_go_backward() -> None:
    """The model's own ReLU goes backward with the block before it: what it has saved waits for that."""
    batches = [torch.randn(64, 32) for _ in range(4)]
    asked: dict[str, Any] = {"policy": "stream", "micro_batches": 4, "loss_fn": Staying.__call__, "device": "cpu"}
    needed = 1024
    for _ in range(2):  # what one takes, and what all of them take
        model = Staying()
        with pytest.raises(DoesNotFit) as refused:
            forebay.prepare(model, adamw(list(model.parameters())), batches[0], device_memory=needed, **asked)
        needed = refused.value.needed
    _, optimizer = forebay.prepare(model, adamw(list(model.parameters())), batches[0], device_memory=needed, **asked)
    for _ in range(2):
        forebay.accumulate(model, batches, Staying.__call__)
        optimizer.step()
        optimizer.zero_grad()
    assert forebay.report(model).measured_peaks()[Tier.DEVICE] <= needed
    forebay.close(model)
