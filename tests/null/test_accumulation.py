"""What several micro-batches take that pass the model together, and plans that leave room for them. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.errors import ConfigError, DoesNotFit, NoRoomTogether
from forebay.lowering import accumulation_of, device_bound
from forebay.memory import Tier
from forebay.planners import Bench, Problem, make_plan
from forebay.planners.policies import POLICIES, settled
from forebay.planners.room import leave_room
from forebay.plans import UNLIMITED, Accumulation, Plan
from forebay.units import MiB
from tests.null.planning import ENOUGH, asked, chain, machine

pytestmark = pytest.mark.usefixtures("short_searches")

LAYERS, WIDTH, ACTIVATION = 4, 256, 65536
TRACE = chain(LAYERS, width=WIDTH, activation=ACTIVATION)
PARAMETERS = 3 * WIDTH * WIDTH * 4
COUNT = 4


def planned(policy: str, device: int = ENOUGH) -> Plan:
    return make_plan(asked(TRACE, machine(), device=device), policy)


def of(plan: Plan) -> Accumulation:
    found = accumulation_of(TRACE, plan)
    assert found is not None
    return found


def test_nothing_that_streams_needs_no_room() -> None:
    assert accumulation_of(TRACE, planned("resident")) is None


def test_each_further_micro_batch_keeps_its_activations() -> None:
    """In front of the last layer a micro-batch holds the three matrices of each layer before it, what goes from each to
    the next, and its input."""
    plan = planned("stream")
    need = of(plan)
    layers = LAYERS - 1
    kept = layers * 3 * ACTIVATION
    assert kept <= need.device_further <= kept + (layers + 2) * ACTIVATION
    assert need.needed(Tier.DEVICE, 1) >= device_bound(TRACE, plan) + PARAMETERS
    assert need.needed(Tier.DEVICE, 5) - need.needed(Tier.DEVICE, 2) == 3 * need.device_further
    assert (need.host_further, need.disk_further) == (0, 0)


def test_with_recomputation_only_what_goes_from_block_to_block() -> None:
    need = of(planned("stream-recompute"))
    assert need.device_further <= (LAYERS + 2) * ACTIVATION


def test_what_moves_takes_room_on_the_host_instead() -> None:
    plan = planned("offload-all", 6 * MiB)
    need = of(plan)
    assert need.host_further == plan.streaming.host_activations > 0
    assert need.device_further < of(planned("stream")).device_further


def test_how_many_fit() -> None:
    need = Accumulation(device=100, device_further=10, host=50, host_further=0, disk=0, disk_further=0)
    assert [need.most(Tier.DEVICE, n) for n in (99, 100, 109, 110, 145)] == [0, 1, 1, 2, 5]
    assert need.most(Tier.HOST, 50) == UNLIMITED
    assert all(need.needed(Tier.DEVICE, need.most(Tier.DEVICE, n)) <= n for n in range(100, 200))


def auto(problem: Problem, bench: Bench) -> Plan:
    return make_plan(problem, "auto", bench)


def test_a_plan_leaves_room() -> None:
    """The budget has room for them where blocks run again; for one micro-batch the planner keeps more than that."""
    budget = of(planned("stream-recompute")).needed(Tier.DEVICE, COUNT) * 11 // 10
    problem = asked(TRACE, machine(), device=budget)
    one = leave_room(problem, 1, auto).plan
    assert one == make_plan(problem, "auto")
    assert of(one).most(Tier.DEVICE, budget) < COUNT
    room = leave_room(problem, COUNT, auto)
    several = room.plan
    assert room.alone == one
    assert of(several).most(Tier.DEVICE, budget) >= COUNT
    assert several.budget == problem.budget
    assert several.reasons[-1].startswith(f"leaves room for {COUNT} micro-batches")
    room.bench.prove(several)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("part", [1.1, 1.5, 3.0])
def test_few_plans_are_made_in_search_of_room(part: float) -> None:
    budget = int(of(planned("stream-recompute")).needed(Tier.DEVICE, COUNT) * part)
    made: list[Plan] = []

    def counted(problem: Problem, bench: Bench) -> Plan:
        made.append(auto(problem, bench))
        return made[-1]

    room = leave_room(asked(TRACE, machine(), device=budget), COUNT, counted)
    assert of(room.plan).needed(Tier.DEVICE, COUNT) <= budget
    assert len(made) <= 6


def test_what_a_plan_needs_that_is_known_is_not_asked_for_again() -> None:
    """A plan that takes a part of the budget alone, and just too much of it with all: with anything down to that part
    it would be made once more."""
    budget = of(planned("stream")).needed(Tier.DEVICE, COUNT) - 1
    made: list[tuple[int, Plan]] = []

    def streaming(problem: Problem, bench: Bench) -> Plan:
        made.append((problem.limit(Tier.DEVICE), make_plan(problem, "stream", bench)))
        return made[-1][1]

    room = leave_room(asked(TRACE, machine(), device=budget), COUNT, streaming)
    assert of(room.plan).most(Tier.DEVICE, budget) >= COUNT
    assert len(made) > 1 and all(limit < made[0][1].device for limit, _ in made[1:])


def test_where_there_can_be_no_room_none_is_sought() -> None:
    """One plan with all that is allowed, and the leanest, for what is said: asked for with nothing first."""
    device, made = planned("stream-recompute").device, list[int]()

    def counted(problem: Problem, bench: Bench) -> Plan:
        made.append(problem.limit(Tier.DEVICE))
        return auto(problem, bench)

    with pytest.raises(NoRoomTogether):
        leave_room(asked(TRACE, machine(), device=device), 64, counted)
    assert len(made) == 3 and made[:2] == [device, 1]


@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
def test_what_is_needed_is_enough(policy: str) -> None:
    """There it takes the leanest plan, which is the only one for just so much of the device: any more goes to a window,
    and no search comes upon it."""

    def make(problem: Problem, bench: Bench) -> Plan:
        return make_plan(problem, policy, bench)

    with pytest.raises(DoesNotFit) as one:
        leave_room(asked(TRACE, machine(), device=1), COUNT, make)
    with pytest.raises(NoRoomTogether) as several:
        leave_room(asked(TRACE, machine(), device=one.value.needed), COUNT, make)
    needed = several.value.needed
    plan = leave_room(asked(TRACE, machine(), device=needed), COUNT, make).plan
    assert of(plan).needed(Tier.DEVICE, COUNT) <= needed


def test_a_bench_for_other_limits_knows_what_does_not_depend_on_them() -> None:
    problem = asked(TRACE, machine(), device=ENOUGH)
    bench = Bench(problem)
    draft = settled(bench, POLICIES["stream"])
    seconds = bench.seconds(draft)
    less = replace(problem, budget=replace(problem.budget, device=1 << 20), host_limit=1 << 20)
    other = bench.with_limits(less)
    assert other.liveness is bench.liveness and other.costs is bench.costs and other.problem is less
    assert (other.simulated, other.actions) == (0, 0)
    assert other.seconds(draft) == seconds == Bench(less).seconds(draft)
    assert (other.simulated, other.actions) == (bench.simulated, bench.actions)
    with pytest.raises(ConfigError, match="the same model on the same machine"):
        bench.with_limits(replace(problem, machine=machine(update=2e9)))


def test_no_plan_leaves_room() -> None:
    device = planned("stream-recompute").device
    says = r"no plan leaves room for 64 micro-batches at a time; .* device: they take"
    with pytest.raises(DoesNotFit, match=says) as e:
        leave_room(asked(TRACE, machine(), device=device), 64, auto)
    assert e.value.needed > e.value.allowed == device
    assert isinstance(e.value, NoRoomTogether)
    assert e.value.alone == make_plan(asked(TRACE, machine(), device=device), "auto")
    with pytest.raises(DoesNotFit) as without:
        leave_room(asked(TRACE, machine(), device=1024), COUNT, auto)
    assert "no plan leaves room" not in str(without.value)
    assert f"one micro-batch at a time, and {COUNT} together take more. What would fit: " in str(without.value)
    with pytest.raises(DoesNotFit) as single:
        leave_room(asked(TRACE, machine(), device=1024), 1, auto)
    assert "micro-batch" not in str(single.value)


def test_micro_batches_that_cannot_be_planned_for() -> None:
    problem = asked(TRACE, machine(), device=ENOUGH)
    with pytest.raises(ConfigError, match="micro_batches must be an int, 1 or more, got 0"):
        leave_room(problem, 0, auto)
    with pytest.raises(ConfigError, match="known only with a batch"):
        leave_room(replace(problem, trace=None, machine=None), 2, auto)
