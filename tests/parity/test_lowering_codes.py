"""Activations on disk, as codes and in parts: the program is what the runtime does, in order and to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import forebay
from forebay.budgets import DiskBudget
from forebay.lowering import Liveness, device_bound, lower
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.simulation import Costs, play
from forebay.states import Masters
from forebay.timeline import Lane
from forebay.trace import Trace
from forebay.treatments import Fate, Selection, Split, Treatment
from tests.null.strategies import roomy_machine
from tests.parity.observed import lowered
from tests.parity.offloading import SUBJECTS, movable
from tests.parity.recomputing import plan_of, recomputable
from tests.parity.test_lowering_moves import batch_of, only, peak, ran
from tests.parity.treated import eligible

NEVER_CODES = ("_scaled_dot_product", "softmax", "mean", "rsqrt")
WAYS: tuple[tuple[Fate, int, Split | None], ...] = (
    (Fate.DISK, 0, None),
    (Fate.KEEP, 4, None),
    (Fate.OFFLOAD, 8, None),
    (Fate.DISK, 8, Split(1, 2)),
    (Fate.OFFLOAD, 0, Split(3, 4)),
    (Fate.OFFLOAD, 0, None),
    (Fate.KEEP, 8, Split(1, 3)),
    (Fate.OFFLOAD, 4, Split(5, 8)),
    (Fate.DISK, 0, Split(2, 5)),
)


def traced(name: str) -> Trace:
    case = SUBJECTS[name]
    return forebay.profile(case.model(torch.float32), batch_of(case))


def planned(trace: Trace, folder: Path, *, coded: bool, again: bool, windows: tuple[int, int], ring: int) -> Plan:
    """What may be treated is, in all ways in turn (``coded``: as codes too); all blocks recompute (``again``) or
    none."""
    names = eligible(trace) if again else movable(trace)
    chosen: dict[str, dict[tuple[str, int], Treatment]] = {}
    for i, one in enumerate(names):
        fate, bits, split = WAYS[i % len(WAYS)]
        bits = 0 if not coded or any(word in one.op for word in NEVER_CODES) or not _floats(trace, one.op) else bits
        if again or fate is not Fate.KEEP or bits:
            ways = chosen.setdefault(one.block, {})
            split = split if fate is not Fate.KEEP or bits else None
            ways.setdefault((one.op, one.occurrence), Treatment(one.op, one.occurrence, fate, bits, split))
    selections = tuple(Selection((name,), tuple(ways.values())) for name, ways in chosen.items())
    plan = plan_of(trace.model, recomputable(trace.model) if again else (), resident=True, slots=2)
    liveness = Liveness(trace)
    streaming = replace(
        plan.streaming,
        offload_window=windows[0],
        reload_window=windows[1],
        host_activations=liveness.host_activations(plan.recompute, selections),
        disk_activations=liveness.disk_activations(plan.recompute, selections),
        disk_window=liveness.disk_window(plan.recompute, selections) + ring,
    )
    return replace(
        plan,
        streaming=streaming,
        activations=selections,
        changes_numbers=("some activations are kept as codes",) if coded else (),
        budget=replace(plan.budget, disk=DiskBudget(str(folder))),
        host=plan.host + (1 << 26),
        disk=plan.disk + streaming.disk_activations,
    )


def _floats(trace: Trace, op: str) -> bool:
    """Whether all that ops of this overload make is fp32."""
    made = [
        s.tensors[t] for s in trace.segments for o in s.ops if trace.works[o.work].op == op for t in o.outputs if t >= 0
    ]
    return all(tensor.dtype == "float32" for tensor in made)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("coded", [False, True], ids=["plain", "codes"])
@pytest.mark.parametrize(
    ("name", "again", "windows", "ring"),
    [
        ("llama", False, (20_000, 5_000), 16_384),
        ("convnet", True, (0, 0), 0),
        ("convnet", True, (20_000, 5_000), 16_384),
        ("convnet", False, (1 << 20, 1 << 20), 1 << 20),
    ],
)
def test_the_program_is_what_the_runtime_does(
    name: str, windows: tuple[int, int], ring: int, again: bool, coded: bool, tmp_path: Path
) -> None:
    trace = traced(name)
    plan = planned(trace, tmp_path, coded=coded, again=again, windows=windows, ring=ring)
    program = lower(trace, plan)
    moves = Liveness(trace).profile(plan.recompute, plan.activations).moves
    assert {move.fate for move in moves} == (
        {Fate.OFFLOAD, Fate.DISK, Fate.KEEP} if coded else {Fate.OFFLOAD, Fate.DISK}
    )
    timeline, did = ran(SUBJECTS[name], plan, disk=str(tmp_path))
    said = lowered(program)
    for lane in (Lane.D2H, Lane.UPDATE, Lane.DISK_WRITE):
        assert said[lane] == did[lane]
    for lane, verb in ((Lane.H2D, "reload"), (Lane.DISK_READ, "read")):
        assert sorted(said[lane]) == sorted(did[lane]) and only(said[lane], verb)
    assert timeline.counters["activations_kept"] == 0
    # The workspace of the codec is counted at its most.
    workspace = max((move.codes.workspace for move in moves if move.codes is not None), default=0)
    simulated = peak(play(program, Costs(trace, roomy_machine("cpu"), Masters.WHOLE)))
    assert simulated - workspace <= peak(timeline) <= simulated <= device_bound(trace, plan)
    disk = timeline.usage(Tier.DISK)
    assert disk.peak == plan.disk
