"""``forebay compare``: policies side by side on one model, with one device budget or several, predicted and run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.budgets import Budget
from forebay.cli.beside import made_beside
from forebay.cli.plan import PlanSettings, capture_step, chosen_machine, disk_budget, with_ops
from forebay.collector import collector_paused
from forebay.errors import ConfigError, DoesNotFit, UnitError
from forebay.names import meant
from forebay.reporting.comparison import LINKS, Candidate, Measured
from forebay.reporting.files import expect_folder_of, writing
from forebay.reporting.side_by_side import Comparison
from forebay.units import format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from forebay.machine import Machine
    from forebay.plans import Plan, UpdateTime
    from forebay.trace import Trace

__all__ = [
    "STEPS",
    "WARM_STEPS",
    "Run",
    "Shares",
    "candidate_of",
    "compare",
    "compare_policies",
    "draw",
    "expect_picture",
    "parse_budgets",
    "parse_policies",
    "steps_of",
]

PAGE = ".html"
"""A picture that is a page."""

STEP = 0.1
"""Between one share of what everything takes and the next."""

MOST_SHARE = 10.0
"""More of what everything takes is no budget that anybody asks about."""

WARM_STEPS: Final = 2
"""Steps of a trial that do not count: the first one records the order in which blocks are used."""

STEPS: Final = 3
"""Steps that are timed; where blocks are updated in turns so many more that they are whole rounds."""

Run = Callable[["Plan", Budget], Measured]
"""Trains a few steps under a plan within a budget, and gives everything back."""


def silent(line: str) -> None:
    """Tells nobody."""


@dataclass(frozen=True)
class Shares:
    """Device budgets as shares of what a step takes with everything on the device: from ``low`` to ``high`` in steps of
    a tenth. Raises ``ConfigError`` for what is no such range."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.high <= MOST_SHARE:
            raise ConfigError(
                f"--budgets: shares of what everything takes are more than 0 and at most {MOST_SHARE:g}, the lower one "
                f"first, got {self.low:g}:{self.high:g}"
            )

    def of(self, nbytes: int) -> tuple[int, ...]:
        """Bytes of each, of ``nbytes``."""
        count = 1 + int((self.high - self.low) / STEP + 1e-9)
        return tuple(max(1, round((self.low + place * STEP) * nbytes)) for place in range(count))


def parse_budgets(text: str | None) -> tuple[int, ...] | Shares:
    """Device budgets in bytes, written as sizes with commas between them, or as a range of shares, LOW:HIGH. Raises
    ``ConfigError``."""
    if text is None:
        return ()
    if ":" in text:
        try:
            low, high = map(float, text.split(":"))
        except ValueError:
            raise ConfigError(f"--budgets: a range of shares is like 0.2:0.9, got {text!r}") from None
        return Shares(low, high)
    try:
        found = tuple(dict.fromkeys(parse_bytes(part) for part in text.split(",")))
    except UnitError as error:
        raise ConfigError(f"--budgets: {error}") from None
    if min(found) <= 0:
        raise ConfigError(f"--budgets: a device budget is more than 0 bytes, got {text!r}")
    return found


def parse_policies(text: str | None) -> tuple[str, ...]:
    """Names of policies: ``states`` or ``activations``, the published ones for these and ``auto``; ``all`` (or None);
    or any of these names with commas between them. Raises ``ConfigError``."""
    from forebay.planners import LITERATURE, PLANNERS, STATES

    sets = {"all": tuple(PLANNERS), "states": ("auto", *STATES), "activations": ("auto", *LITERATURE)}
    sets |= {name: (name,) for name in sorted(PLANNERS)}
    names = [name.strip() for name in ("all" if text is None else text).split(",")]
    for name in names:
        if name not in sets:
            hint = " ".join(filter(None, (meant(name, sets), f"there are {', '.join(sets)}")))
            raise ConfigError(f"--policies: there is no policy {name!r}; {hint}")
    return tuple(dict.fromkeys(policy for name in names for policy in sets[name]))


def compare(
    settings: PlanSettings,
    budgets: Sequence[int] | Shares,
    *,
    policies: Sequence[str],
    measure: bool = False,
    tell: Callable[[str], None] = silent,
) -> Comparison[Candidate]:
    """``policies`` with each of ``budgets`` (bytes of device memory, or shares of what everything takes; none: what
    ``settings`` say, or what the machine has). That a policy does not fit is an answer too.
    With ``measure`` each policy that fits is run here as well, one after the other; ``tell`` hears of each.
    Raises a ``UsageError`` for what cannot be used."""
    from forebay.cli.runfolder import expect_model
    from forebay.planning import SEVERAL
    from forebay.recipes.tasks import sample

    expect_model(settings.model, weights=False)
    if measure and settings.machine is not None:
        raise ConfigError(
            f"--measure runs the policies on this machine and --machine {settings.machine} asks about another; leave "
            f"one of them out"
        )
    folder = disk_budget(settings)
    machine, notes = chosen_machine(settings, folder)
    found = sample(settings.model, batch=settings.batch, seq=settings.seq, dtype=settings.dtype)
    captured, name = capture_step(settings, found, machine, None)
    on, timed = (machine, ()) if settings.machine is not None else with_ops(captured, machine)
    if isinstance(budgets, Shares):
        budgets = budgets.of(_of_everything(captured.trace, on))
    devices = budgets or (machine.device_capacity if settings.device_memory is None else settings.device_memory,)
    asked = [Budget(device, settings.host_memory, None, folder) for device in devices]
    run: Run | None = None
    unrun: tuple[str, ...] = ()
    if measure:
        from forebay.cli.trial import Trials

        trials = Trials(settings, machine.device_kind)
        tell("running plain PyTorch")
        why = trials.run_plain(captured.trace, on)
        run, unrun = trials.run, (why,) if why else ()
    many, update = settings.accumulate, settings.update
    candidates = compare_policies(captured.trace, on, asked, policies, many, run, tell, update)
    # Updates in backward make one backward a step whatever the loop would do.
    once = (f"{SEVERAL} may take more of the device than these do",) if many == 1 and update == "step" else ()
    said = (*unrun, *once, *notes, *timed, *captured.trace.notes)
    return Comparison(f"{name} on {machine.name}", candidates, said)


def _of_everything(trace: Trace, machine: Machine) -> int:
    """Bytes of the device that a step takes with everything there."""
    from forebay.planners import Bench
    from forebay.planners.parts import all_resident
    from forebay.planning import problem_of

    bench = Bench(problem_of(trace, machine, Budget(machine.device_capacity)))
    return bench.device(all_resident(trace.model))


def compare_policies(
    trace: Trace,
    machine: Machine,
    budgets: Sequence[Budget],
    policies: Sequence[str],
    micro_batches: int = 1,
    run: Run | None = None,
    tell: Callable[[str], None] = silent,
    update: UpdateTime = "step",
) -> tuple[Candidate, ...]:
    """``policies`` on ``trace`` and ``machine`` within each of ``budgets``, in this order, for a step of
    ``micro_batches`` that pass the model together. Budgets differ in the device alone: with more of it ``auto`` is
    never slower (``planners.sweep``). ``run`` is given the plan of each that fits, one after the other; ``tell`` hears
    whose it is. ``update``: see ``Problem``."""
    asked = list(product(policies, budgets))
    make = partial(candidate_of, trace, machine, micro_batches, update)
    made = dict(zip(asked, made_beside(make, asked), strict=True))
    answers = {policy: [made[policy, budget] for budget in budgets] for policy in policies}
    if "auto" in answers:  # the published ones answer each budget as their papers do
        answers["auto"] = _never_slower(answers["auto"], budgets)
    found = []
    for place, budget in enumerate(budgets):
        for policy in policies:
            candidate, plan = answers[policy][place]
            if plan is not None and run is not None:
                tell(f"running {policy} with {format_bytes(budget.device)} on the device{_how_long(plan)}")
                candidate = replace(candidate, measured=run(plan, budget))
            found.append(candidate)
    return tuple(found)


def steps_of(plan: Plan) -> tuple[int, int]:
    """How many steps of a trial do not count, and how many do."""
    # A block's first update makes it ready: in turns, all have had one after a round.
    every = plan.streaming.update_every
    return max(WARM_STEPS, every), -(-STEPS // every) * every


def _how_long(plan: Plan) -> str:
    """In words, where a trial takes more steps than others do."""
    steps = sum(steps_of(plan))
    if steps == WARM_STEPS + STEPS:
        return ""
    long = "" if plan.step_seconds is None else f", some {format_seconds(steps * plan.step_seconds)}"
    return f": {steps} steps{long}, since its blocks are updated in turns of {plan.streaming.update_every} steps"


def _never_slower(
    asked: Sequence[tuple[Candidate, Plan | None]], budgets: Sequence[Budget]
) -> list[tuple[Candidate, Plan | None]]:
    """``asked``, one for each of ``budgets``, with the answer for less memory where that is faster."""
    from forebay.planners.sweep import no_slower

    taken = no_slower([budget.device for budget in budgets], [candidate.step_seconds for candidate, _ in asked])
    found: list[tuple[Candidate, Plan | None]] = []
    for place, (own, _), budget in zip(taken, asked, budgets, strict=True):
        candidate, plan = asked[place]
        candidate = replace(candidate, budget=budget.device, solve_seconds=own.solve_seconds)
        found.append((candidate, None if plan is None else replace(plan, budget=budget)))
    return found


@collector_paused()
def candidate_of(
    trace: Trace, machine: Machine, micro_batches: int, update: UpdateTime, asked: tuple[str, Budget]
) -> tuple[Candidate, Plan | None]:
    """The answer of the policy that is ``asked`` for within a budget, and its plan if it has one. See
    ``compare_policies``."""
    from forebay.figures import with_figures
    from forebay.planners import make_plan, make_room
    from forebay.planning import predict, problem_of
    from forebay.simulation import by_turns, together

    policy, budget = asked
    # Each has benches of its own: what another policy has simulated on one would count as found by this one.
    problem = problem_of(trace, machine, budget, update=update, accumulates=micro_batches > 1)
    start = time.perf_counter()
    try:
        room = make_room(problem, policy, micro_batches, lambda asked, bench: make_plan(asked, policy, bench))
    except DoesNotFit as refusal:
        return Candidate(policy, budget.device, time.perf_counter() - start, reason=str(refusal)), None
    solved = time.perf_counter() - start
    plan, bench = room.plan, room.bench
    timeline, forecast = predict(trace, machine, plan, bench)
    seconds, moved = forecast.step_seconds, forecast.moved
    peaks = timeline.peaks
    if micro_batches > 1:
        plan = with_figures(trace, machine, plan, liveness=bench.liveness, micro_batches=micro_batches)
        passing = by_turns if plan.accumulation is None else together
        passes = passing(plan, bench.costs, micro_batches, liveness=bench.liveness)
        seconds, moved, peaks = passes.seconds, passes.moved, plan.peaks(micro_batches)
    candidate = Candidate(
        policy=policy,
        budget=budget.device,
        solve_seconds=solved,
        step_seconds=seconds,
        peaks=peaks,
        moved={lane: moved.get(lane, 0) for lane in LINKS},
        exact=not plan.changes_numbers,
    )
    return candidate, plan


def expect_picture(path: Path) -> None:
    """Raises ``ConfigError`` for a file that no picture of a comparison can be written to."""
    if path.suffix.lower() != PAGE:
        from forebay.reporting.plot import expect_plottable

        expect_plottable(path, more=(PAGE,))
    else:
        expect_folder_of(path, "--plot")


def draw(found: Comparison[Candidate], path: Path) -> None:
    """Writes the picture of ``found`` to ``path``: a page, or what matplotlib draws. Raises ``StorageError`` where it
    cannot be written."""
    if path.suffix.lower() != PAGE:
        from forebay.reporting.plot import plot

        plot(found.title, found.candidates, path)
        return
    from forebay.reporting.compare_page import render_comparison

    text = render_comparison(found.title, found.candidates, found.notes)
    with writing("the plot", path):
        path.write_text(text, encoding="utf-8")
