"""The checker on real models: what is lowered from a captured step is accepted, wherever the blocks live."""

from __future__ import annotations

import pytest
import torch

from forebay.checking import check
from forebay.errors import PlanInvalid
from forebay.lowering import lower
from forebay.profiler.capture import capture
from forebay.trace import Trace
from tests.null.corruptions import drop_landing, drop_update, wrong_use
from tests.null.strategies import HOMES, Case, plan_for, recomputable, roomy, roomy_machine
from tests.parity.models import CASES

CAPTURED = sorted(CASES.keys() - {"experts"})  # whose routing depends on values
MACHINE = roomy_machine("cpu")


def step(name: str, dtype: torch.dtype = torch.float32) -> Trace:
    case = CASES[name]
    return capture(case.model(dtype), case.inputs(0, dtype)).trace


@pytest.mark.parametrize("name", CAPTURED)
def test_every_placement_of_a_real_model_is_accepted(name: str) -> None:
    trace = step(name)
    for number, home in enumerate(HOMES):
        for again, recompute in enumerate(((), recomputable(trace))):
            plan = roomy(trace, home)
            plan = plan_for(trace, plan.placements, plan.streaming, recompute, roomy=True)
            # Each home with one micro-batch and two, and so is recomputation.
            check(trace, MACHINE, plan, micro_batches=1 + (number + again) % 2)


@pytest.mark.parametrize("spoil", [drop_update, drop_landing, wrong_use])
def test_what_is_spoiled_is_named_by_the_models_own_names(spoil: object) -> None:
    trace = step("llama-tied", torch.bfloat16)
    plan = roomy(trace)
    for program, subjects in spoil(Case(trace, MACHINE, plan), lower(trace, plan))[:20]:  # type: ignore[operator]
        with pytest.raises(PlanInvalid) as caught:
            check(trace, MACHINE, plan, program)
        assert caught.value.subject in subjects, str(caught.value)
        assert caught.value.subject.startswith(("model.", "lm_head"))
