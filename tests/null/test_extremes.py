"""What is promised holds for the extremes of a trace too: the same step with the routes that take the most memory."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.lowering import Liveness, device_bound
from forebay.phases import forward_peak
from forebay.planners import make_plan
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft
from forebay.plans import Placement, Plan, Streaming
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, machine
from tests.null.strategies import RESIDENT, plan_for, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

WINDOW, NO_WINDOW = Streaming(gradient_window=2048), Streaming()
BLOCKS = [block(f"layers.{i}", ((16, 16), "float32", True)) for i in range(3)]
EVERY = [b.name for b in BLOCKS]
SAVED, MORE, OUT, TEMPORARY = 1000, 400, 300, 700


def chain(saved: int = SAVED, temporary: int = TEMPORARY) -> Trace:
    """Layers that keep ``saved`` bytes, and take ``temporary`` while they make ``OUT``."""
    return chain_trace(BLOCKS, layers_of(saved, temporary))


def layers_of(saved: int, temporary: int = TEMPORARY) -> list[Layer]:
    return [Layer(b.name, (saved,), temporary, OUT) for b in BLOCKS]


def routed() -> Trace:
    """A step with two other routings: one saves more, one has larger temporaries."""
    return replace(chain(), extremes=(chain(saved=SAVED + MORE), chain(temporary=TEMPORARY + 6 * MORE)))


def planned(trace: Trace, device: int) -> Plan:
    """Everything on the device, with a promise of ``device`` bytes."""
    placements = tuple(Placement(name, *RESIDENT) for name in EVERY)
    return replace(plan_for(trace, placements, Streaming(), roomy=True), device=device)


def test_the_promise_is_the_most_of_all_routings() -> None:
    liveness, alone = Liveness(routed()), [Liveness(t) for t in (chain(), *routed().extremes)]
    for recompute in ((), EVERY, EVERY[:1]):
        each = [one.beside(recompute, EVERY, WINDOW) for one in alone]
        assert liveness.beside(recompute, EVERY, WINDOW) == max(each) > each[0]
    # MORE in each of three layers where all of it stays; 6 MORE in one layer at a time.
    assert liveness.beside((), (), NO_WINDOW) == alone[1].profile().peak
    assert liveness.beside(EVERY, (), NO_WINDOW) == alone[2].profile(EVERY).peak
    assert liveness.profile() == alone[0].profile()  # what is simulated is the trace's own


def test_gradients_that_an_extreme_lacks_may_be_under_way_in_it() -> None:
    """The middle layer gets no rows in the extreme, so that its parameter (4 * 256 bytes) has no gradient there."""
    layers = [Layer(b.name, (SAVED + MORE,), TEMPORARY, OUT) for b in BLOCKS]
    lacking = chain_trace(BLOCKS, [layers[0], replace(layers[1], reads=()), layers[2]])
    liveness, alone, gradient = Liveness(replace(chain(), extremes=(lacking,))), Liveness(lacking), 4 * 256
    window = Streaming(gradient_window=1 << 20)
    # The most is in backward, behind the first gradient, when layers are computed again.
    assert liveness.beside(EVERY, EVERY, window) == alone.beside(EVERY, EVERY, window) + gradient
    assert liveness.beside(EVERY, EVERY, NO_WINDOW) == alone.beside(EVERY, EVERY, NO_WINDOW)


def test_gradients_that_a_routing_lacks_leave_no_room_to_others() -> None:
    """In a loop of one backward a step the room of gradients is others' until they are made: of those that are."""
    layers = [Layer(b.name, (SAVED + 4 * MORE,), TEMPORARY, OUT) for b in BLOCKS]
    lacking = chain_trace(BLOCKS, [layers[0], replace(layers[1], reads=()), layers[2]])
    liveness, gradient = Liveness(replace(chain(), extremes=(lacking,))), 4 * 256
    assert liveness.beside((), (), NO_WINDOW, (), False) == Liveness(lacking).profile().peak - 2 * gradient
    assert Liveness(chain()).beside((), (), NO_WINDOW, (), False) == Liveness(chain()).profile().peak - 3 * gradient


def test_a_plan_and_its_evaluation_promise_the_most() -> None:
    plan = planned(chain(), 0)
    each = [device_bound(t, plan) for t in (chain(), *routed().extremes)]
    assert device_bound(routed(), plan) == max(each) > each[0]
    draft = Draft(plan.placements, plan.streaming)
    assert Bench(asked(routed(), machine(), device=ENOUGH)).device(draft) == max(each)
    # Without saving, a layer holds what it is given, both that it makes, and its temporary; the last one's result is
    # read by the loss alone.
    assert forward_peak(routed()) == forward_peak(routed().extremes[1]) > forward_peak(chain())


def test_the_checker_refuses_a_promise_that_holds_for_the_trace_alone() -> None:
    trace, on = routed(), roomy_machine()
    own, most = (device_bound(t, planned(t, 0)) for t in (chain(), trace))
    check(chain(), on, planned(chain(), own))
    check(trace, on, planned(trace, most))
    # Two micro-batches: with one, the gradients that stay are not there yet when the most is.
    with pytest.raises(PlanInvalid, match=f"predicts a device peak of {own} bytes and [0-9]+ may be there"):
        check(trace, on, planned(trace, own), micro_batches=2)
    budget = replace(planned(trace, own).budget, device=own)
    with pytest.raises(DoesNotFit, match="device memory: op"):
        check(trace, on, replace(planned(trace, own), budget=budget), micro_batches=2)


def test_extremes_go_to_json_and_back() -> None:
    assert Trace.from_json(routed().to_json()) == routed()
    written = json.loads(chain().to_json())
    assert written.pop("extremes") == []
    assert Trace.from_json(json.dumps(written)) == chain()


def test_an_extreme_is_the_same_step() -> None:
    assert routed().fingerprint == chain().fingerprint
    with pytest.raises(ConfigError, match="extremes of its own"):
        replace(chain(), extremes=(routed(),))
    other = chain_trace(BLOCKS[:2], [Layer(b.name) for b in BLOCKS[:2]])
    with pytest.raises(ConfigError, match="another model or batch"):
        replace(chain(), extremes=(other,))


@pytest.mark.parametrize("policy", ["checkmate", "tsplit", "capuchin", "rotor"])
def test_layers_that_may_run_twice_by_chance_run_again_as_a_whole(policy: str) -> None:
    """Ops of a layer have no names where it has run without gradients before: nobody knows of which call they are. That
    all of it runs again asks for none."""
    trace = replace(chain(saved=8192), extremes=(chain_trace(BLOCKS, layers_of(8192), tried=True),))
    wanted = asked(trace, machine(), device=1)
    with pytest.raises(DoesNotFit) as refused:
        make_plan(wanted, policy)
    enough = replace(wanted, budget=replace(wanted.budget, device=refused.value.needed))
    plan = make_plan(enough, policy)
    check(trace, machine(), plan)
    assert plan.recompute and not plan.activations
    with pytest.raises(DoesNotFit) as all_kept:
        make_plan(wanted, "vdnn-all")  # what has no name does not move
    assert refused.value.needed + 2 * 8192 <= all_kept.value.needed
