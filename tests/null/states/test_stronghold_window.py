"""STRONGHOLD's window: the fewest layers that hide every transfer under compute, by the inequality of its docstring."""

from __future__ import annotations

from math import ceil

import pytest

from forebay.errors import DoesNotFit
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import Bench, make_plan
from forebay.planners.parts import KEPT, Level
from forebay.planners.states.stronghold import LEAST, Use, uses, window
from forebay.plans import Plan
from forebay.simulation import Costs
from forebay.states import Masters
from forebay.trace import Phase
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.states.test_state_policies import ends_trace

LAYERS = 10
TRACE = chain(LAYERS)
BLOCK = TRACE.model.blocks[0]


def made(on: Machine, device: int = ENOUGH) -> Plan:
    return make_plan(asked(TRACE, on, device=device), "stronghold")


def turn(seconds: float, phase: Phase = Phase.FORWARD, layers: int = LAYERS) -> tuple[Use, ...]:
    """So many layers of ``seconds`` each, one after the other."""
    order = range(layers) if phase is Phase.FORWARD else reversed(range(layers))
    return tuple(Use(f"layers.{i}", phase, n * seconds, (n + 1) * seconds) for n, i in enumerate(order))


def closed_form(layer: float, transfer: float) -> int:
    """Layers of ``layer`` seconds each, fetched in ``transfer`` seconds each. With m in the window LAYERS - m + 1 are
    fetched one after the other, and the last one has to be there before its layer, after LAYERS - 1 others:
    (LAYERS - m + 1) transfer <= (LAYERS - 1) layer."""
    if transfer <= layer:
        return LEAST
    return max(LEAST, LAYERS + 1 - int((LAYERS - 1) * layer / transfer))


@pytest.mark.parametrize("rate", [1.0, 1.05, 1.5, 2.0, 4.0, 8.0])
def test_the_window_of_equal_layers_has_a_closed_form(rate: float) -> None:
    """``rate``: how many times as long a fetch takes as a layer."""
    layer = BLOCK.nbytes / 1e8 / rate
    found = window(turn(layer), TRACE.model.blocks, machine(h2d=1e8))
    assert found == closed_form(layer, BLOCK.nbytes / 1e8)


def test_gradients_have_to_leave_in_time_too() -> None:
    """Fetches take no time. The gradient of layer i has left before the layer m - 1 further on is done: of the
    LAYERS - m + 1 with such a layer the last is gone after layer + (LAYERS - m + 1) transfer <= LAYERS layer."""
    layer = BLOCK.gradient_nbytes / 1e8 / 2
    found = window(turn(layer, Phase.BACKWARD), TRACE.model.blocks, machine(h2d=1e15, d2h=1e8))
    fits = [m for m in range(LEAST, 1 + LAYERS) if layer + (LAYERS - m + 1) * 2 * layer <= LAYERS * layer * (1 + 1e-9)]
    assert found == fits[0] == ceil((LAYERS + 3) / 2)


def test_no_window_hides_what_takes_longer_than_all_layers() -> None:
    assert window(turn(1e-9), TRACE.model.blocks, machine()) is None


def test_backward_of_a_block_that_runs_again_is_longer_by_its_forward() -> None:
    costs = Costs(TRACE, machine(), Masters.WHOLE)
    kept, again = uses(costs, KEPT), uses(costs, Level((BLOCK.name,)))
    segment = next(v for v in TRACE.visits if v.block == BLOCK.name and v.phase is Phase.FORWARD)
    more = costs.ops(segment.first_op, segment.first_op + TRACE.segments[segment.segment].saves_until)
    assert again[-1].block == BLOCK.name and again[-1].end - kept[-1].end == pytest.approx(more) and more > 0
    assert [u.block for u in kept] == [u.block for u in again]


def test_the_plan_has_the_least_window_and_one_less_is_late() -> None:
    """Slow enough for more than the least, fast enough for less than all."""
    costs = Costs(TRACE, machine(), Masters.WHOLE)
    runs = uses(costs, KEPT)
    for share in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4):
        on = machine(h2d=share * BLOCK.nbytes / (runs[1].end - runs[1].start), d2h=1e12)
        found = window(runs, TRACE.model.blocks, on)
        plan = made(on)
        slots = len(plan.streaming.slots)
        assert slots == (LAYERS if found is None else found) and plan.streaming.prefetch_distance == slots - 1
        assert plan.recompute == () and set(plan.streaming.slots) == {BLOCK.nbytes}
    assert window(runs, TRACE.model.blocks, machine(h2d=1e15, d2h=1e15)) == LEAST


def test_a_window_that_does_not_fit_is_as_large_as_fits_and_says_so() -> None:
    on = machine(h2d=1e6)
    free = made(on)
    assert len(free.streaming.slots) > LEAST + 1
    device = make_plan(asked(TRACE, on, device=ENOUGH), "zero-infinity").device
    plan = made(on, device)
    assert LEAST <= len(plan.streaming.slots) < len(free.streaming.slots) and plan.device <= device
    assert any("as many as fit" in reason for reason in plan.reasons), plan.reasons


def test_the_ends_stay_on_the_device_while_there_is_room() -> None:
    trace, on = ends_trace(), machine()
    homes: dict[int, set[Tier]] = {}
    most = make_plan(asked(trace, on, device=ENOUGH), "stronghold").device
    for share in (1.0, 0.7, 0.45):
        try:
            plan = make_plan(asked(trace, on, device=round(share * most)), "stronghold")
        except DoesNotFit:
            continue
        ends = [p for p in plan.placements if not p.block.startswith("layers")]
        homes[round(100 * share)] = {p.parameters for p in ends} | {p.states for p in ends}
        assert all(p.parameters is Tier.HOST for p in plan.placements if p.block.startswith("layers"))
    assert homes[100] == {Tier.DEVICE}
    assert any(found != {Tier.DEVICE} for found in homes.values())


def test_a_refusal_names_the_window() -> None:
    with pytest.raises(DoesNotFit, match="stronghold keeps a window of 2 layers"):
        made(machine(), 1)


def test_uses_add_up_to_the_compute_of_the_step() -> None:
    bench = Bench(asked(TRACE, machine(), device=ENOUGH))
    ops = sum(1 for _ in TRACE.ops())
    assert uses(bench.costs, KEPT)[-1].end == pytest.approx(bench.costs.ops(0, ops))
