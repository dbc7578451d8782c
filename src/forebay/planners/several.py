"""One budget for several models on one device: how much of it each has. No torch.

What is needed is known from refusals: a model that has no plan within its part says how much it needs at least. What is
left of a tier when each has that is divided: of the device in a few ways, the one taken with which a few steps of all
models in turns are simulated to be over first (``simulation.alternating``); of host and disk by the bytes of the
parameters, which is what homes grow with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, final

from forebay.budgets import DiskBudget, DiskShare
from forebay.collector import collector_paused
from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.planners import make_plan
from forebay.planners.bench import Bench
from forebay.planners.nearest import with_larger
from forebay.planners.parts import Draft, gives_up_nothing
from forebay.planners.problem import Problem
from forebay.plans import Plan
from forebay.simulation import SeveralForecast, alternating
from forebay.units import format_apart, format_bytes

__all__ = ["Division", "divide", "within"]

TIERS: Final = (Tier.DEVICE, Tier.HOST, Tier.DISK)

STEPS: Final = 3
"""Steps of each model that ways to divide are compared by: the first one finds nothing fetched ahead."""

ROUNDS: Final = 4
"""How often a refusal asks for each model what it needs."""

STRIDE: Final = 8
"""Where more of the host may be needed, but less than a refusal says, a model is planned with this part more of it."""

SHARDS: Final[Mapping[str, str]] = MappingProxyType({"hydra": "l2l"})
"""Policies that are for several models, and what they decide for each of them."""


@dataclass(frozen=True)
class Division:
    """A plan for each model, whose budget is its part, and the bench that it was made on. ``forecast`` is what
    ``STEPS`` steps of each come to in turns."""

    plans: tuple[Plan, ...]
    benches: tuple[Bench, ...]
    forecast: SeveralForecast

    def step_seconds(self, micro_batches: int = 1) -> tuple[float, ...]:
        """Seconds of a step of each in turns, of so many micro-batches: not of the first, and of one in which the
        others train too."""
        found = self.forecast if micro_batches == 1 else _forecast(self.plans, self.benches, micro_batches)
        return tuple(steps[STEPS // 2] for steps in found.steps)


def divide(problems: Sequence[Problem], policy: str) -> Division:
    """Plans by ``policy`` for all of ``problems``, which are within one and the same budget, on one machine, each with
    a trace; the budget is for all of them together.

    Raises ``ConfigError`` for fewer than two models, for different budgets or machines, and without a batch;
    ``CannotServe`` where ``policy`` does not serve one of the models; ``DoesNotFit`` where the budget has no room for
    one of them, or for all together.
    """
    if len(problems) < 2:
        raise ConfigError(f"a budget is divided among two models or more, got {len(problems)}; prepare one by itself")
    first = problems[0]
    for number, problem in enumerate(problems):
        if problem.trace is None:
            raise ConfigError(f"model {number}: what several models take is known only with a batch for each; give one")
        if (problem.budget, problem.host_limit, problem.disk_limit, problem.machine) != (
            first.budget,
            first.host_limit,
            first.disk_limit,
            first.machine,
        ):
            raise ConfigError(f"model {number}: it has another budget or machine than model 0, and they share one")
    with collector_paused():
        return _Dividing(problems, policy).best()


@final
class _Dividing:
    """``_floors``: of every tier the bytes that each model is known to need at least. ``benches``, those of
    other limits, are given where it is only asked what is enough: then no less is looked for than refusals say."""

    def __init__(self, problems: Sequence[Problem], policy: str, benches: Sequence[Bench] = ()) -> None:
        self._tight = not benches
        self._problems = problems
        self._policy = policy
        self._benches = benches or [Bench(problem) for problem in problems]
        self._floors = {tier: [1] * len(problems) for tier in TIERS}
        self._sizes = [sum(block.nbytes for block in problem.model.blocks) for problem in problems]
        self._known: dict[tuple[int, tuple[int, ...]], tuple[Plan, Bench]] = {}

    def best(self) -> Division:
        found: dict[tuple[Draft, ...], Division] = {}
        for weights in _ways(len(self._problems)):
            made = self._planned(weights)
            if isinstance(made, Tier):
                raise self._too_small(made)
            # By what they decide: parts of other sizes often come to the same plans.
            key = tuple(Draft.of(plan) for plan, _ in made)
            # What comes last is what is taken where several are as fast.
            found[key] = found.pop(key) if key in found else _division(made)
            if all(gives_up_nothing(plan) for plan, _ in made):
                break
        best = min(reversed(found.values()), key=lambda one: one.forecast.seconds)
        return replace(best, plans=self._with_the_rest(best.plans))

    def _with_the_rest(self, plans: Sequence[Plan]) -> tuple[Plan, ...]:
        """``plans``, each with what it promises to take and an even part of what nobody does: a step may take more than
        it was planned for, with other batches say."""
        count = len(plans)
        left = {tier: max(0, self._allowed(tier) - sum(p.peaks(1)[tier] for p in plans)) // count for tier in TIERS}
        return tuple(
            replace(plan, budget=within(problem, *(plan.peaks(1)[tier] + left[tier] for tier in TIERS)).budget)
            for plan, problem in zip(plans, self._problems, strict=True)
        )

    def _planned(self, weights: Sequence[int]) -> list[tuple[Plan, Bench]] | Tier:
        """A plan for each model, with what is left of the device divided by ``weights``; or a tier of which the models
        need more than is allowed."""
        while True:
            parts = dict[Tier, list[int]]()
            for tier in TIERS:
                part = self._parts(tier, weights if tier is Tier.DEVICE else self._sizes)
                if part is None:
                    return tier
                parts[tier] = part
            made = []
            for number in range(len(self._problems)):
                limits = tuple(parts[tier][number] for tier in TIERS)
                try:
                    made.append(self._plan(number, limits))
                except CannotServe as refusal:
                    raise CannotServe(f"model {number}: {refusal}", nearest=refusal.nearest) from None
                except DoesNotFit as refusal:
                    had = dict(zip(TIERS, limits, strict=True)).get(Tier(refusal.tier), 0)
                    self._raise_floor(number, refusal, had)
                    break
            else:
                return made

    def _parts(self, tier: Tier, weights: Sequence[int]) -> list[int] | None:
        """What each model has of ``tier``; None where that is less than they need."""
        floors, allowed = self._floors[tier], self._allowed(tier)
        if tier is Tier.DISK and not allowed:
            return [0] * len(floors)
        left = allowed - sum(floors)
        if left < 0:
            return None
        return [floor + left * weight // sum(weights) for floor, weight in zip(floors, weights, strict=True)]

    def _plan(self, number: int, limits: tuple[int, ...]) -> tuple[Plan, Bench]:
        key = number, limits
        if key not in self._known:
            problem = within(self._problems[number], *limits)
            bench = self._benches[number].with_limits(problem)
            self._known[key] = self._made(problem, bench), bench
        return self._known[key]

    def _made(self, problem: Problem, bench: Bench) -> Plan:
        plan = make_plan(problem, SHARDS.get(self._policy, self._policy), bench)
        return replace(plan, planner=self._policy)

    def _allowed(self, tier: Tier) -> int:
        """Bytes that are divided. Of several folders a few are kept back: what rounding adds to one of them."""
        first = self._problems[0]
        disk, allowed = first.budget.disk, first.limit(tier)
        if tier is not Tier.DISK or disk is None or not disk.beside:
            return allowed
        return max(0, allowed - len(disk.folders) ** 2 * len(self._problems))

    def _raise_floor(self, number: int, refusal: DoesNotFit, had: int) -> None:
        """Notes that model ``number`` needs more than it ``had`` of a tier. Raises ``DoesNotFit`` where it has no plan
        even with all there is."""
        tier = Tier(refusal.tier)
        allowed = self._problems[number].limit(tier)
        # What a host needs depends on what the disk takes: with more of it, less than was said may do.
        searched = self._tight and tier is Tier.HOST and self._problems[number].limit(Tier.DISK)
        if tier not in TIERS or had >= allowed or (self._tight and refusal.needed > allowed and not searched):
            raise self._alone(number, refusal) from refusal
        most = min(refusal.needed, had + had // STRIDE + 1) if searched else refusal.needed
        self._floors[tier][number] = max(had + 1, most)

    def _alone(self, number: int, refusal: DoesNotFit) -> DoesNotFit:
        """The refusal of model ``number`` with all there is, after ``refusal``, that with less."""
        try:
            self._made(self._problems[number], self._benches[number])
        except DoesNotFit as whole:
            refusal = whole
        words, nearest = f"model {number}: {refusal}", refusal.nearest
        return DoesNotFit(words, tier=refusal.tier, needed=refusal.needed, allowed=refusal.allowed, nearest=nearest)

    def _too_small(self, tier: Tier) -> DoesNotFit:
        allowed = self._problems[0].limit(tier)
        needs, enough = self._enough(tier)
        needed = sum(needs) + allowed - self._allowed(tier)
        each = ", ".join(f"model {number} {format_bytes(n)}" for number, n in enumerate(needs))
        shown = format_apart(needed, allowed)
        shown = shown if enough else (f"more than {shown[0]}", shown[1])
        what = tier.value if tier is Tier.DISK else f"{tier.value}_memory"
        return DoesNotFit(
            f"{tier.value}: the models need {shown[0]} together and {shown[1]} are allowed ({each}); raise {what}, or "
            f"train them one after the other",
            tier=tier.value,
            needed=needed,
            allowed=allowed,
        )

    def _enough(self, tier: Tier) -> tuple[list[int], bool]:
        """What each model needs of ``tier``, and whether all have plans with the sum of that: a model is asked only
        where those before it have plans, so the sum grows until they have."""
        floors = {each: list(known) for each, known in self._floors.items()}
        for _ in range(ROUNDS * len(self._problems)):
            total = sum(floors[tier]) + self._problems[0].limit(tier) - self._allowed(tier)
            larger = [with_larger(problem, tier, total) for problem in self._problems]
            benches = [bench.with_limits(problem) for bench, problem in zip(self._benches, larger, strict=True)]
            wider = _Dividing(larger, self._policy, benches)
            wider._floors = floors
            try:
                short = wider._planned(self._sizes)
            except DoesNotFit:
                return floors[tier], False
            if short is not tier:
                return floors[tier], not isinstance(short, Tier)
        return floors[tier], False


def _ways(models: int) -> Iterator[list[int]]:
    """Weights by which the rest of the device is divided: all the same, all for one, most for one. All the same again,
    when it is known what each needs at least."""
    yield [1] * models
    for others in (0, 1):
        for one in range(models):
            yield [3 if number == one else others for number in range(models)]
    yield [1] * models


def within(problem: Problem, device: int, host: int, disk: int) -> Problem:
    """``problem`` with a part of its budget: so many bytes of every tier."""
    budget = replace(problem.budget, device=device, host=host, disk=_part(problem.budget.disk, disk))
    return replace(problem, budget=budget, host_limit=host, disk_limit=disk)


def _part(disk: DiskBudget | None, nbytes: int) -> DiskBudget | None:
    """``nbytes`` of ``disk``, of every folder in proportion to what it may hold, to a few bytes."""
    if disk is None or not nbytes:
        return None
    if not disk.beside:
        return DiskBudget(disk.path, nbytes)
    sizes = [share.nbytes or 1 for share in disk.folders]  # none has a size: the same of all
    parts = [max(1, nbytes * size // sum(sizes)) for size in sizes]
    # The largest has what does not divide.
    parts[sizes.index(max(sizes))] += max(0, nbytes - sum(parts))
    beside = tuple(DiskShare(share.path, part) for share, part in zip(disk.beside, parts[1:], strict=True))
    return DiskBudget(disk.path, sum(parts), beside)


def _division(made: Sequence[tuple[Plan, Bench]]) -> Division:
    plans, benches = tuple(plan for plan, _ in made), tuple(bench for _, bench in made)
    return Division(plans, benches, _forecast(plans, benches))


def _forecast(plans: Sequence[Plan], benches: Sequence[Bench], micro_batches: int = 1) -> SeveralForecast:
    # With larger update jobs, as drafts are compared.
    coarse = [replace(p, streaming=bench.coarse(Draft.of(p))) for p, bench in zip(plans, benches, strict=True)]
    return alternating(coarse, [bench.costs for bench in benches], STEPS, micro_batches=micro_batches)
