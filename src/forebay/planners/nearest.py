"""What would fit instead of a draft that is refused: each proposal with all that it asks for at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from forebay.arenas import Sizer, gradient_nbytes
from forebay.catalogue import is_listed
from forebay.errors import DoesNotFit
from forebay.layout import STATE_ITEMSIZE, align, is_drawn, needs_master
from forebay.loss import VOCABULARY
from forebay.lowering.liveness import update_workspaces, updating_nbytes
from forebay.memory import Tier
from forebay.model import Model
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home, with_a_disk
from forebay.planners.in_backward import FEWEST, Early, Usable
from forebay.planners.parts import KEPT, Draft, Level, all_resident
from forebay.planners.problem import Problem
from forebay.plans import Update, used_up
from forebay.remedies import Remedy
from forebay.states import DRAWN, OF_FOREBAY, Masters, element_nbytes, is_fp32
from forebay.units import format_bytes, format_enough, parse_bytes

__all__ = ["House", "all_on_device", "larger", "refused", "with_larger"]

AUTO = "auto"

House = Callable[[Bench, Draft], Draft]
"""How a policy finds homes for a draft beside the device, whatever the device has room for. Raises ``DoesNotFit``."""

LEAN_OPTIMIZERS = tuple(
    (name, OF_FOREBAY[name.removesuffix(DRAWN)], not name.endswith(DRAWN))
    for name in ("adamw-8bit", "adafactor", f"adamw-8bit{DRAWN}", f"adafactor{DRAWN}")
)
"""Optimizers of forebay that adapt to each parameter as Adam does, with fewer bytes, by name: their states, and whether
they keep masters of parameters in bf16. The first that is enough is named."""

SMALLER_OPTIMIZERS = (("sgd with momentum", ("momentum_buffer",)), ("sgd", ()))
"""Others with fewer states per element, by name."""

PANELS = 8
"""Parts of a weight in tiles of which one is there at a time, where a refusal proposes a size."""

LEAST_SHARE = 0.01
"""A batch smaller than this share of the one asked for is no remedy."""


def refused(
    bench: Bench,
    error: DoesNotFit,
    draft: Draft,
    *,
    house: House | None = None,
    staying: Sequence[Level] = (),
    more: Iterable[Remedy] = (),
) -> DoesNotFit:
    """``error`` with the nearest things that would fit, ``more`` among them; ``draft`` is what it speaks of. Figures
    are those of one micro-batch at a time.

    ``house`` is how the policy finds homes (None: on the host and, as far as need be, on disk). ``staying`` are the
    levels with which it keeps everything on the device where there is room; none: it never does, or not surely.
    """
    tier, problem = Tier(error.tier), bench.problem
    first = larger(problem, tier, error.needed)
    enough = bench if tier is Tier.DEVICE or first.what == "machine" else _enlarged(bench, tier, error.needed)
    beside = _at_once(enough, draft, house or partial(at_home, whatever_device=True), tier)
    remedies = [first.together_with(beside)]
    if tier is Tier.DEVICE:
        for find in (_smaller_batch, _single_modules, _tiles):
            remedies.extend(remedy.together_with(beside) for remedy in find(bench, draft))
    else:
        remedies.extend(_gradients_used_up(bench, error, draft))
    if tier is Tier.HOST and house is None:
        remedies.extend(_a_disk(bench, draft))
    remedies.extend(_lean_optimizer(bench, draft, tier))
    if tier is not Tier.DEVICE:
        remedies.extend(all_on_device(bench, staying))
    remedies.extend(more)
    remedies.extend(_smaller_optimizer(bench, draft, tier))
    message = str(error)
    if problem.micro_batches > 1:
        message += f"; all this is for one micro-batch at a time, and {problem.micro_batches} together take more"
    if problem.trace is not None:
        message += f". What would fit: {'; or '.join(remedy.words for remedy in remedies)}"
    return DoesNotFit(message, tier=error.tier, needed=error.needed, allowed=error.allowed, nearest=tuple(remedies))


_AS_ASKED = {Tier.DEVICE: "device_memory", Tier.HOST: "host_memory", Tier.DISK: "a disk of"}

_OF_A_MACHINE = {Tier.DEVICE: "of device memory", Tier.HOST: "of host memory", Tier.DISK: "of disk"}


def larger(problem: Problem, tier: Tier, needed: int) -> Remedy:
    """A larger budget of ``tier``, or another machine where this one has less than ``needed`` bytes: an entry of the
    catalogue is a card in one of the hosts that it comes in (``catalogue.in_host``)."""
    # A plan has less of the device than the user gives.
    given = needed + problem.budget.reserve(tier)
    size, there, machine = format_enough(given), _there(problem, tier), problem.machine
    if there is None or given <= there:
        return Remedy(tier.value, needed, problem.limit(tier), f"{_AS_ASKED[tier]} {size}")
    if machine is not None and tier is not Tier.DEVICE and is_listed(machine):
        listed = f"{machine.name} is listed with {format_bytes(there)}"
        return Remedy("machine", needed, there, f"{_AS_ASKED[tier]} {size}, where there is as much ({listed})")
    words = f"a machine with {size} {_OF_A_MACHINE[tier]} (this one has {format_bytes(there)})"
    return Remedy("machine", needed, there, words)


def _there(problem: Problem, tier: Tier) -> int | None:
    """What the machine has of ``tier``; None where nobody knows. A disk is measured when one is allowed."""
    machine = problem.machine
    if machine is None or (tier is Tier.DISK and machine.disk is None):
        return None
    disk = 0 if machine.disk is None else machine.disk.capacity
    return {Tier.DEVICE: machine.device_capacity, Tier.HOST: machine.host_capacity, Tier.DISK: disk}[tier]


def with_larger(problem: Problem, tier: Tier, nbytes: int) -> Problem:
    """``problem`` with a budget of which a plan may take ``nbytes`` of ``tier``."""
    budget = problem.budget
    if tier is Tier.DEVICE:
        return replace(problem, budget=budget.with_planned_device(nbytes))
    if tier is Tier.HOST:
        return replace(problem, budget=replace(budget, host=nbytes), host_limit=nbytes)
    sized = budget.disk is not None and budget.disk.nbytes is not None
    disk = replace(budget.disk, nbytes=nbytes) if budget.disk is not None and sized else budget.disk
    return replace(problem, budget=replace(budget, disk=disk), disk_limit=nbytes)


def _enlarged(bench: Bench, tier: Tier, nbytes: int) -> Bench:
    return bench.with_limits(with_larger(bench.problem, tier, nbytes))


def _at_once(bench: Bench, draft: Draft, house: House, asked: Tier) -> tuple[Remedy, ...]:
    """What ``draft`` needs beside more of ``asked``, which ``bench`` has: a tier at a time."""
    found = list[Remedy]()
    while True:
        try:
            house(bench, draft)
        except DoesNotFit as error:
            tier = Tier(error.tier)
            if tier is asked or any(remedy.what == tier.value for remedy in found):
                break
            found.append(larger(bench.problem, tier, error.needed))
            if found[-1].what == "machine" or (tier is Tier.DISK and _there(bench.problem, tier) is None):
                break
            bench = _enlarged(bench, tier, error.needed)
        else:
            break
    return tuple(found)


def _a_disk(bench: Bench, draft: Draft) -> Iterator[Remedy]:
    """The disk with which ``draft`` fits on the host."""
    nbytes = with_a_disk(bench, draft)
    if nbytes is not None:
        yield larger(bench.problem, Tier.DISK, nbytes)


def _smaller_batch(bench: Bench, draft: Draft) -> Iterator[Remedy]:
    """The batch whose activations there is room for, as a share of the one asked for: in proportion to it. Attention
    that is materialised shrinks faster than a shorter sequence, so the estimate is on the safe side."""
    blocks = bench.model.blocks
    gradient = max((p.nbytes for b in blocks for p in b.parameters if p.trainable), default=0)
    fixed = bench.arenas(draft).device + bench.model.buffer_nbytes + gradient + bench.problem.workspace_nbytes
    scaling = bench.device(draft) - fixed
    room = bench.problem.limit(Tier.DEVICE) - fixed
    if scaling <= 0 or room < LEAST_SHARE * scaling:
        return
    share = room / scaling
    yield Remedy(
        "batch",
        bench.device(draft),
        bench.problem.limit(Tier.DEVICE),
        f"a batch or a sequence of {int(share * 100)} % of this one (an estimate: activations in proportion to it)",
        estimate=True,
        share=share,
    )


def _single_modules(bench: Bench, draft: Draft) -> Iterator[Remedy]:
    """Blocks of single modules, where the largest of them is so much smaller than the largest block that it would do.
    What takes several modules to run again is kept then."""
    largest, owned = max(draft.streaming.slots, default=0), Counter[str]()
    for block in bench.streamed(draft):
        for parameter in block.parameters:
            owned[parameter.name.rpartition(".")[0]] += align(parameter.nbytes)
    name, nbytes = max(owned.items(), key=lambda item: item[1], default=("", largest))
    limit = bench.problem.limit(Tier.DEVICE)
    kept = draft.at(KEPT)
    need = bench.device(kept) - largest + nbytes
    if nbytes < largest and need <= limit:
        words = f"blocks of single modules, named in blocks= of forebay.prepare: the largest, {name}, takes "
        yield Remedy("blocks", need, limit, f"{words}{format_bytes(nbytes)} (an estimate)", estimate=True)


def _tiles(bench: Bench, draft: Draft) -> Iterator[Remedy]:
    """The largest weight in tiles, where it is what does not fit: a part of it, and tiles, are in the place of the slot
    for its block and of its gradient. Other weights that are larger than a part go with it."""
    shared, limit = bench.streamed(draft), bench.problem.limit(Tier.DEVICE)
    weights = [parameter for block in shared for parameter in block.parameters if len(parameter.shape) == 2]
    weight = max(weights, key=lambda parameter: parameter.nbytes, default=None)
    parts = 0 if weight is None else min(PANELS, min(weight.shape) // VOCABULARY)
    if weight is None or parts < 2:
        return
    size = format_enough(weight.nbytes // parts)
    panel = parse_bytes(size)
    tile = panel // parts
    left = [sum(align(p.nbytes) for p in b.parameters if len(p.shape) != 2 or p.nbytes <= panel) for b in shared]
    gradient = min(weight.nbytes if weight.trainable else 0, bench.beside(draft))
    slot = max(draft.streaming.slots, default=0)
    need = bench.device(draft) - slot - gradient + panel + max(tile, *left) + tile
    if need <= limit:
        words = f"forebay.tile(model, '{size}') (--tile {size}), which cuts {weight.name}, "
        yield Remedy(
            "tile", need, limit, f"{words}{format_bytes(weight.nbytes)}, into tiles (an estimate)", estimate=True
        )


def _gradients_used_up(bench: Bench, error: DoesNotFit, draft: Draft) -> Iterator[Remedy]:
    """Updates in backward, for who can do without gradients after it: the host needs as much less, wherever all else
    is at home."""
    problem, liveness = bench.problem, bench.liveness
    if error.tier != Tier.HOST.value or liveness is None or problem.update == "backward" or problem.micro_batches > 1:
        return
    early = Early(liveness.trace, problem.masters, Usable.of(liveness), FEWEST).settled(draft)
    names = used_up(early.placements, resident=False)
    spared = sum(gradient_nbytes(block) for block in bench.model.blocks if block.name in names)
    need = error.needed - spared + sum(early.streaming.gradient_slots)
    if names and need <= error.allowed:
        words = f"update='backward', where nobody clips gradients or reads them: {format_bytes(need)} there"
        yield Remedy("update", need, error.allowed, words)


def all_on_device(bench: Bench, staying: Sequence[Level]) -> Iterator[Remedy]:
    """The device memory with which nothing is asked of host and disk: with one of the levels ``staying``, or by
    ``auto``."""
    if not bench.problem.measured:
        return  # a part of the budget is left free then, in case
    there = [level for level in staying if not level.activations]
    levels = there or (KEPT, Level(bench.recomputable))
    need = min(bench.device(all_resident(bench.model, level)) for level in levels)
    device = larger(bench.problem, Tier.DEVICE, need)
    words = f"{device.words}, with everything on the device"
    if there:
        yield replace(device, words=words)
    else:
        yield Remedy("policy", need, device.allowed, f"policy {AUTO} with {words}", policy=AUTO, at_once=(device,))


def _lean_optimizer(bench: Bench, draft: Draft, tier: Tier) -> Iterator[Remedy]:
    """The first of ``LEAN_OPTIMIZERS`` with which the same placements fit."""
    problem = bench.problem
    now = _kept_nbytes(bench.model, problem.state_names, problem.masters)
    without = _draws(bench.model)
    for name, states, masters in LEAN_OPTIMIZERS:
        if masters and without:
            continue  # it would keep more
        model = bench.model if masters else bench.model.without_masters()
        kept = _kept_nbytes(model, states, Masters.WHOLE)
        if kept >= now or (draft.updated(Update.DEVICE) and not is_fp32(states)):
            continue
        if not masters and not _draws(model):
            continue  # nothing is in bf16
        lean = _with_optimizer(bench, draft, tier, name, model, states)
        if lean is not None:
            yield lean
            return


def _draws(model: Model) -> bool:
    """Whether some parameters are rounded by chance, and have no master."""
    return any(is_drawn(parameter) for block in model.blocks for parameter in block.parameters)


def _kept_nbytes(model: Model, states: tuple[str, ...], masters: Masters) -> float:
    """Bytes of ``states`` for each element of a parameter, and of its master where some of ``model`` have one."""
    own = STATE_ITEMSIZE if masters is Masters.WHOLE else STATE_ITEMSIZE // 2
    return element_nbytes(states) + own * any(needs_master(p) for block in model.blocks for p in block.parameters)


def _smaller_optimizer(bench: Bench, draft: Draft, tier: Tier) -> Iterator[Remedy]:
    """Those of ``SMALLER_OPTIMIZERS`` with which the same placements fit. One without any states is not for updates
    where these are stored."""
    now, stored = element_nbytes(bench.problem.state_names), draft.updated(Update.STORAGE)
    for name, states in SMALLER_OPTIMIZERS:
        if element_nbytes(states) < now and (states or not stored):
            smaller = _with_optimizer(bench, draft, tier, name, bench.model, states)
            if smaller is not None:
                yield smaller


def _with_optimizer(
    bench: Bench, draft: Draft, tier: Tier, name: str, model: Model, states: tuple[str, ...]
) -> Remedy | None:
    """The optimizer called ``name``, with ``states`` and masters as ``model`` says; None where it is not enough."""
    problem, settled = bench.problem, bench.in_backward(draft)
    whole = replace(settled.streaming, masters=Masters.WHOLE)
    sizes = Sizer(model, states, whole.update_chunk, whole.masters).arenas(settled.placements, whole)
    beside, trace = bench.beside(draft), problem.trace
    if trace is not None:
        # What stays on the device may be updated in more memory there.
        other = replace(trace, model=model, state_names=states, extremes=())
        beside = max(beside, updating_nbytes(other, settled.placements, whole) + trace.outside_nbytes)
        now, then = (update_workspaces(one, how) for one, how in ((trace, settled.streaming), (other, whole)))
        beside += max((0, *(then[name] - now[name] for name in used_up(settled.placements, resident=True))))
    device = beside + sizes.device
    needs = {Tier.DEVICE: device, Tier.HOST: sizes.host, Tier.DISK: sizes.disk}
    if any(need > problem.limit(where) for where, need in needs.items()):
        return None
    need, allowed = needs[tier], problem.limit(tier)
    words = f"the optimizer {name}, which needs {format_bytes(need)} there"
    return Remedy("optimizer", need, allowed, words, optimizer=name)
