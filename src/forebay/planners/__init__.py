"""Planners: each answers, in its own way, where every tensor is between its uses.

A planner is a function from a ``Problem`` to a ``Plan``; it imports no torch and nothing of the runtime. To change
how forebay decides, write one and name it here.

problem, parts     what is asked, and what plans are put together from
bench              what a draft needs of every tier and how long its step takes
activations        the menu of every block and the programme over all of them; published planners (literature)
shapes, homes      drafts that fit on the device; what of them goes to disk
search, reasons    the fastest of them, and why in words
speculation        which of its updates run ahead of their step, under backward
device_updates     which of them run on the device though their blocks are at home elsewhere
balance            both numbers together, and how many blocks had better not stay
in_backward        which of them use gradients up in backward, where a user allows it
moves              drafts that move less to a host that has no room
pages              what a plan for a card leaves to its allocator
auto, policies     the planners themselves
states             published policies for parameters, gradients and optimizer states
parallel           published policies over several devices: simulated, and so not among the planners of plans
cpsat              a solver that some of them ask, where it is installed
refusals, nearest  what was too small, and what would fit
alternatives       the best plans of another kind
sweep              the answers for several budgets, beside each other
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from types import MappingProxyType

from forebay.collector import collector_paused
from forebay.errors import CannotServe, ConfigError, DoesNotFit, NoRoomTogether
from forebay.planners.activations.literature import LITERATURE
from forebay.planners.alternatives import Alternative, alternatives
from forebay.planners.auto import auto
from forebay.planners.bench import Bench
from forebay.planners.in_backward import FEWEST, with_enough_slots
from forebay.planners.known import Known
from forebay.planners.pages import with_pages
from forebay.planners.parts import all_resident
from forebay.planners.policies import chen, keep, offload_all, recompute, resident, stream, stream_recompute
from forebay.planners.problem import Problem
from forebay.planners.reasons import bound_anew
from forebay.planners.room import Make, Room, leave_room
from forebay.planners.states import INEXACT, SEVERAL, STATES
from forebay.planners.staying import expect_there, watched
from forebay.plans import Plan
from forebay.simulation import Costs
from forebay.states import Masters

__all__ = [
    "INEXACT",
    "LITERATURE",
    "PLANNERS",
    "SEVERAL",
    "STATES",
    "Alternative",
    "Bench",
    "Problem",
    "alternatives",
    "for_policy",
    "holds_all",
    "make_plan",
    "make_room",
]

_OWN: Mapping[str, Callable[[Problem, Bench | None], Plan]] = MappingProxyType(
    {
        "auto": auto,
        "keep": keep,
        "chen": chen,
        "offload-all": offload_all,
        "resident": resident,
        "recompute": recompute,
        "stream": stream,
        "stream-recompute": stream_recompute,
    }
)

NOTABLE = 1 / 32
"""Share of a step that updates with halves take longer, from which on a plan with whole masters is made too."""

_STAYING = ("auto", "keep", "resident")
"""Those of them that keep on the device what it has room for, and run nothing again for what it has none for."""

PLANNERS: Mapping[str, Callable[[Problem, Bench | None], Plan]] = MappingProxyType(
    {
        **_OWN,
        **LITERATURE,
        **STATES,
        **INEXACT,
        **SEVERAL,
    }
)


def _planner(policy: object) -> Callable[[Problem, Bench | None], Plan]:
    found = PLANNERS.get(policy) if isinstance(policy, str) else None
    if found is None:
        raise ConfigError(f"unknown policy {policy!r}; there are {', '.join(sorted(PLANNERS))}")
    return found


def for_policy(problem: Problem, policy: str) -> Problem:
    """What the planner called ``policy`` is asked where ``problem`` is: forebay's own keep of masters what is enough,
    those of published systems what these keep.

    But not where whole masters stay on the device beside all else that stays there, and no activation has to leave: to
    put halves together and to take them apart, torch's ops go over memory twice more (``simulation.device_updates``).
    Raises ``ConfigError`` for an unknown name.
    """
    _planner(policy)
    halved = problem.with_halves() if policy in _OWN else problem
    return problem if halved.masters is Masters.LOWER and policy in _STAYING and _stays(problem) else halved


def _stays(problem: Problem) -> bool:
    """``holds_all`` of a device that is not the host."""
    return problem.machine is not None and problem.machine.device_kind != "cpu" and holds_all(problem)


def holds_all(problem: Problem) -> bool:
    """Whether the device has room for all of the model, and for all that a step saves, as plain PyTorch has it."""
    return Bench(problem).fits_device(all_resident(problem.model))


def make_room(problem: Problem, policy: str, micro_batches: int, make: Make) -> Room:
    """The plan that ``make`` makes for ``problem`` under ``policy``, with room for ``micro_batches`` (``leave_room``),
    and masters as ``for_policy`` has them. Where putting halves together makes a step notably longer on a device that
    is not the host, and one with whole ones may be shorter, a plan with these is made, too, and the faster of the two
    is taken. So it is where there is none with halves: what updates on the device put together may take more than the
    other halves.

    Raises what ``leave_room`` does, and ``ConfigError`` for an unknown name.
    """
    asked = for_policy(problem, policy)
    halved = asked.masters is not problem.masters
    try:
        room = leave_room(asked, micro_batches, make)
    except (CannotServe, NoRoomTogether):
        raise
    except DoesNotFit as refusal:
        if not halved:
            raise
        return _with_whole(problem, micro_batches, make, refusal)
    if not halved or not _halves_cost(room) or not _may_be_faster(problem, room):
        return room
    try:
        # Of several micro-batches a search knows no step, and what leaves them room may be a slower one.
        beside = problem.beside(room.plan.step_seconds) if micro_batches == 1 else problem
        whole = leave_room(beside, micro_batches, make)
    except DoesNotFit:
        return room
    return whole if (whole.plan.step_seconds or inf) < (room.plan.step_seconds or 0.0) else room


def _with_whole(problem: Problem, micro_batches: int, make: Make, refusal: DoesNotFit) -> Room:
    """The plan with whole masters where ``refusal`` is that of one with halves. Raises ``NoRoomTogether`` where
    there is one for a single micro-batch, and ``refusal`` where there is none either, or what asks for less of the same
    tier."""
    try:
        return leave_room(problem, micro_batches, make)
    except NoRoomTogether:
        raise
    except DoesNotFit as other:
        if other.tier == refusal.tier and other.needed < refusal.needed:
            raise
    raise refusal


def _halves_cost(room: Room) -> bool:
    """Whether updates on the device of blocks that stay there, with their masters as halves, take a notable part of a
    step longer than they would with whole ones."""
    halves, seconds = room.bench.known.costs, room.plan.step_seconds
    if halves is None or not seconds or halves.machine.device_kind == "cpu":
        return False
    whole = Costs(halves.trace, halves.machine, Masters.WHOLE)
    staying = [halves.trace.model.block(p.block) for p in room.plan.placements if p.resident]
    more, less = (sum(c.device_update_seconds(b.name, c.touched(b)) for b in staying) for c in (halves, whole))
    return more - less > NOTABLE * seconds


def _may_be_faster(problem: Problem, room: Room) -> bool:
    """Whether the bound below which no step is under ``problem`` is below the step of ``room``. It costs a small part
    of what a plan does."""
    return Bench(problem).bound < (room.plan.step_seconds or 0.0)


def make_plan(problem: Problem, policy: str, bench: Bench | None = None) -> Plan:
    """The plan of the planner called ``policy``. ``bench`` is one of the same problem, for who asks more than once:
    what has been sized and simulated is used again.

    Raises ``ConfigError`` for an unknown name, ``CannotServe`` for a policy that is not for this model, machine or
    step, and where a block streams that the model's own checkpoint reads in backward, and ``DoesNotFit`` when the
    budget cannot be met.
    """
    planner = _planner(policy)
    with collector_paused():
        bench = bench or Bench(problem)

        def settled(asked: Problem, within: Bench) -> Plan:
            plan = planner(asked, within)
            return bound_anew(within, plan, with_enough_slots(within, plan))

        def planned(on: Bench) -> Plan:
            return with_pages(on, settled)

        try:
            plan = planned(bench)
        except DoesNotFit:
            early = bench.known.early
            if early is None or early.count <= FEWEST:
                raise
            plan = planned(Bench(problem, Known(problem, FEWEST)))  # as many slots as were searched with did not fit
        expect_there(bench, plan)
        return watched(bench, plan)
