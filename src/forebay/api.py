"""The public functions: where profile, planner and runtime meet. Each room knows only the records between them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import nn

from forebay.arenas import arenas
from forebay.checkpoint.fill import fill_at_random, fill_from_folder
from forebay.device import open_device
from forebay.device.base import Device, NoWatch, Watch
from forebay.device.ledger import StorageLedger
from forebay.errors import ConfigError, DoesNotFit, ModelError, OptimizerError, UsageError
from forebay.memory import Ledger, Tier
from forebay.optim.rules import UpdateRule, read_optimizer
from forebay.optim.streamed import StreamedOptimizer
from forebay.planners import Problem, make_plan
from forebay.plans import Budget, DiskBudget, Plan
from forebay.profiler.footprint import footprint
from forebay.reporting.run import RunReport
from forebay.runtime.blocks import BoundModel, find_blocks
from forebay.runtime.hooks import Attachment, is_prepared, session_of
from forebay.runtime.session import Resources, Session, Whereabouts
from forebay.runtime.slots import SlotPool
from forebay.runtime.store import Ledgers, Store
from forebay.tiers.arena import CudaPinner, NoPinner, Pinner
from forebay.tiers.host import available_disk, available_host_memory
from forebay.trace import Footprint, Parameter
from forebay.units import format_apart, format_bytes, parse_bytes, parse_disk

__all__ = ["close", "gradients", "initialize", "load", "parameters", "prepare", "report", "synchronize"]

Size = int | str


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Any = None,
    *,
    device_memory: Size,
    host_memory: Size | None = None,
    disk: str | None = None,
    policy: str = "auto",
    plan: Plan | None = None,
    device: str | torch.device | Device | None = None,
    blocks: Sequence[str] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Puts a memory plan under ``model`` and ``optimizer``; the training loop stays as it is.

    ``batch`` is what the model's forward will be called with (a dict or a tuple): with it the plan knows the
    activations. Budgets are sizes (``"24GiB"``); ``host_memory`` None is what the machine has, ``disk`` is ``PATH``
    or ``PATH:SIZE``. ``plan`` executes a given plan instead of making one; ``blocks`` names the modules that are
    streamed as one, instead of those that forebay finds.

    Returns the same model, and an optimizer to use in the place of the one given. Raises a ``UsageError`` for input
    that cannot be used and ``DoesNotFit`` when no plan meets the budget; the model is then as it was.
    """
    if is_prepared(model):
        raise ModelError(
            "this model, or a part of it, is prepared already; call forebay.close(model) before preparing it anew"
        )
    rule = read_optimizer(optimizer)
    budget = _read_budget(device_memory, host_memory, disk)
    opened = open_device(device, budget.device)
    try:
        bound = find_blocks(model, blocks)
        _check_model(model, bound, optimizer, opened)
        if plan is None:
            plan = _make_plan(model, batch, bound, rule, budget, policy, opened)
        else:
            plan = _adopt_plan(plan, bound, rule, budget)
        return _open_session(model, optimizer, bound, rule, plan, opened, owns_device=opened is not device)
    except BaseException:
        if opened is not device:
            opened.close()
        raise


def _read_budget(device_memory: Size, host_memory: Size | None, disk: str | None) -> Budget:
    folder = None
    if disk is not None:
        path, nbytes = parse_disk(disk)
        folder = DiskBudget(path, nbytes)
    host = None if host_memory is None else parse_bytes(host_memory)
    return Budget(parse_bytes(device_memory), host, None, folder)


def _check_model(model: nn.Module, bound: BoundModel, optimizer: torch.optim.Optimizer, device: Device) -> None:
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
        if parameter.grad is not None:
            raise ModelError(f"parameter {name} has a gradient already; call optimizer.zero_grad() before prepare()")


def _make_plan(
    model: nn.Module,
    batch: Any,
    bound: BoundModel,
    rule: UpdateRule,
    budget: Budget,
    policy: str,
    device: Device,
) -> Plan:
    torch_device = torch.device(device.name)
    measured = Footprint(0, 0, measured=False) if batch is None else footprint(model, batch, torch_device)
    limits = _limits(budget)
    problem = Problem(
        model=bound.model,
        footprint=measured,
        budget=budget,
        host_limit=limits[Tier.HOST],
        disk_limit=limits[Tier.DISK],
        state_names=rule.state_names,
        # On the cpu the update and the compute share the cores: beside each other both are slower.
        overlap_update=torch_device.type != "cpu",
    )
    return make_plan(problem, policy)


def _limits(budget: Budget) -> dict[Tier, int]:
    """Bytes of host and disk that may be used: the budget, and never more than the machine has free."""
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
        free_on_disk = available_disk(budget.disk.path)
        on_disk = free_on_disk if budget.disk.nbytes is None else budget.disk.nbytes
    return {Tier.HOST: free if budget.host is None else budget.host, Tier.DISK: on_disk}


def _adopt_plan(plan: Plan, bound: BoundModel, rule: UpdateRule, budget: Budget) -> Plan:
    """``plan`` under the budget that is promised now, which need not be the one that it was made for."""
    planned = {p.block for p in plan.placements}
    there = {b.name for b in bound.model.blocks}
    if planned != there or len(plan.placements) != len(there):
        odd = min(planned ^ there, default="a block named twice")
        raise ConfigError(f"the plan was made for another model: block {odd} is not in both; make the plan again")
    sizes = arenas(bound.model, plan.placements, plan.streaming, rule.state_names)
    if sizes.device > plan.device or sizes.host > plan.host or sizes.disk > plan.disk:
        raise ConfigError(
            f"the plan was made for another model or optimizer: it has {format_bytes(plan.device)} on the device, "
            f"{format_bytes(plan.host)} on the host and {format_bytes(plan.disk)} on disk, and this one needs "
            f"{format_bytes(sizes.device)}, {format_bytes(sizes.host)} and {format_bytes(sizes.disk)}; "
            f"make the plan again"
        )
    if plan.disk and budget.disk is None:
        raise ConfigError(f"the plan keeps {format_bytes(plan.disk)} on disk; give disk=PATH or PATH:SIZE")
    limits = _limits(budget)
    for tier, needed, allowed in (
        (Tier.DEVICE, plan.device, budget.device),
        (Tier.HOST, plan.host, limits[Tier.HOST]),
        (Tier.DISK, plan.disk, limits[Tier.DISK]),
    ):
        if needed > allowed:
            what = tier.value if tier is Tier.DISK else f"{tier.value}_memory"
            shown = format_apart(needed, allowed)
            raise DoesNotFit(
                f"{tier.value}: the plan needs {shown[0]} and {shown[1]} are allowed; "
                f"raise {what}, or make another plan",
                tier=tier.value,
                needed=needed,
                allowed=allowed,
            )
    return replace(plan, budget=budget)


def _open_session(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    bound: BoundModel,
    rule: UpdateRule,
    plan: Plan,
    device: Device,
    *,
    owns_device: bool,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    limits = _limits(plan.budget)
    ledgers = Ledgers(
        Ledger(Tier.HOST, limits[Tier.HOST]),
        Ledger(Tier.PINNED, plan.budget.pinned),
        Ledger(Tier.DISK, limits[Tier.DISK]),
    )
    whereabouts = Whereabouts()
    on_cuda = torch.device(device.name).type == "cuda"
    pinner: Pinner = CudaPinner.of(torch.device(device.name)) if on_cuda else NoPinner()
    watch: Watch = NoWatch() if on_cuda else StorageLedger(device.ledger, whereabouts)
    store = Store(device, bound.model, plan, rule.state_names, ledgers, pinner)
    try:
        pool = _slot_pool(device, store, bound, plan)
    except BaseException:
        store.close()
        raise
    for buffer in (*store.resident_buffers, *(slot.buffer for slot in pool.slots)):
        watch.adopt(buffer.untyped_storage())
    resources = Resources(device, watch, ledgers, store, pool, owns_device=owns_device)
    session = Session(plan, bound.model, bound.parameters, rule, resources, whereabouts)
    try:
        attachment = _take_over(session, model, bound)
    except BaseException:
        session.close()
        raise
    # A model that is dropped without close() gives its memory, files and threads back all the same.
    weakref.finalize(model, resources.close)
    names = {id(p): n for n, p in bound.parameters.items()}
    attachment.hide_all()
    return model, StreamedOptimizer(optimizer, session, names)


def _slot_pool(device: Device, store: Store, bound: BoundModel, plan: Plan) -> SlotPool:
    sizes = {b.name: b.nbytes for b in bound.model.blocks}
    dedicated = [p.block for p in plan.placements if p.parameters is Tier.DEVICE and not p.resident]
    streaming = plan.streaming
    return SlotPool(
        device,
        store,
        {name: n for name, n in sizes.items() if not store.blocks[name].placement.resident},
        streaming.slots,
        dedicated,
        streaming.prefetch_distance,
        # All bits set is NaN in every floating dtype: a stale read cannot pass for a value.
        (lambda buffer: buffer.fill_(0xFF)) if streaming.poison else None,
    )


def _take_over(session: Session, model: nn.Module, bound: BoundModel) -> Attachment:
    """Moves the parameters' values to their homes, block by block, and puts the hooks on. All or nothing: when it
    fails, the parameters that were moved get their values back."""
    meta = {n for n, p in bound.parameters.items() if p.is_meta}
    moved: list[Parameter] = []
    try:
        with torch.no_grad():
            for block in bound.model.blocks:
                if any(p.name not in meta for p in block.parameters):
                    session.store.fill(
                        block.name, lambda p: None if p.name in meta else bound.parameters[p.name].detach()
                    )
                # At once, not after the last block: what a block leaves behind is free before the next is copied.
                _point_away(session, block.name, bound.parameters)
                moved.extend(block.parameters)
            for buffer in model.buffers():
                if buffer.device != session.torch_device:
                    buffer.data = buffer.data.to(session.torch_device)
        session.unwritten |= meta
        return Attachment(session, model, bound.modules)
    except BaseException:
        for spec in moved:
            _put_back(session, spec, bound.parameters[spec.name], was_meta=spec.name in meta)
        raise


def _put_back(session: Session, spec: Parameter, parameter: nn.Parameter, *, was_meta: bool) -> None:
    if was_meta:
        empty = torch.empty_strided(spec.shape, spec.stride, dtype=parameter.dtype, device="meta")
        torch.utils.swap_tensors(parameter, nn.Parameter(empty, requires_grad=parameter.requires_grad))
    else:
        parameter.data = session.value(spec.name)


def _point_away(session: Session, block: str, parameters: Mapping[str, nn.Parameter]) -> None:
    """Points the parameters of a block at their home (resident blocks: for good; others until they are hidden)."""
    state = session.store.blocks[block]
    for spec in state.block.parameters:
        parameter = parameters[spec.name]
        value = session.value(spec.name) if state.placement.resident else session.stand_in(spec)
        if parameter.is_meta:
            # Another kind of tensor cannot become param.data; the object, which the optimizer knows, stays the same.
            torch.utils.swap_tensors(parameter, nn.Parameter(value, requires_grad=parameter.requires_grad))
        else:
            parameter.data = value


def _session(model: nn.Module) -> Session:
    attachment = session_of(model)
    if attachment is None:
        raise UsageError("this model is not prepared; call forebay.prepare(model, optimizer, ...) first")
    return attachment.session


@final
class _Tensors(Mapping[str, torch.Tensor]):
    """Name to tensor, read when it is asked for: one tensor at a time is in memory."""

    def __init__(self, names: Sequence[str], read: Any) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._read(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def parameters(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Full-precision copies of a prepared model's parameters on the host, by plain PyTorch name, read when asked."""
    session = _session(model)
    return _Tensors(list(session.parameters), session.full_precision)


def gradients(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Copies, on the host, of the gradients that there are now, by plain PyTorch name, read when asked."""
    session = _session(model)
    return _Tensors([n for n, p in session.parameters.items() if p.grad is not None], session.gradient)


def synchronize(model: nn.Module) -> None:
    """Waits for every update and transfer of a prepared model; raises the first error among them."""
    _session(model).synchronize()


def report(model: nn.Module) -> RunReport:
    """The plan of a prepared model and what was measured so far."""
    session = _session(model)
    return RunReport(plan=session.plan, timeline=session.timeline(), elapsed=session.elapsed, steps=session.steps)


def close(model: nn.Module) -> None:
    """Ends forebay's work on a model: waits, takes the hooks off, frees threads, arenas and files.

    The parameters become ordinary tensors on the host (resident ones stay on the device). A model that is not
    prepared is left as it is. When a transfer or an update had failed, everything is freed all the same and its error
    is raised; parameters that cannot be read any more are NaN.
    """
    attachment = session_of(model)
    if attachment is None:
        return
    try:
        attachment.session.synchronize()
    finally:
        try:
            attachment.detach()
        finally:
            attachment.session.close()


def load(model: nn.Module, folder: str) -> None:
    """Loads a folder of safetensors into a prepared model, block by block, straight into its tiers.

    Raises ``ConfigError`` naming the first tensor that is missing or has another shape.
    """
    fill_from_folder(_session(model), model, folder)


def initialize(model: nn.Module, seed: int = 0) -> None:
    """Gives a prepared model that was built on the meta device its random initial values, block by block.

    A transformers model's own initialisation is used; other modules need ``reset_parameters``.
    """
    fill_at_random(_session(model), model, seed)
