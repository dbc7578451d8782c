"""``forebay plan --devices`` and ``forebay compare --devices``: one model over several devices, simulated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.budgets import Budget
from forebay.cli.plan import PlanSettings, capture_step, chosen_machine, with_ops
from forebay.errors import ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.reporting.devices import DevicesReport, ServerCandidate
from forebay.reporting.side_by_side import Comparison, fastest_first
from forebay.servers import Server

if TYPE_CHECKING:
    from forebay.machine import Machine
    from forebay.planners.parallel import ServerBench
    from forebay.trace import Trace

__all__ = [
    "compare_devices",
    "expect_simulated",
    "parse_device_policies",
    "plan_devices",
    "print_comparison",
    "print_plan",
]

SIMULATED = "steps over several devices are simulated: nothing runs on them here"

AUTO = "auto"
"""The fastest of all."""


@dataclass(frozen=True)
class _Asked:
    """A step of a model, the machine of each device, how they are joined, and remarks."""

    name: str
    trace: Trace
    machine: Machine
    server: Server
    notes: tuple[str, ...]


def expect_simulated(settings: PlanSettings, **others: object) -> None:
    """Raises ``ConfigError`` for what is there for one device alone: of ``settings``, and those of ``others`` (flags)
    that were given."""
    given = {
        "disk": settings.disk,
        "loss": settings.loss == "chunked",
        "compress": settings.compress,
        "update": settings.update == "backward",
        "tile": settings.tile,
        "checksums": settings.checksums,
        **others,
    }
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name} is for one device, and {SIMULATED}; leave it or --devices out")


def parse_device_policies(text: str | None) -> tuple[str, ...]:
    """Names of policies for several devices, with commas between them; None or ``all``: all of them. Raises
    ``ConfigError``."""
    from forebay.planners.parallel import ON_DEVICES

    if text in (None, "all"):
        return tuple(ON_DEVICES)
    names = tuple(dict.fromkeys((text or "").split(",")))
    for name in names:
        _expect_known(name, "all")
    return names


def _expect_known(name: str, also: str) -> None:
    from forebay.planners.parallel import ON_DEVICES

    if name not in ON_DEVICES:
        raise ConfigError(f"there is no policy {name!r} for several devices; there are {also}, {', '.join(ON_DEVICES)}")


def print_plan(settings: PlanSettings, out: Path | None, *, as_json: bool) -> bool:
    """Prints what a step over several devices comes to, and returns whether it fits. Raises a ``UsageError`` for what
    cannot be used."""
    from forebay.cli.console import print_answer, print_json
    from forebay.reporting.devices import devices_table

    expect_simulated(settings, out=out)
    report = plan_devices(settings)
    if as_json:
        print_json(report.to_json_dict())
    else:
        print_answer(devices_table(report))
    return report.fits


def print_comparison(
    settings: PlanSettings, budgets: str | None, policies: str | None, *, as_json: bool, **others: object
) -> bool:
    """Prints policies for several devices side by side, and returns whether any fits. ``others`` are flags for one
    device. Raises a ``UsageError`` for what cannot be used."""
    from forebay.cli.compare import Shares, parse_budgets
    from forebay.cli.console import print_answer, print_json
    from forebay.reporting.devices import devices_tables

    expect_simulated(settings, **others)
    sizes = parse_budgets(budgets)
    if isinstance(sizes, Shares):
        raise ConfigError(f"--budgets: of several devices they are sizes, got {budgets!r}")
    try:
        asked = parse_device_policies(policies)
    except ConfigError as error:
        raise ConfigError(f"--policies: {error}") from None
    found = compare_devices(settings, sizes, asked)
    if as_json:
        print_json([candidate.to_json_dict() for candidate in found.candidates])
    else:
        print_answer(devices_tables(found.title, found.candidates, found.notes))
    return any(candidate.feasible for candidate in found.candidates)


def plan_devices(settings: PlanSettings) -> DevicesReport:
    """Answers ``settings`` for its devices; that nothing fits is an answer too. Policy ``auto`` is the fastest of all.
    Raises a ``UsageError`` for what cannot be used."""
    from forebay.planners.parallel import ON_DEVICES

    policies = tuple(ON_DEVICES)
    if settings.policy != AUTO:
        try:
            _expect_known(settings.policy, AUTO)
        except ConfigError as error:
            raise ConfigError(f"--policy: {error}") from None
        policies = (settings.policy,)
    asked = _asked(settings)
    bench = _bench(asked, settings, settings.device_memory)
    found = [_candidate(bench, policy) for policy in policies]
    fitting = fastest_first(found)
    chosen = fitting[0] if fitting else found[-1]
    return DevicesReport(
        asked.name,
        f"{asked.machine.name} ({asked.server.words})",
        bench.micro_batches,
        asked.trace.tokens,
        (bench.limit, bench.bench.problem.limit(Tier.HOST)),
        chosen,
        tuple(one for one in found if one is not chosen),
        asked.notes,
    )


def compare_devices(
    settings: PlanSettings, budgets: Sequence[int], policies: Sequence[str]
) -> Comparison[ServerCandidate]:
    """``policies`` with each of ``budgets`` of a device (bytes; none: what it has). Raises a ``UsageError`` for what
    cannot be used."""
    asked = _asked(settings)
    found = []
    for budget in budgets or (settings.device_memory,):
        bench = _bench(asked, settings, budget)
        found += [_candidate(bench, policy) for policy in policies]
    title = f"{asked.name} on {asked.machine.name}, {asked.server.words}, {bench.micro_batches} micro-batches a step"
    return Comparison(title, tuple(found), asked.notes)


def _asked(settings: PlanSettings) -> _Asked:
    from forebay.recipes.tasks import sample

    machine, notes = chosen_machine(settings, None)
    try:
        server = Server.parse(settings.devices or "1", machine.h2d.curve.best)
    except ConfigError as error:
        raise ConfigError(f"--devices: {error}") from None
    found = sample(settings.model, batch=settings.batch, seq=settings.seq, dtype=settings.dtype)
    captured, name = capture_step(settings, found, machine, None)
    on, timed = (machine, ()) if settings.machine is not None else with_ops(captured, machine)
    return _Asked(name, captured.trace, on, server, (SIMULATED, *notes, *timed, *captured.trace.notes))


def _bench(asked: _Asked, settings: PlanSettings, device: int | None) -> ServerBench:
    from forebay.planners import Bench
    from forebay.planners.parallel import ServerBench
    from forebay.planning import problem_of

    budget = Budget(asked.machine.device_capacity if device is None else device, settings.host_memory)
    return ServerBench(Bench(problem_of(asked.trace, asked.machine, budget)), asked.server, settings.accumulate)


def _candidate(bench: ServerBench, policy: str) -> ServerCandidate:
    from forebay.planners.parallel import plan_server

    start, budget = time.perf_counter(), bench.bench.problem.budget.device
    try:
        plan = plan_server(bench, policy)
    except DoesNotFit as refusal:
        return ServerCandidate(policy, budget, time.perf_counter() - start, reason=str(refusal))
    return ServerCandidate(policy, budget, time.perf_counter() - start, plan)
