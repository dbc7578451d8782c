"""Masks of an op that makes what is true or false beside numbers, as dropout does on cuda: what is promised, proven and
lowered is what the runtime does, and the numbers stay plain PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forebay
from forebay.checking import check
from forebay.lowering import Liveness, device_bound, lower
from forebay.plans import Plan
from forebay.program import Verb
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Trace
from forebay.treatments import Fate, Selection, Treatment
from tests.null.strategies import roomy_machine
from tests.parity.models import Case
from tests.parity.observed import lowered
from tests.parity.offloading import with_disk
from tests.parity.recomputing import plan_of, recomputable
from tests.parity.test_lowering_moves import only, peak, ran
from tests.parity.test_masks import ROWS, WIDTH, assert_same, case_of

DROPOUT = "aten.native_dropout.default"
NUMEL = ROWS * WIDTH
MASK = NUMEL // 8
MACHINE = roomy_machine("cpu")


def dropped(x: torch.Tensor) -> torch.Tensor:
    """Its result is saved by the product behind it, its mask by itself."""
    made, _ = torch.native_dropout(x, 0.25, True)
    return made


def planned(case: Case, fate: Fate, folder: Path, *, recompute: bool) -> tuple[Trace, Plan]:
    """Everything is resident; the dropouts of both layers are masks, and the promise is Liveness' own."""
    trace = forebay.profile(case.model(torch.float32), case.inputs(0, torch.float32))
    again = recomputable(trace.model) if recompute else []
    chosen = (Selection(("layers.0", "layers.1"), (Treatment(DROPOUT, 0, fate, 1),)),)
    plan = plan_of(trace.model, again, resident=True)
    arena = Liveness(trace).host_activations(plan.recompute, chosen)
    assert arena == (2 * MASK if fate is Fate.OFFLOAD else 0)
    streaming = replace(plan.streaming, host_activations=arena, offload_window=MASK, reload_window=MASK)
    plan = replace(plan, activations=chosen, streaming=streaming, host=plan.host + arena)
    plan = with_disk(plan, folder, [MASK, MASK] if fate is Fate.DISK else [])
    return trace, replace(plan, device=device_bound(trace, plan))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("fate", Fate)
def test_only_what_is_true_or_false_becomes_a_mask(fate: Fate, recompute: bool, tmp_path: Path) -> None:
    case = case_of(dropped)
    trace, plan = planned(case, fate, tmp_path, recompute=recompute)
    check(trace, MACHINE, plan)
    program = lower(trace, plan)
    moves = Liveness(trace).profile(plan.recompute, plan.activations).moves
    assert [(m.nbytes, m.moved, m.what) for m in moves] == [
        (NUMEL, MASK, f"layers.{i} {DROPOUT}#0.1") for i in range(2)
    ]
    timeline, did = ran(case, plan, disk=str(tmp_path))
    said = lowered(program)
    for lane in (Lane.D2H, Lane.DISK_WRITE):
        assert said[lane] == did[lane]
    for lane in (Lane.H2D, Lane.DISK_READ):
        assert sorted(said[lane]) == sorted(did[lane])
    assert len(only(said[Lane.H2D], "reload")) == (0 if fate is Fate.KEEP else 2)
    assert sum(a.verb is Verb.ENCODE for a in program.actions) == 2 * program.steps
    assert timeline.counters["activations_kept"] == 0
    # The workspace of the codec is counted at its most.
    workspace = max(move.codes.workspace for move in moves if move.codes is not None)
    simulated = peak(play(program, Costs(trace, MACHINE, Masters.WHOLE)))
    assert simulated - workspace <= peak(timeline) <= simulated <= device_bound(trace, plan)
    forebay.close(assert_same(case, plan, kept=0))
