"""From a plan to a running session: tiers are filled, the parameters go to their homes, the hooks are put on."""

from __future__ import annotations

import weakref

import torch
from torch import nn

from forebay.budgets import Budget
from forebay.device.base import Device, NoWatch, Watch
from forebay.device.ledger import StorageLedger
from forebay.errors import DoesNotFit, ModelError, OptimizerError, UsageError
from forebay.kernels.team import Team, cores, cores_beside_compute
from forebay.memory import Ledger, Tier
from forebay.model import Parameter
from forebay.optim.rules import UpdateRule
from forebay.optim.streamed import StreamedOptimizer, refuse_steps
from forebay.plans import Plan
from forebay.priority import step_back
from forebay.runtime.blocks import BoundModel
from forebay.runtime.blockstate import BlockState
from forebay.runtime.head import ChunkedHead, Recognised, recognise
from forebay.runtime.hooks import Attachment
from forebay.runtime.host_arenas import Ledgers
from forebay.runtime.other_optimizers import refuse_other_steps
from forebay.runtime.resources import Resources
from forebay.runtime.session import Session, Whereabouts
from forebay.runtime.stash import Stash
from forebay.runtime.store import Store
from forebay.scheduling.slots import SlotPool
from forebay.tiers.arena import CudaPinner, NoPinner, Pinner
from forebay.tiers.host import available_host_memory, free_in
from forebay.tiers.kept import KeptFolder
from forebay.units import format_apart

__all__ = ["expect_no_inference", "expect_pair", "expect_trainable", "ledgers_of", "limits_of", "open_session"]


def limits_of(budget: Budget, returning: int = 0) -> dict[Tier, int]:
    """Bytes of host and disk that may be used: the budget, and never more than the machine has free. ``returning`` are
    those of the disk that will be free before they are needed."""
    free = available_host_memory().available
    if budget.host is not None and budget.host > free:
        asked, there = format_apart(budget.host, free)
        raise DoesNotFit(
            f"host memory: {asked} are allowed and this machine has {there} free; lower host_memory",
            tier=Tier.HOST.value,
            needed=budget.host,
            allowed=free,
        )
    on_disk = 0
    if budget.disk is not None:
        # Asked even where a size is given: a path that is not there is an error although nothing may go there.
        free_on_disk = free_in([share.path for share in budget.disk.folders])
        on_disk = free_on_disk + returning if budget.disk.nbytes is None else budget.disk.nbytes
    return {Tier.HOST: free if budget.host is None else budget.host, Tier.DISK: on_disk}


def ledgers_of(budget: Budget, within: Ledgers | None = None, returning: int = 0) -> Ledgers:
    """Accounts of the tiers beside the device, as parts of those of ``within``. ``returning``: see ``limits_of``, whose
    errors it raises."""
    limits = limits_of(budget, returning)
    return Ledgers(
        Ledger(Tier.HOST, limits[Tier.HOST], within and within.host),
        Ledger(Tier.PINNED, budget.pinned, within and within.pinned),
        Ledger(Tier.DISK, limits[Tier.DISK], within and within.disk),
    )


def expect_pair(model: object, optimizer: object) -> None:
    """Raises ``UsageError`` for what is no model and its optimizer."""
    several = optimizer if isinstance(optimizer, list | tuple) else ()
    if several and all(isinstance(one, torch.optim.Optimizer) for one in several):
        raise UsageError(
            f"prepare takes one optimizer, got {len(several)}: make one with their parameters in groups of it, each "
            f"with its own hyperparameters (forebay.optim.Muon updates matrices as Muon does and all else as AdamW)"
        )
    if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        found = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise UsageError(f"prepare takes a torch.nn.Module, and then its torch.optim.Optimizer, got {found}")


def expect_no_inference(what: str) -> None:
    """Raises ``UsageError`` for a call of ``what`` under ``torch.inference_mode()``: tensors made there never train."""
    if torch.is_inference_mode_enabled():
        raise UsageError(
            f"{what} is called under torch.inference_mode(), and no tensor that is made there can be trained; call it "
            f"outside"
        )


def expect_trainable(model: nn.Module, bound: BoundModel, optimizer: torch.optim.Optimizer, device: Device) -> None:
    """Raises ``ModelError`` or ``OptimizerError`` for what ``device`` cannot train."""
    if not bound.parameters:
        raise ModelError("the model has no parameters; there is nothing to train")
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"buffer {name} is on the meta device and has no values; build the model so that only parameters "
                f"are on meta (accelerate.init_empty_weights() does)"
            )
    known = {id(p) for p in bound.parameters.values()}
    for group in optimizer.param_groups:
        if any(id(p) not in known for p in group["params"]):
            raise OptimizerError("the optimizer holds parameters that are not the model's; make it from this model")
    allowed = {"cpu", "meta", torch.device(device.name).type}
    for name, parameter in bound.parameters.items():
        if parameter.device.type not in allowed:
            raise ModelError(
                f"parameter {name} is on {parameter.device} and forebay trains on {device.name}; keep the model on "
                f"the cpu (or on meta) and let prepare() place it"
            )
        if parameter.is_inference():
            raise ModelError(
                f"parameter {name} was made under torch.inference_mode() and cannot be trained; build the model outside"
            )
        if parameter.grad is not None:
            raise ModelError(f"parameter {name} has a gradient already; call optimizer.zero_grad() before prepare()")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            raise ModelError(f"embedding {name} makes sparse gradients, which no plan knows; make it with sparse=False")


def open_session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    bound: BoundModel,
    rule: UpdateRule,
    plan: Plan,
    device: Device,
    *,
    owns_device: bool,
    kept: KeptFolder | None = None,
    within: Ledgers | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``model`` and ``optimizer`` under ``plan``, on ``device``. What they take counts in the accounts of ``within``
    too. Raises what filling the tiers raises; the model is then as it was."""
    head = _head_for(plan, model)
    ledgers = ledgers_of(plan.budget, within, 0 if kept is None else kept.before)
    whereabouts = Whereabouts()
    on_cuda = torch.device(device.name).type == "cuda"
    pinner: Pinner = CudaPinner.of(torch.device(device.name)) if on_cuda else NoPinner()
    watch: Watch = NoWatch()
    if not on_cuda:
        watch = StorageLedger(device.ledger, whereabouts, device.history, beside_compiled=bool(plan.compiled))
    store = Store(device, bound.model, plan, rule.state_names, ledgers, pinner, kept)
    try:
        # As early as can be: it has a second or two to get ready while parameters go home.
        store.employ(rule)
        pool = _slot_pool(store, bound, plan)
    except BaseException:
        store.close()
        raise
    for buffer in (*store.standing.regions, *(slot.buffer for slot in pool.slots)):
        watch.adopt(buffer.untyped_storage())
    stash = Stash(device, watch, torch.device(device.name), store.depots, plan.streaming)
    # The lane of updates steps back too (``runtime.updates``).
    spared = plan.streaming.spared_cores
    team = Team(cores_beside_compute(spared), step_back) if plan.streaming.overlap_update else Team(cores())
    resources = Resources(device, watch, ledgers, store, pool, stash, team, owns_device=owns_device)
    if kept is not None:
        resources.locks.take_over(kept.path, kept.lock)
    session = Session(plan, bound.model, bound.parameters, rule, resources, whereabouts)
    try:
        attachment = _take_over(session, model, bound, head)
    except BaseException:
        session.close()
        raise
    # A model that is dropped without close() gives its memory, files and threads back all the same.
    weakref.finalize(model, resources.close)
    attachment.hide_all()
    session.lookout.between_passes()
    attachment.at_end(refuse_steps(optimizer))
    accept_others = refuse_other_steps(session.names, optimizer)
    attachment.at_end(accept_others)
    weakref.finalize(model, accept_others)
    return model, StreamedOptimizer(optimizer, session, session.names)


def _head_for(plan: Plan, model: nn.Module) -> Recognised | None:
    """The head whose loss ``plan`` computes in pieces. Raises ``ModelError`` where it says so and that cannot be."""
    if not plan.loss_piece:
        return None
    found = recognise(model)
    if isinstance(found, str):
        raise ModelError(f"the plan computes the loss in pieces: {found}; make the plan again with loss='plain'")
    return found


def _slot_pool(store: Store, bound: BoundModel, plan: Plan) -> SlotPool:
    sizes = {b.name: b.nbytes for b in bound.model.blocks}
    dedicated = [p.block for p in plan.placements if p.parameters is Tier.DEVICE and not p.resident]
    streaming = plan.streaming
    return SlotPool(
        store.standing,
        store,
        {name: n for name, n in sizes.items() if not store.blocks[name].placement.resident},
        streaming.slots,
        dedicated,
        streaming.prefetch_distance,
        # All bits set is NaN in every floating dtype: a stale read cannot pass for a value.
        (lambda buffer: buffer.fill_(0xFF)) if streaming.poison else None,
    )


def _take_over(session: Session, model: nn.Module, bound: BoundModel, head: Recognised | None) -> Attachment:
    """Moves the parameters' values to their homes, block by block, and puts the hooks on. All or nothing: when it
    fails, the parameters that were moved get their values back."""
    meta = {n for n, p in bound.parameters.items() if p.is_meta}
    moved: list[Parameter] = []
    try:
        with torch.no_grad():
            for block in bound.model.blocks:
                given = {p.name for p in block.parameters} - meta
                if given:
                    session.store.fill(block.name, given, lambda p: bound.parameters[p.name].detach())
                # At once, not after the last block: what a block leaves behind is free before the next is copied.
                for spec in block.parameters:
                    moved.append(spec)  # before: what fails halfway is put back too
                    _point_away(session, session.store.blocks[block.name], spec, bound.parameters[spec.name])
            for buffer in model.buffers():
                if buffer.device != session.torch_device:
                    buffer.data = buffer.data.to(session.torch_device)
        session.contents.unwritten |= meta
        attachment = Attachment(session, model, bound.modules)
        if head is not None:
            # After the hooks of the attachment: those see to the head's parameters.
            attachment.at_end(ChunkedHead(head, session.plan.loss_piece).remove)
        return attachment
    except BaseException:
        for spec in moved:
            _put_back(session, spec, bound.parameters[spec.name], was_meta=spec.name in meta)
        raise


def _put_back(session: Session, spec: Parameter, parameter: nn.Parameter, *, was_meta: bool) -> None:
    if was_meta:
        empty = torch.empty_strided(spec.shape, spec.stride, dtype=parameter.dtype, device="meta")
        torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    else:
        parameter.data = session.contents.value(spec.name)


def _point_away(session: Session, state: BlockState, spec: Parameter, parameter: nn.Parameter) -> None:
    """Points a parameter at its home (of a resident block: for good; another: until it is hidden)."""
    value = session.contents.value(spec.name) if state.placement.resident else session.stand_in(spec)
    if parameter.is_meta:
        # Another kind of tensor cannot become param.data; the object, which the optimizer knows, stays the same.
        torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
    else:
        parameter.data = value
