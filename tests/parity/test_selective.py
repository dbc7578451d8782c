"""Ops of recomputed blocks that do not run again: the numbers stay those of plain PyTorch, bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import forebay
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import ModelError
from forebay.treatments import Fate
from tests.parity.compare import adamw, assert_same_training
from tests.parity.offloading import SPLITS, in_parts, trace_of
from tests.parity.recomputing import AMPLE, DROPOUT, plan_of, recomputable
from tests.parity.test_recompute import losses_and_gradients
from tests.parity.treated import SUBJECTS, Eligible, eligible, treated, treated_plan

WHERE = pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
FATES = pytest.mark.parametrize("fate", [Fate.KEEP, Fate.OFFLOAD, None], ids=["keep", "offload", "both"])
WITHOUT = sorted(set(SUBJECTS) - set(DROPOUT))
WINDOWS = [0, 5_000, 50_000]


@pytest.mark.thinned(8)
@FATES
@pytest.mark.parametrize("name", WITHOUT)
def test_same_numbers_with_every_op_named(name: str, fate: Fate | None) -> None:
    plan = treated_plan(SUBJECTS[name], torch.float32, fate, resident=False, window=20_000)
    assert plan.activations
    model = assert_same_training(SUBJECTS[name], torch.float32, steps=1, plan=plan, device_memory=AMPLE, device="cpu")
    forebay.close(model)


@given(data=st.data(), name=st.sampled_from(WITHOUT), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=5, deadline=None)
def test_any_ops_may_be_named(data: st.DataObject, name: str, dtype: torch.dtype) -> None:
    case = SUBJECTS[name]
    dtype = dtype if dtype in case.dtypes else torch.float32
    trace = trace_of(case, dtype)
    blocks = data.draw(st.lists(st.sampled_from(recomputable(trace.model)), unique=True, min_size=1))
    named = drawn(data, [one for one in eligible(trace) if one.block in blocks])
    plan = plan_of(trace.model, blocks, resident=data.draw(st.booleans()), slots=data.draw(st.integers(1, 3)))
    plan = treated(plan, named, window=data.draw(st.sampled_from(WINDOWS)))
    plan = in_parts(plan, lambda: data.draw(SPLITS))
    model = assert_same_training(case, dtype, steps=1, plan=plan, device_memory=AMPLE, device="cpu")
    forebay.close(model)


def drawn(data: st.DataObject, ops: list[Eligible]) -> dict[Eligible, Fate]:
    chosen = data.draw(st.lists(st.sampled_from(ops), unique=True, min_size=1))
    return {one: data.draw(st.sampled_from([Fate.KEEP, Fate.OFFLOAD])) for one in chosen}


@pytest.mark.thinned(6)
@WHERE
@pytest.mark.parametrize("fate", [Fate.KEEP, None], ids=["keep", "both"])
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_gives_the_same_masks(name: str, fate: Fate | None, resident: bool) -> None:
    """Every mask depends on all draws before it, those of the ops that are named too, which do not draw again."""
    case = SUBJECTS[name]
    expected = losses_and_gradients(case, torch.float32, None, steps=2)
    plan = treated_plan(case, torch.float32, fate, resident=resident, window=20_000)
    actual = losses_and_gradients(case, torch.float32, plan, steps=2)
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("named", [["aten._to_copy.default"], ["aten.mm.default", "aten.mul.Tensor"]], ids=str)
def test_autocast(named: list[str]) -> None:
    case = SUBJECTS["llama"]
    expected = losses_and_gradients(case, torch.float32, None, autocast=True, steps=1)
    with torch.autocast("cpu", torch.bfloat16):
        trace = forebay.profile(case.model(torch.float32), case.inputs(0, torch.float32))
    plan = plan_of(trace.model, recomputable(trace.model), resident=False)
    plan = treated(plan, {one: Fate.KEEP for one in eligible(trace) if one.op in named})
    assert {t.op for selection in plan.activations for t in selection.treatments} == set(named)
    actual = losses_and_gradients(case, torch.float32, plan, autocast=True, steps=1)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_autocast_over_several_passes() -> None:
    """Weights are cast once for all of them, and again in each recomputation: no harm, unless casts are named."""
    case = SUBJECTS["llama"]
    with torch.autocast("cpu", torch.bfloat16):
        trace = forebay.profile(case.model(torch.float32), case.inputs(0, torch.float32))

    def two_passes(model: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(model(**case.inputs(step, torch.float32))["loss"] for step in range(2))
        loss.backward()
        return loss.detach()

    def named(op: str) -> nn.Module:
        plan = plan_of(trace.model, recomputable(trace.model), resident=True)
        plan = treated(plan, {one: Fate.KEEP for one in eligible(trace) if one.op == op})
        model = case.model(torch.float32)
        return forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")[0]

    plain, model = case.model(torch.float32), named("aten.mm.default")
    assert torch.equal(two_passes(model), two_passes(plain))
    gradients = forebay.gradients(model)
    assert all(torch.equal(gradients[n], p.grad) for n, p in plain.named_parameters() if p.grad is not None)
    forebay.close(model)
    model = named("aten._to_copy.default")
    with pytest.raises(ModelError, match=r"aten._to_copy.default#0 ran after other ops.*open a context for each pass"):
        two_passes(model)
    forebay.close(model)


@pytest.mark.parametrize("name", ["llama-tied", "used-twice", "t5"])
def test_late_transfers_change_nothing(name: str) -> None:
    device = CpuDevice(AMPLE, delays=RandomDelays(seed=0, max_seconds=0.002))
    try:
        plan = treated_plan(SUBJECTS[name], torch.float32, None, resident=False, slots=2, window=20_000)
        model = assert_same_training(
            SUBJECTS[name], torch.float32, steps=1, plan=plan, device_memory=AMPLE, device=device
        )
        forebay.close(model)
    finally:
        device.close()
