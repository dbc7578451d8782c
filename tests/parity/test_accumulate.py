"""``forebay.accumulate`` gives the numbers of the loop that it replaces, whatever the plan."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import forebay
from forebay.runtime.blocks import find_blocks
from forebay.treatments import Fate
from tests.parity import test_chunked_loss as chunked
from tests.parity.accumulating import assert_same_accumulation, loss_of, opened
from tests.parity.models import CASES, Case
from tests.parity.offloading import SUBJECTS, offload_plan
from tests.parity.recomputing import AMPLE, DROPOUT, plan_for, recomputable
from tests.parity.test_disk_activations import disk_plan, every
from tests.parity.test_random_plans import plans, subject

WAYS = [(name, case.dtypes[i % len(case.dtypes)]) for i, (name, case) in enumerate(CASES.items())]
RECOMPUTED = {**DROPOUT, **{name: CASES[name] for name in ("llama", "llama-tied", "t5", "mixtral", "vit")}}


@pytest.mark.thinned(6)
@pytest.mark.parametrize(("name", "dtype"), WAYS, ids=[n for n, _ in WAYS])
def test_same_numbers_streamed(name: str, dtype: torch.dtype) -> None:
    model = assert_same_accumulation(CASES[name], dtype, policy="stream", device_memory=AMPLE)
    forebay.close(model)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("name", RECOMPUTED)
def test_same_numbers_recomputed(name: str) -> None:
    """With dropout too: it draws the numbers that the loop draws, and draws them again."""
    case, dtype = RECOMPUTED[name], torch.bfloat16 if name == "llama" else torch.float32
    blocks = recomputable(find_blocks(case.model(dtype)).model)
    plan = plan_for(case, dtype, blocks, resident=False, slots=2)
    forebay.close(assert_same_accumulation(case, dtype, plan=plan, device_memory=AMPLE))


@pytest.mark.parametrize("name", DROPOUT)
def test_same_numbers_with_dropout(name: str) -> None:
    forebay.close(assert_same_accumulation(DROPOUT[name], torch.float32, policy="stream", device_memory=AMPLE))


@pytest.mark.parametrize("name", ["llama", "t5", "vit"])
def test_same_numbers_with_activations_on_the_host(name: str) -> None:
    """What all micro-batches move finds room there."""
    plan = offload_plan(SUBJECTS[name], torch.float32, resident=False, offload_window=20_000, reload_window=20_000)
    model = assert_same_accumulation(SUBJECTS[name], torch.float32, steps=1, plan=plan, device_memory=AMPLE)
    assert forebay.report(model).timeline.counters["activations_kept"] == 0
    forebay.close(model)


def test_same_numbers_with_activations_on_disk(tmp_path: Path) -> None:
    fates = every("llama", Fate.DISK, Fate.OFFLOAD)
    plan = disk_plan("llama", tmp_path, fates, resident=False, ring=8 * 4096)
    budgets: dict[str, Any] = {"device_memory": AMPLE, "disk": str(tmp_path)}
    model = assert_same_accumulation(SUBJECTS["llama"], torch.float32, steps=1, plan=plan, **budgets)
    assert forebay.report(model).timeline.counters["activations_kept"] == 0
    forebay.close(model)
    assert not any(tmp_path.iterdir())


@given(data=st.data(), name=st.sampled_from(["llama", "llama-tied", "t5"]), count=st.integers(2, 4))
@settings(max_examples=4)
def test_any_plan_gives_the_numbers_of_the_loop(data: st.DataObject, name: str, count: int) -> None:
    """Slots are poisoned, so that a stale read shows."""
    drawn_for = subject(name, torch.float32)
    plan = data.draw(plans(drawn_for))
    with tempfile.TemporaryDirectory() as folder:
        # Each further micro-batch takes less than a whole one, tied parameters a gradient of each on the host.
        model_nbytes = drawn_for.model.parameter_nbytes
        device = plan.device + model_nbytes + count * drawn_for.footprint.peak
        budgets: dict[str, Any] = {"device_memory": device, "host_memory": plan.host + count * model_nbytes}
        if plan.disk:
            budgets["disk"] = f"{folder}:{plan.disk}B"
        model = assert_same_accumulation(drawn_for.case, torch.float32, steps=2, count=count, plan=plan, **budgets)
        forebay.close(model)


def test_same_numbers_where_the_ledger_rests() -> None:
    """From the third step on nobody counts bytes, and autograd adds gradients in place."""
    model = assert_same_accumulation(CASES["llama-tied"], torch.float32, steps=4, policy="stream", device_memory=AMPLE)
    forebay.close(model)


def test_several_calls_in_a_step_add_up_in_order() -> None:
    case = CASES["llama-tied"]
    reference = case.model(torch.float32)
    batches = [case.inputs(micro, torch.float32) for micro in range(6)]
    for batch in batches:
        loss_of(reference, batch).backward()
    with opened(case, torch.float32, policy="stream", device_memory=AMPLE) as (model, _):
        forebay.accumulate(model, batches[:2], loss_of)
        loss_of(model, batches[2]).backward()
        forebay.accumulate(model, batches[3:], loss_of)
        gradients = forebay.gradients(model)
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            assert torch.equal(gradients[name], parameter.grad), name


def test_the_loss_in_pieces() -> None:
    """In every micro-batch: none has logits."""
    case, tokens = Case(chunked.llama, chunked.batch), []

    def noted(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        output = model(**batch)
        tokens.append(output.logits.shape[1])
        return output.loss

    prepare: dict[str, Any] = {"policy": "stream", "loss": "chunked", "device_memory": "4MiB"}
    forebay.close(assert_same_accumulation(case, torch.float32, steps=1, **prepare))
    with opened(case, torch.float32, **prepare) as (model, _):
        forebay.accumulate(model, [case.inputs(micro, torch.float32) for micro in range(3)], noted)
    assert tokens == [0, 0, 0]
