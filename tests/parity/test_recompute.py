"""Blocks that are computed again for their backward: the numbers stay those of plain PyTorch, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import forebay
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.runtime.blocks import find_blocks
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import CASES, Case
from tests.parity.recomputing import AMPLE, DROPOUT, SUBJECTS, plan_for, recomputable

DTYPES = [torch.float32, torch.bfloat16]
WHERE = pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])


def names_of(name: str, dtype: torch.dtype = torch.float32) -> list[str]:
    return recomputable(find_blocks(SUBJECTS[name].model(dtype)).model)


@pytest.mark.thinned(8)
@WHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in SUBJECTS if name not in DROPOUT])
def test_same_numbers_with_every_block_recomputed(name: str, dtype: torch.dtype, resident: bool) -> None:
    plan = plan_for(SUBJECTS[name], dtype, names_of(name), resident=resident)
    assert plan.recompute
    model = assert_same_training(SUBJECTS[name], dtype, plan=plan, device_memory=AMPLE, device="cpu")
    done = [e.what for e in forebay.report(model).timeline.events if e.what.startswith("recompute ")]
    used = set(plan.recompute) - unused_experts(name, plan.recompute, done)
    assert set(done) == {f"recompute {block}" for block in used}
    forebay.close(model)


def unused_experts(name: str, blocks: tuple[str, ...], done: list[str]) -> set[str]:
    """Experts that no batch of the test was routed to."""
    return {b for b in blocks if "experts" in b and f"recompute {b}" not in done} if name == "experts" else set()


@given(data=st.data(), name=st.sampled_from(sorted(set(SUBJECTS) - set(DROPOUT))), dtype=st.sampled_from(DTYPES))
@settings(max_examples=8, deadline=None)
def test_any_blocks_may_be_recomputed(data: st.DataObject, name: str, dtype: torch.dtype) -> None:
    chosen = data.draw(st.lists(st.sampled_from(names_of(name)), unique=True))
    resident, slots = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    plan = plan_for(SUBJECTS[name], dtype, chosen, resident=resident, slots=slots)
    model = assert_same_training(SUBJECTS[name], dtype, steps=2, plan=plan, device_memory=AMPLE, device="cpu")
    forebay.close(model)


def losses_and_gradients(
    case: Case,
    dtype: torch.dtype,
    plan: forebay.Plan | None,
    autocast: bool = False,
    steps: int = 5,
    where: str = "cpu",
    **prepare: Any,
) -> list[torch.Tensor]:
    """Accumulations of two micro-batches after one seed: every mask of dropout depends on all draws before it."""
    model = case.model(dtype)
    if plan is None:
        model.to(where)
    optimizer = adamw(list(model.parameters()))
    if plan is not None:
        given = {"plan": plan, "device_memory": AMPLE, "device": where, **prepare}
        model, optimizer = forebay.prepare(model, optimizer, **given)
    torch.manual_seed(7)
    seen = []
    for step in range(steps):
        for micro in range(2):
            inputs = {k: v.to(where) for k, v in case.inputs(2 * step + micro, dtype).items()}
            with torch.autocast(where, torch.bfloat16, enabled=autocast):
                loss = model(**inputs)["loss"]
            loss.backward()
            seen.append(loss.detach())
        if plan is not None:
            seen += [g.clone() for _, g in sorted(forebay.gradients(model).items())]
        else:
            seen += [p.grad.cpu() for _, p in sorted(model.named_parameters()) if p.grad is not None]
        optimizer.zero_grad()
    seen.append(torch.rand(1, device=where))  # the generator stands where it would without a recomputation
    forebay.close(model)
    return seen


@pytest.mark.thinned(6)
@WHERE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_gives_the_same_masks_again(name: str, dtype: torch.dtype, resident: bool) -> None:
    case = DROPOUT[name]
    expected = losses_and_gradients(case, dtype, None)
    actual = losses_and_gradients(case, dtype, plan_for(case, dtype, names_of(name), resident=resident))
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@WHERE
def test_autocast_is_that_of_the_forward(resident: bool) -> None:
    case = SUBJECTS["llama"]
    expected = losses_and_gradients(case, torch.float32, None, autocast=True)
    plan = plan_for(case, torch.float32, names_of("llama"), resident=resident)
    actual = losses_and_gradients(case, torch.float32, plan, autocast=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("name", ["llama-tied", "used-twice", "t5"])
def test_late_transfers_change_nothing(name: str) -> None:
    device = CpuDevice(AMPLE, delays=RandomDelays(seed=0, max_seconds=0.002))
    try:
        plan = plan_for(SUBJECTS[name], torch.float32, names_of(name), resident=False, slots=2)
        model = assert_same_training(
            SUBJECTS[name], torch.float32, steps=2, plan=plan, device_memory=AMPLE, device=device
        )
        forebay.close(model)
    finally:
        device.close()


@WHERE
def test_a_model_that_checkpoints_itself(resident: bool) -> None:
    """Its checkpoints lie inside the block, so that both recompute: slower, and the same numbers."""
    case = CASES["checkpointed"]
    plan = plan_for(case, torch.float32, names_of("llama"), resident=resident)
    model = assert_same_training(case, torch.float32, steps=2, plan=plan, device_memory=AMPLE, device="cpu")
    forebay.close(model)


class Wrapped(nn.Module):
    """Checkpoints each of its layers from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
        return {"loss": x.square().mean()}


@WHERE
def test_a_checkpoint_around_the_block_is_left_to_do_its_work(resident: bool) -> None:
    """The block runs twice, not three times, and it is the model's own checkpoint that runs it again."""
    case = Case(Wrapped, lambda step: {"x": torch.randn(4, 16, generator=torch.Generator().manual_seed(step))})
    names = [f"layers.{i}" for i in range(3)]
    plan = plan_for(case, torch.float32, names, resident=resident)
    model = assert_same_training(case, torch.float32, plan=plan, device_memory=AMPLE, device="cpu")
    assert not [e for e in forebay.report(model).timeline.events if e.what.startswith("recompute")]
    calls: list[int] = []
    model.layers[0][0].register_forward_hook(lambda *_: calls.append(1))
    model(**case.inputs(0, torch.float32))["loss"].backward()
    assert len(calls) == 2
    forebay.close(model)
