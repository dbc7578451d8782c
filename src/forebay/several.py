"""Several models on one device, within one budget: prepared together, trained in turns, reported together.

    (first, its), (second, others) = forebay.prepare_several(
        [(first, its, batch), (second, others, batch)], device_memory="24GiB", host_memory="96GiB"
    )
    forebay.alternate([first, second], [partial(train, first, its), partial(train, second, others)])

Each loop is the user's own. While one model waits for bytes, or for its update, the device computes for another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, TypeVar, final

import torch
from torch import nn

from forebay.api import close, report
from forebay.arguments import expect
from forebay.budgets import Budget, Size
from forebay.device import open_device
from forebay.device.base import Device
from forebay.device.cpu import CpuDevice
from forebay.errors import ModelError, UsageError
from forebay.figures import with_figures
from forebay.machine import Machine
from forebay.memory import Ledger, Tier
from forebay.opening import expect_no_inference, expect_pair, expect_trainable, ledgers_of, limits_of, open_session
from forebay.optim.reading import read_optimizer
from forebay.optim.rules import UpdateRule
from forebay.planners import Problem
from forebay.planners.several import Division, divide
from forebay.planning import problem_of
from forebay.plans import Plan
from forebay.profiler.capture import capture
from forebay.profiler.here import this_machine
from forebay.reporting.several import SeveralReport
from forebay.runtime.alternate import alternate_loops
from forebay.runtime.autocasting import warn_of_other_casts
from forebay.runtime.blocks import BoundModel, find_blocks
from forebay.runtime.hooks import attachment_of, is_prepared, prepared_session
from forebay.runtime.own_checkpointing import leave_to_plan, left_to
from forebay.tiling import with_tiles
from forebay.units import format_seconds

__all__ = ["alternate", "prepare_several", "report_several"]

Result = TypeVar("Result")
Prepared = tuple[nn.Module, torch.optim.Optimizer]


def prepare_several(
    models: Sequence[tuple[nn.Module, torch.optim.Optimizer, Any]],
    *,
    device_memory: Size,
    host_memory: Size | None = None,
    disk: str | os.PathLike[str] | None = None,
    policy: str = "auto",
    device: str | torch.device | Device | None = None,
) -> list[Prepared]:
    """Puts memory plans under several models, each given with its optimizer and a batch, that are trained on one
    device and share one budget. Returns what ``prepare`` returns, for each.

    Budgets, ``policy`` and checkpointing by a model itself are as in ``prepare``; the budget is that of all models
    together. It is divided such that a few steps of each, in turns, are over first in simulation. Policy ``hydra`` is
    that of the paper: every model passes a layer or two at a time (``l2l``). Losses of language models are computed
    from all logits at once. Each model is closed by itself; what it had of the budget is not given to the others.

    Today models take turns on ``cpu`` only. Raises a ``UsageError`` for input that cannot be used, with the number of
    the model, from 0, and ``DoesNotFit`` when the budget has no room for one of them or for all together; every model
    is then as it was.
    """
    expect_no_inference("prepare_several")
    expect("policy", policy, str, "the name of one")
    expect("models", models, Sequence, "a list, of a model, its optimizer and a batch each")
    budget = Budget.of(device_memory, host_memory, disk)
    whole = open_device(device, budget.device)
    if not isinstance(whole, CpuDevice):
        if whole is not device:
            whole.close()
        raise ModelError(
            f"several models take turns on cpu only, this is {whole.name}; give device='cpu', or prepare each by "
            f"itself and train one after the other"
        )
    found = [_read(number, one, whole) for number, one in enumerate(models)]
    _expect_apart(found)
    limits = limits_of(budget)
    with ExitStack() as undo:
        switches = [leave_to_plan(one.model) for one in found]
        for own in filter(None, switches):
            undo.callback(own)
        machine, notes = this_machine(whole.name, budget.disk)
        problems = [_problem(number, one, budget, machine, limits) for number, one in enumerate(found)]
        plans = _settled(divide(problems, policy), notes)
        plans = [plan if own is None else left_to(plan, own) for plan, own in zip(plans, switches, strict=True)]
        prepared = _opened(found, plans, whole, budget)
        undo.pop_all()
    for (model, _), switch_on in zip(prepared, switches, strict=True):
        if switch_on is not None:
            attachment_of(model).at_end(switch_on)
    return prepared


def alternate(models: Sequence[nn.Module], loops: Sequence[Callable[[], Result]]) -> list[Result]:
    """Trains models that ``prepare_several`` has prepared: runs ``loops``, one for each of ``models``, to their ends,
    and returns what they return.

    Each loop runs in a thread of its own, in which it trains its model, and no other, as it would alone: with the same
    numbers, bit for bit, random ones included, which it draws from generators that it finds as they are now.
    Afterwards they are as the first loop has left them. One loop computes at a time. Where one raises, the others go on
    to their ends before that error is raised; a model whose loop has raised can be trained on. Ctrl-C ends all loops.

    Raises ``UsageError`` for models that were not prepared together, that are named twice, or that take turns already.
    """
    _expect_models(models)
    expect("loops", loops, Sequence, "a list of functions, one for each model")
    for loop in loops:
        expect("each of loops", loop, Callable, "a function without arguments that trains its model")
    if not models or len(models) != len(loops):
        raise UsageError(f"each model has a loop of its own, got {len(models)} models and {len(loops)} loops")
    attachments = [attachment_of(model) for model in models]
    if len({id(one) for one in attachments}) < len(attachments):
        raise UsageError("a model is named twice; give every model once, with one loop")
    if len({id(one.session.device.turn) for one in attachments}) > 1:
        raise UsageError("these models were not prepared together; prepare them with forebay.prepare_several")
    return alternate_loops(attachments, loops)


def report_several(models: Sequence[nn.Module]) -> SeveralReport:
    """The plans of models that were prepared together, what was measured of each so far, and what all models that share
    their budget have taken of every tier together. Raises ``UsageError`` for models that were not."""
    _expect_models(models)
    sessions = [prepared_session(model) for model in models]
    beside = [session.resources.ledgers for session in sessions]
    accounts = [
        [session.device.ledger.within, ledgers.host.within, ledgers.pinned.within, ledgers.disk.within]
        for session, ledgers in zip(sessions, beside, strict=True)
    ]
    whole = [ledger for ledger in accounts[0] if ledger is not None] if accounts else []
    if not whole or any(other != accounts[0] for other in accounts):
        raise UsageError("these models were not prepared together; use forebay.report for each")
    return SeveralReport(tuple(map(report, models)), tuple(map(Ledger.usage, whole)))


def _expect_models(models: object) -> None:
    expect("models", models, Sequence, "a list of models that forebay.prepare_several has prepared")


@final
@dataclass(frozen=True)
class _Found:
    """A model that is to be prepared."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Any
    bound: BoundModel
    rule: UpdateRule


def _read(number: int, given: Any, device: Device) -> _Found:
    try:
        if not isinstance(given, tuple | list) or len(given) != 3:
            what = f"{len(given)} things" if isinstance(given, tuple | list) else type(given).__name__
            raise UsageError(f"each is given as a model, its optimizer and a batch, got {what}")
        model, optimizer, batch = given
        expect_pair(model, optimizer)
        if is_prepared(model):
            raise ModelError("it, or a part of it, is prepared already; call forebay.close(model) first")
        if batch is None:
            raise ModelError("it has no batch, and a budget is divided by what a step takes; give one")
        rule = read_optimizer(optimizer)
        bound = find_blocks(model, keeping=rule.keeping)
        expect_trainable(model, bound, optimizer, device)
        return _Found(model, optimizer, batch, bound, rule)
    except UsageError as error:
        raise type(error)(f"model {number}: {error}") from error


def _expect_apart(found: Sequence[_Found]) -> None:
    owners: dict[int, int] = {}
    for number, one in enumerate(found):
        for name, parameter in one.bound.parameters.items():
            owner = owners.setdefault(id(parameter), number)
            if owner != number:
                raise ModelError(f"models {owner} and {number} share parameter {name}; prepare them as one model")


def _problem(number: int, one: _Found, budget: Budget, machine: Machine, limits: dict[Tier, int]) -> Problem:
    try:
        trace = capture(one.model, one.batch, one.optimizer, machine.device_kind).trace
    except UsageError as error:
        raise type(error)(f"model {number}: {error}") from error
    asked = problem_of(trace, machine, budget)
    return replace(asked, host_limit=limits[Tier.HOST], disk_limit=limits[Tier.DISK])


def _settled(division: Division, notes: tuple[str, ...]) -> list[Plan]:
    """The plans, proven, with the seconds of a step in turns."""
    settled, models = [], len(division.plans)
    seconds = zip(division.step_seconds(1), division.step_seconds(2), strict=True)
    for plan, bench, (one, two) in zip(division.plans, division.benches, seconds, strict=True):
        bench.prove(plan)
        costs = bench.costs
        made = with_figures(costs.trace, costs.machine, plan, notes, liveness=bench.liveness)
        alone = "" if made.step_seconds is None else f", {format_seconds(made.step_seconds)} alone"
        why = f"one of {models} models that take turns on the device: a step takes {format_seconds(one)}{alone}"
        further = max(0.0, two - one)
        settled.append(replace(made, step_seconds=one, micro_batch_seconds=further, reasons=(*made.reasons, why)))
    return settled


def _opened(found: Sequence[_Found], plans: Sequence[Plan], whole: CpuDevice, budget: Budget) -> list[Prepared]:
    ledgers = ledgers_of(budget)
    prepared: list[Prepared] = []
    try:
        for one, plan in zip(found, plans, strict=True):
            device = CpuDevice(plan.budget.device, of=whole)
            said = with_tiles(plan, one.model, one.rule.state_names, one.batch, torch.device(device.name))
            bound = one.bound
            if said.read_outside:
                bound = find_blocks(one.model, read_outside=said.read_outside, keeping=one.rule.keeping)
            given = one.model, one.optimizer, bound, one.rule, said, device
            prepared.append(open_session(*given, owns_device=True, within=ledgers))
            attachment_of(one.model).at_end(warn_of_other_casts(one.model, torch.device(device.name).type).remove)
    except BaseException:
        for model, _ in prepared:
            close(model)
        raise
    return prepared
