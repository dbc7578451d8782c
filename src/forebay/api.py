"""The public functions: where profile, planner and runtime meet. Each room knows only the records between them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from numbers import Integral
from typing import Any

import torch
from torch import nn

from forebay.adoption import adopt_plan, expect_served
from forebay.arguments import expect, expect_folder, expect_loss_fn, expect_records
from forebay.asking import Asking
from forebay.budgets import Budget, Size, expect_disk
from forebay.calls import CHECKSUMS
from forebay.checking import check
from forebay.checkpoint.fill import fill_at_random, fill_from_folder
from forebay.device import open_device
from forebay.device.base import Device
from forebay.errors import DoesNotFit, ModelError, UsageError
from forebay.figures import with_figures
from forebay.loss import Loss, expect_loss
from forebay.machine import Machine
from forebay.opening import expect_no_inference, expect_pair, expect_trainable, limits_of, open_session
from forebay.optim.reading import read_optimizer
from forebay.planners import make_plan, make_room
from forebay.planning import problem_of
from forebay.plans import Plan, Update, UpdateTime
from forebay.profiler.batch import call_arguments
from forebay.profiler.capture import capture
from forebay.profiler.probe import probe
from forebay.reporting.run import RunReport
from forebay.runtime.accumulate import accumulate_by_block, accumulate_in_order, gains
from forebay.runtime.autocasting import warn_of_other_casts
from forebay.runtime.blocks import find_blocks
from forebay.runtime.contents import LazyTensors
from forebay.runtime.hooks import attachment_of, is_prepared, prepared_session, session_of
from forebay.runtime.losses import LossFunction
from forebay.runtime.own_checkpointing import as_planned, leave_to_plan, left_to
from forebay.runtime.session import Session
from forebay.runtime.unplanned import Unplanned
from forebay.runtime.wholes import Wholes
from forebay.safekeeping import keep_in, resume, save
from forebay.simulation import simulate
from forebay.tiling import tile, with_tiles
from forebay.trace import Trace
from forebay.units import format_apart

__all__ = [
    "accumulate",
    "check",
    "close",
    "gradients",
    "initialize",
    "load",
    "parameters",
    "plan",
    "prepare",
    "probe",
    "profile",
    "report",
    "resume",
    "save",
    "simulate",
    "synchronize",
    "tile",
]


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any = None,
    *,
    device_memory: Size,
    device_reserve: Size = 0,
    host_memory: Size | None = None,
    disk: str | os.PathLike[str] | None = None,
    policy: str = "auto",
    loss: Loss = "auto",
    compress: int = 0,
    plan: Plan | None = None,
    device: str | torch.device | Device | None = None,
    blocks: Sequence[str] | None = None,
    micro_batches: int = 1,
    accumulates: bool = True,
    update: UpdateTime = "step",
    crash_safe: str | os.PathLike[str] | None = None,
    checksums: bool = CHECKSUMS,
    loss_fn: LossFunction | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Puts a memory plan under ``model`` and ``optimizer``; the training loop stays as it is.

    ``batch`` is what the model's forward will be called with (a dict or a tuple), in the shapes and dtypes of the
    largest batch of training, such as ``input_ids`` of (sequences, tokens): with it the plan knows the activations; its
    values do not count. Budgets are sizes (``"24GiB"``); ``device_reserve`` is the part of ``device_memory`` that no
    plan takes, for what the loop has on the device beside the model's step (another model, a forward that is in no
    ``loss_fn``, copies of gradients); ``host_memory`` None is what the machine has, ``disk`` is ``PATH`` or
    ``PATH:SIZE``, or several of these with commas between them, over which the bytes are spread. ``loss`` says how a
    causal language model of transformers computes its own: ``plain``, from all logits at once; ``chunked``, in pieces;
    ``auto``, in pieces where that gives the same bits on this device and the plan gains by it. ``compress`` is 0, or
    the bits (8, 4 or 2) that activations may be kept as where the plan gains by it: then gradients are other numbers,
    and the plan says so (``Plan.changes_numbers``). ``plan`` executes a given plan instead of making one; ``blocks``
    names the modules that are streamed as one, instead of those that forebay finds. ``micro_batches`` are as many as
    ``accumulate`` will be given at a time: the plan leaves room for what all of them keep. ``accumulates`` False: the
    loop takes one backward a step, and calls ``zero_grad`` before the next forward. What the gradients of blocks that
    stay on the device will take is room for activations until they are made; a training forward that finds one is
    refused. ``update`` "backward" lets blocks be updated in backward, as soon as their gradients are complete, and
    these be used up: a step is one backward, and nobody may clip gradients or read them. ``crash_safe`` is a folder on
    the disk of ``disk`` where what is at home there has two places, of which no update writes the one that the last
    checkpoint has: ``save`` to this folder copies none of it. It belongs to this model until ``close``. ``checksums``
    (off where nobody says): what is read of parameters and states on disk is held against checksums of what was written
    (``StorageError`` where it is not that, before anything is computed with it). ``loss_fn`` is what the loop computes
    its loss by, of the model and a batch, as ``accumulate`` takes it: what it lets go of, like the model's output, no
    plan leaves room for; where it calls the model several times, the plan is for all of that. None: the loop names the
    output (``output = model(**batch)``), which then lives while the next forward runs.

    A ``batch`` that forward cannot be looked at with is warned of, and the plan does not know the activations.

    Activation checkpointing that a model of transformers does by itself is left to a plan that knows the activations.
    A loop that runs forward under ``torch.autocast`` calls ``prepare`` under the same: the plan is for a step as it is
    where it is made. Of a forward under another one there is a warning. A model in evaluation mode, as
    ``from_pretrained`` leaves it, is planned as it is in training mode, and left as it is.

    Returns the same model, and an optimizer to use in the place of the one given. Raises a ``UsageError`` for input
    that cannot be used and ``DoesNotFit`` when no plan meets the budget; the model is then as it was.
    """
    expect_pair(model, optimizer)
    expect_no_inference("prepare")
    if is_prepared(model):
        raise ModelError(
            "this model, or a part of it, is prepared already; call forebay.close(model) before preparing it anew"
        )
    rule = read_optimizer(optimizer)
    expect_loss(loss)
    if loss_fn is not None:
        expect_loss_fn(loss_fn)
    budget = Budget.of(device_memory, host_memory, disk, device_reserve)
    expect_disk(budget.disk, checksums=checksums)
    with ExitStack() as undo:  # what has been begun, where something is refused
        opened = open_device(device, budget.device)
        if opened is not device:
            undo.callback(opened.close)
        switch_on = leave_to_plan(model) if plan is not None or batch is not None else None
        if switch_on is not None:
            undo.callback(switch_on)
        bound = find_blocks(model, blocks, keeping=rule.keeping)
        expect_trainable(model, bound, optimizer, opened)
        kept = None if crash_safe is None else keep_in(crash_safe, budget.disk)
        if kept is not None:
            undo.callback(kept.lock.close)
        returning = 0 if kept is None else kept.before
        made_here = plan is None and batch is not None
        if plan is None:
            places = 1 if kept is None else 2
            asked = budget, policy, opened, compress, micro_batches, accumulates, update, places, checksums
            plan = Asking(model, batch, bound, blocks, optimizer, *asked, returning, loss_fn).plan(loss)
        else:
            plan = adopt_plan(plan, batch, bound, rule, budget, partial(limits_of, returning=returning))
        plan = with_tiles(plan, model, rule.state_names, batch, torch.device(opened.name))
        expect_served(plan, two_places=kept is not None, checksums=checksums)
        if plan.read_outside:
            bound = find_blocks(model, blocks, plan.read_outside, keeping=rule.keeping)
        plan = plan if switch_on is None else left_to(plan, switch_on)
        owns = opened is not device
        prepared = open_session(model, optimizer, bound, rule, plan, opened, owns_device=owns, kept=kept)
        if switch_on is not None:
            attachment_of(model).at_end(switch_on)
        if batch is not None:
            attachment_of(model).planned_for = Unplanned(
                model.forward,
                *call_arguments(batch),
                activations=bool(plan.fingerprint),
                by_loss=loss_fn is not None,
            )
        if made_here:
            attachment_of(model).at_end(warn_of_other_casts(model, torch.device(opened.name).type).remove)
        undo.pop_all()
        return prepared


def profile(
    model: nn.Module,
    batch: Any,
    optimizer: str | torch.optim.Optimizer = "adamw",
    *,
    device: str = "cpu",
    blocks: Sequence[str] | None = None,
    loss_fn: LossFunction | None = None,
) -> Trace:
    """One training step of ``model`` on ``batch``, forward and backward, recorded under fake tensors. Of ``batch``
    shapes and dtypes count, as in ``prepare``.

    No memory is taken and nothing is computed: ``model`` may be on the meta device. ``device`` is the kind that the
    step is recorded for, ``cpu`` or ``cuda``; ``loss_fn`` is that of ``prepare``. Activation checkpointing that a model
    of transformers does by itself is off in it, as it is under a plan. Raises ``CaptureFailed`` naming the op for a
    model that cannot run so, ``ModelError`` for a batch or a model that cannot be used, ``OptimizerError`` for an
    optimizer that is not known.
    """
    if loss_fn is not None:
        expect_loss_fn(loss_fn)
    expect_no_inference("profile")
    if is_prepared(model):
        raise ModelError("this model is prepared; profile it before, or call forebay.close(model) first")
    with as_planned(model):
        return capture(model, batch, optimizer, device, blocks, loss_fn=loss_fn).trace


def plan(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    policy: str = "auto",
    compress: int = 0,
    micro_batches: int = 1,
    update: UpdateTime = "step",
    crash_safe: bool = False,
    checksums: bool = CHECKSUMS,
    accumulates: bool = True,
) -> Plan:
    """The plan of the planner called ``policy`` for ``trace`` on ``machine`` within ``budget``.

    It says what it needs of every tier (bytes) and for a step (seconds). ``compress``, ``micro_batches``, ``update``,
    ``checksums`` and ``accumulates`` are those of ``prepare``; ``crash_safe``: what is at home on disk has two places.
    Raises ``DoesNotFit`` when no plan meets the budget (``CannotServe`` for a policy that is not for this model or
    machine), ``ConfigError`` for an unknown policy, and for ``checksums`` without a disk.
    """
    expect_records(trace=trace, machine=machine, budget=budget)
    expect("crash_safe", crash_safe, bool, "True or False here: whether what is on disk has two places")
    copies = 2 if crash_safe else 1
    problem = problem_of(trace, machine, budget, compress, update, copies, checksums, accumulates=accumulates)
    room = make_room(problem, policy, micro_batches, lambda asked, bench: make_plan(asked, policy, bench))
    return with_figures(trace, machine, room.plan, liveness=room.bench.liveness, micro_batches=micro_batches)


def parameters(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Full-precision copies of a prepared model's parameters on the host, by plain PyTorch name, read when asked.

    Each has the shape of its parameter, and is fp32 where that has a master. Raises ``UsageError`` for a model that is
    not prepared.
    """
    session = prepared_session(model)
    return Wholes(model, LazyTensors(list(session.parameters), session.contents.full_precision))


def gradients(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Copies, on the host, of the gradients that there are now, by plain PyTorch name, read when asked.

    Each has the shape and the dtype of its parameter. Raises ``UsageError`` for a model that is not prepared, and
    ``GradientUsedUp`` when one is read that an update in backward has used.
    """
    session = prepared_session(model)
    there = [name for name, parameter in session.parameters.items() if parameter.grad is not None]
    return Wholes(model, LazyTensors(there, session.contents.gradient))


def synchronize(model: nn.Module) -> None:
    """Waits for every update and transfer of a prepared model; raises the first error among them, and ``UsageError``
    for a model that is not prepared."""
    prepared_session(model).synchronize()


def report(model: nn.Module) -> RunReport:
    """The plan of a prepared model and what was measured so far: bytes of each tier, seconds of each lane.

    Raises ``UsageError`` for a model that is not prepared.
    """
    session = prepared_session(model)
    return RunReport(
        plan=session.plan,
        timeline=session.timeline(),
        elapsed=session.elapsed,
        steps=session.steps,
        micro_batches=session.measure.micro_batches,
        together=session.measure.together,
    )


def accumulate(model: nn.Module, micro_batches: Iterable[Any], loss_fn: LossFunction) -> list[torch.Tensor]:
    """Adds up the gradients of several micro-batches; parameters and gradients cross the link once for all of them.

    The same as ``for batch in micro_batches: loss_fn(model, batch).backward()``, with the same numbers, bit for bit
    (under updates in turns those of a loop that adds what waits to the sum of the micro-batches, and not to the first).
    ``loss_fn`` calls the model and returns the loss of one micro-batch, a tensor with one element, scaled as it is to
    count (divided by the number of micro-batches for their mean). The losses are returned, in order, detached, in the
    shape and dtype that they came in. On a prepared model every micro-batch passes a block before the next block is
    fetched, forward and backward; what all of them keep for backward is on the device, or where the plan moves it, at
    the same time. On a model that is not prepared, or that stays on the device as a whole, it is that loop.

    Raises ``UsageError`` for no micro-batches, a loss that is none, several under a plan for one backward a step, and a
    second call while one is under way; ``ModelError`` for a model that cannot be taken block by block; ``DoesNotFit``
    where the plan says beforehand that a budget has no room for what so many micro-batches keep, ``BudgetExceeded``
    where that shows on the way; and whatever ``loss_fn`` raises. After an error the gradients are those of before,
    except that some may have been added to those which were there already: begin the step anew with ``zero_grad()``.
    """
    attachment = session_of(model)
    expect("micro_batches", micro_batches, Iterable, "a list of batches, each as loss_fn takes it")
    if isinstance(micro_batches, Mapping | str):
        raise UsageError("micro_batches is a list of batches, and what was given looks like one; give [batch]")
    expect_loss_fn(loss_fn)
    batches = list(micro_batches)
    if not batches:
        raise UsageError("accumulate was given no micro-batches; a step needs one at least")
    if attachment is not None and len(batches) > 1 and not attachment.session.plan.accumulates:
        raise UsageError(
            f"the plan is for one backward a step (accumulates=False), and accumulate was given {len(batches)} "
            f"micro-batches; prepare the model with accumulates=True"
        )
    if attachment is None or len(batches) == 1 or not torch.is_grad_enabled():
        return accumulate_in_order(model, batches, loss_fn)
    if not gains(attachment):
        if attachment.session.plan.updated(Update.BACKWARD):
            raise UsageError(
                f"the plan updates blocks in backward, which uses gradients up, and {len(batches)} micro-batches pass "
                f"this model one after the other and not block by block; prepare it with update='step'"
            )
        return accumulate_in_order(model, batches, loss_fn)
    _expect_room(attachment.session, len(batches))
    return accumulate_by_block(attachment, model, batches, loss_fn)


def _expect_room(session: Session, micro_batches: int) -> None:
    needs, ledgers = session.plan.accumulation, session.resources.ledgers
    if needs is None:
        return
    for ledger in (session.device.ledger, ledgers.host, ledgers.disk):
        if ledger.limit is None:
            continue
        needed = needs.needed(ledger.tier, micro_batches)
        allowed = ledger.limit - session.plan.budget.reserve(ledger.tier)
        if needed <= allowed:
            continue
        most = needs.most(ledger.tier, allowed)
        fit = "two do not fit: use a loop"
        if most > 1:
            fit = f"at most {most} fit: call accumulate more than once in a step"
        shown = format_apart(needed, allowed)
        raise DoesNotFit(
            f"{ledger.tier.value}: {micro_batches} micro-batches that pass the model together take up to {shown[0]} "
            f"and {shown[1]} are allowed; {fit}, or prepare the model with micro_batches={micro_batches}",
            tier=ledger.tier.value,
            needed=needed,
            allowed=allowed,
        )


def close(model: nn.Module) -> None:
    """Ends forebay's work on a model: waits, takes the hooks off, frees threads, arenas and files.

    The parameters become ordinary tensors on the host (resident ones stay on the device). A model that is not
    prepared is left as it is. When a transfer, an update or a checkpoint in the background had failed, everything is
    freed all the same and its error is raised; parameters that cannot be read any more are NaN. Raises ``UsageError``
    for what is no model, and under ``torch.inference_mode()``.
    """
    attachment = session_of(model)
    if attachment is None:
        return
    # torch also puts back, at the end of that mode, the dispatch mode that is taken off here.
    expect_no_inference("close")
    session = attachment.session
    # From the last one to the first, each whatever those before it raised.
    with ExitStack() as closing:
        closing.callback(session.close)
        closing.callback(attachment.detach)
        closing.callback(session.store.come_home)
        session.synchronize()


def load(model: nn.Module, folder: str) -> None:
    """Loads a folder of safetensors into a prepared model, block by block, straight into its tiers.

    Files as they are on the hub are converted as ``from_pretrained`` of transformers does it, a parameter at a time.

    Buffers that are not persistent keep their values, and so do those that transformers lets files lack.

    Raises ``ConfigError`` naming the first tensor that is missing or has another shape.
    """
    session = prepared_session(model)
    expect_folder(folder, "a folder with safetensors")
    fill_from_folder(session, model, folder)


def initialize(model: nn.Module, seed: int = 0) -> None:
    """Gives a prepared model that was built on the meta device its random initial values, block by block.

    A transformers model's own initialisation is used; other modules need ``reset_parameters``. Raises ``UsageError``
    for a model that is not prepared and for a ``seed`` that is no integer of 64 bits, and ``ModelError`` naming the
    first parameter that stays without a value.
    """
    session = prepared_session(model)
    expect("seed", seed, Integral, "an integer of 64 bits")
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"seed is an integer of 64 bits; got {seed}")
    fill_at_random(session, model, int(seed))
