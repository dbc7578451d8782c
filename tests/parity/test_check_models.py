"""The checker on real models: what is lowered from a captured step is accepted, wherever the blocks live."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from forebay.checking import check
from forebay.errors import PlanInvalid
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.capture import capture
from forebay.program import Verb
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.trace import Trace
from forebay.treatments import Fate
from tests.null.corruptions import drop_landing, drop_update, wrong_use
from tests.null.strategies import HOMES, Case, plan_for, recomputable, roomy, roomy_machine
from tests.parity import test_lowering_codes as codes
from tests.parity import test_lowering_moves as moves
from tests.parity.models import CASES
from tests.parity.recomputing import plan_of
from tests.parity.recomputing import recomputable as able_to_recompute
from tests.parity.treated import eligible, treated

CAPTURED = sorted(CASES.keys() - {"experts"})  # whose routing depends on values
MACHINE = roomy_machine("cpu")


def step(name: str, dtype: torch.dtype = torch.float32) -> Trace:
    case = CASES[name]
    return capture(case.model(dtype), case.inputs(0, dtype)).trace


@pytest.mark.thinned(3)
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


def exact(trace: Trace, plan: Plan) -> Plan:
    """The device has what Liveness promises, and no byte more."""
    most = device_bound(trace, plan)
    return replace(plan, device=most, budget=replace(plan.budget, device=most))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", moves.MODELS)
def test_the_promise_is_enough(name: str) -> None:
    """Whatever moves and whatever runs again, the checker finds no way to need more."""
    for kind, resident, windows in (moves.HOW[1], *moves.HOW[3:]):
        trace, plan = moves.traced(name, kind), moves.planned(name, kind, resident, windows)
        check(trace, MACHINE, exact(trace, plan))


@pytest.mark.parametrize("windows", [(0, 0), (20_000, 20_000)])
@pytest.mark.parametrize("name", ["gpt2-dropout", "llama", "mixtral"])
def test_what_is_passed_over_makes_room(name: str, windows: tuple[int, int]) -> None:
    """All that may be named leaves, and comes back where the blocks run again: of a GELU of single ops, each result
    for the sake of the next op, which does not run either. The simulator's peak is proven, to the byte."""
    trace = moves.traced(name, "again")
    plan = plan_of(trace.model, able_to_recompute(trace.model), resident=True)
    plan = treated(plan, dict.fromkeys(eligible(trace), Fate.OFFLOAD))
    plan = replace(plan, streaming=replace(plan.streaming, offload_window=windows[0], reload_window=windows[1]))
    program = lower(trace, plan)
    assert any(a.verb is Verb.RELOAD and a.ops[0] for a in program.actions)
    usage = play(program, Costs(trace, MACHINE, Masters.WHOLE)).usage(Tier.DEVICE)
    plan = exact(trace, plan)
    check(trace, MACHINE, plan, program)
    assert usage.peak <= plan.device


@pytest.mark.thinned(2)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2", "convnet"])
def test_the_promise_is_enough_for_codes_and_disk(name: str, again: bool, tmp_path: Path) -> None:
    trace = codes.traced(name)
    for windows, ring in (((0, 0), 0), ((20_000, 5_000), 16_384)):
        plan = codes.planned(trace, tmp_path, coded=True, again=again, windows=windows, ring=ring)
        assert Liveness(trace).profile(plan.recompute, plan.activations).moves
        check(trace, roomy_machine("cpu"), exact(trace, plan))
