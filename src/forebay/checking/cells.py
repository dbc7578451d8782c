"""Whether what is updated on the device or beside the storage, and is at home elsewhere, gets there and home again: all
of it, in time. No torch.

Of each chunk of a block that is updated on the device (``Update.DEVICE``) a step brings to a cell there its states, the
gradients that have landed, and the parameters that have no whole fp32 master; with one the update writes them and does
not read them. It takes home its states and parameters. Cells are parts of one window, and as many as that holds are in
use at a time.

Of one that is updated beside the storage (``Update.STORAGE``) the states stay where they are, on disk, and the rest is
the same: there are ``UPDATE_CELLS`` cells, and the way there and back is that of the disk. With a ``gradient_density``
that share of the elements of the gradient of each piece goes there, each with its place; the cell has room for them
beside the gradient that is made of them, and the host for what stays of all gradients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

from forebay.arenas import UPDATE_CELLS
from forebay.checking.order import Order
from forebay.checking.words import fault
from forebay.errors import PlanInvalid
from forebay.layout import PAGE, STATE_ITEMSIZE, Chunk, StateLayout, in_order, needs_master
from forebay.memory import ALIGNMENT, Kind
from forebay.model import Parameter
from forebay.plans import Plan, Update
from forebay.program import Action, Program, Verb
from forebay.states import Masters, Reach, form_of, is_fp32
from forebay.timeline import Lane
from forebay.trace import Trace
from forebay.workspaces import PART, PIECE

__all__ = ["Cells", "Work", "check_window", "residual_nbytes", "storage_window", "widened"]

PARTS = {Verb.LOAD: (Kind.STATE, Kind.PARAMETER, Kind.GRADIENT), Verb.STORE: (Kind.STATE, Kind.PARAMETER)}
Key = tuple[str, int, int]
"""Block, chunk, step."""

Move = tuple[Verb, Kind]

DONE = {Verb.LOAD: "loaded", Verb.STORE: "stored"}

ON_DEVICE = {Verb.LOAD: Lane.H2D, Verb.UPDATE: Lane.DEVICE_UPDATE, Verb.STORE: Lane.D2H}
AT_STORAGE = {Verb.LOAD: Lane.DISK_WRITE, Verb.UPDATE: Lane.STORAGE_UPDATE, Verb.STORE: Lane.DISK_READ}
"""The lanes of the way there, of the update, and of the way home."""


@dataclass(frozen=True)
class Work:
    """The actions by which the update of a chunk reads gradients where they have landed, reads states at home, writes
    them there (``stored``), and reads or writes parameters there. On the host all of them are the update itself."""

    gradients: Sequence[int]
    states: Sequence[int]
    stored: Sequence[int]
    parameters: Sequence[int]

    @classmethod
    def at_home(cls, update: int) -> Work:
        """That of an update on the host."""
        return cls(*[(update,)] * 4)


@final
class Cells:
    """Every load and store. Raises ``PlanInvalid`` for one of a block that the plan does not update elsewhere, or of
    what there is not. ``blocks`` are those that it does, ``beside`` those of them that are updated at the storage."""

    def __init__(self, plan: Plan, program: Program, order: Order, layouts: Mapping[str, StateLayout]) -> None:
        self.beside = frozenset(plan.updated(Update.STORAGE))
        there = plan.updated(Update.DEVICE)
        self.blocks = self.beside.union(there)
        self._density = plan.streaming.gradient_density
        self._program = program
        self._order = order
        self._layouts = layouts
        cell, widening = _largest(there, layouts)
        self._count = (plan.streaming.update_window - widening) // cell if cell else 0
        self._moves: dict[Key, dict[Move, list[int]]] = defaultdict(lambda: defaultdict(list))
        for index, action in enumerate(program.actions):
            if action.verb in PARTS:
                self._note(index, action)

    def _note(self, index: int, action: Action) -> None:
        block, verb = action.block, action.verb
        if block not in self.blocks:
            text = f"the plan does not update block {block!r} on the device: there is nothing to {verb.value} for it"
            raise fault(self._program, index, block, text)
        if not 0 <= action.chunk < len(self._layouts[block].chunks):
            raise fault(self._program, index, block, f"block {block} has no chunk {action.chunk} to {verb.value}")
        if not 0 <= action.step < self._program.steps:
            raise fault(self._program, index, block, f"there is no step {action.step}")
        lane = self.lane(block, verb)
        if action.lane is not lane:
            text = (
                f"a {verb.value} of block {block} is on lane {action.lane.value}, and its way is that of {lane.value}"
            )
            raise fault(self._program, index, block, text)
        if action.part is None or action.part not in PARTS[verb]:
            what = "nothing" if action.part is None else f"{action.part.value}s"
            raise fault(self._program, index, block, f"a {verb.value} of block {block} moves {what}")
        self._moves[block, action.chunk, action.step][verb, action.part].append(index)

    def lane(self, block: str, verb: Verb) -> Lane:
        """The lane on which a block of ``blocks`` is loaded, updated or stored."""
        return (AT_STORAGE if block in self.beside else ON_DEVICE)[verb]

    def work(self, block: str, chunk: int, step: int) -> Work:
        """What the update of a chunk does at home."""
        moves = self._moves[block, chunk, step]
        parameters = [*moves[Verb.LOAD, Kind.PARAMETER], *moves[Verb.STORE, Kind.PARAMETER]]
        return Work(
            moves[Verb.LOAD, Kind.GRADIENT], moves[Verb.LOAD, Kind.STATE], moves[Verb.STORE, Kind.STATE], parameters
        )

    def check_chunk(self, block: str, chunk: int, step: int, names: Sequence[str], update: int) -> None:
        """What moves for action ``update`` (below 0: there is none), which is for the parameters ``names``: each byte
        once, there before it and home after it; and none before the step before has brought home what it made."""
        moves, before = self._moves[block, chunk, step], self._moves[block, chunk, step - 1]
        where = f"chunk {chunk} of block {block}"
        for (verb, part), wanted in self._wanted(block, chunk, names).items():
            found = moves[verb, part]
            moved = sum(self._program.actions[index].nbytes for index in found)
            if moved != wanted:
                text = f"{moved} bytes of {part.value}s of {where} are {DONE[verb]} in step {step}"
                near = found[-1] if found else update
                raise fault(self._program, near, block, f"{text}, and it takes {wanted}")
            for index in found:
                self._check_order(verb, f"{part.value}s of {where}", index, update)
                for store in before[Verb.STORE, part]:
                    if not self._order.before(store, index):
                        text = f"it {verb.value}s {part.value}s of {where}, which action {store} may still store"
                        raise fault(self._program, index, block, text)

    def _wanted(self, block: str, chunk: int, names: Sequence[str]) -> Mapping[Move, int]:
        own = self._layouts[block].chunks[chunk]
        moves = _nbytes(own, names, self._layouts[block].masters)
        if block not in self.beside:
            return moves
        moves |= dict.fromkeys([(Verb.LOAD, Kind.STATE), (Verb.STORE, Kind.STATE)], 0)
        if self._density is not None:
            moves[Verb.LOAD, Kind.GRADIENT] = sum(_sent(own, self._density, names))
        return moves

    def _check_order(self, verb: Verb, what: str, index: int, update: int) -> None:
        block = self._program.actions[index].block
        if verb is Verb.LOAD and not self._order.before(index, update):
            text = f"it updates block {block}, and {what} may not be there: action {index} loads them"
            raise fault(self._program, update, block, text)
        if verb is Verb.STORE and not self._order.before(update, index):
            raise fault(self._program, index, block, f"it stores {what}, which action {update} may still change")

    def uses(self, *, beside: bool) -> tuple[list[tuple[int, int]], int]:
        """From which action to which one each cell on the device (or ``beside`` the storage) is in use, in the order in
        which they begin, and how many may be at a time. To be asked when all chunks have been checked."""
        found = []
        for (block, _, _), moves in self._moves.items():
            if (block in self.beside) != beside:
                continue
            indices = sorted(index for own in moves.values() for index in own)
            if indices:
                # Loads come first, and stores are on a lane of their own: its last one ends last.
                found.append((indices[0], indices[-1]))
        return sorted(found), UPDATE_CELLS if beside else self._count


def check_window(trace: Trace, plan: Plan, layouts: Mapping[str, StateLayout]) -> None:
    """Raises ``PlanInvalid`` where the ``update_window`` has no room for one chunk of each block that is updated in it,
    or for states that take memory beside it."""
    there = plan.updated(Update.DEVICE)
    if not there:
        return
    first = there[0]
    if not is_fp32(trace.state_names):
        text = (
            f"block {first} is updated on the device, where states in fewer bits than fp32 take memory beside the "
            f"update_window; set its update to step"
        )
        raise PlanInvalid(text, action=-1, subject=first)
    cell, widening = _largest(there, layouts)
    if plan.streaming.update_window < cell + widening:
        text = (
            f"block {first} is updated on the device, where a chunk takes up to {cell} bytes and {widening} to widen "
            f"gradients, and the update_window has {plan.streaming.update_window}; make it larger, or update_chunk "
            f"smaller"
        )
        raise PlanInvalid(text, action=-1, subject=first)


def storage_window(plan: Plan, layouts: Mapping[str, StateLayout]) -> int:
    """Bytes of host memory through which blocks pass that are updated beside the storage."""
    cell, widening = _largest(plan.updated(Update.STORAGE), layouts, plan.streaming.gradient_density)
    return UPDATE_CELLS * (-(-cell // PAGE) * PAGE) + widening


def residual_nbytes(plan: Plan, layouts: Mapping[str, StateLayout]) -> int:
    """Bytes of host memory for what of gradients is not sent: an fp32 number for each element, by parameter."""
    if plan.streaming.gradient_density is None:
        return 0
    chunks = [chunk for name in plan.updated(Update.STORAGE) for chunk in layouts[name].chunks]
    trained = {piece.parameter.name: piece.parameter.numel for chunk in chunks for piece in chunk.pieces}
    return sum(_aligned(STATE_ITEMSIZE * numel) for numel in trained.values())


_BETWEEN: Final[Mapping[tuple[str, ...], int]] = MappingProxyType(
    {
        (): 0,
        ("momentum_buffer",): 0,
        ("exp_avg", "exp_avg_sq"): 0,
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): 0,
        ("exp_avg",): 2,
    }
)
"""By its moments in fp32: numbers for each element of a piece that an update's ops make beside it. Of the others three:
RMSprop, Adagrad, Adadelta, Adamax."""


def _largest(
    blocks: Sequence[str], layouts: Mapping[str, StateLayout], density: float | None = None
) -> tuple[int, int]:
    """Bytes of the largest cell of ``blocks``, which all of them have, and of the widest gradients."""
    sizes = [_cell(layouts[name], density) for name in blocks]
    return max((cell for cell, _ in sizes), default=0), max((widening for _, widening in sizes), default=0)


def _cell(layout: StateLayout, density: float | None) -> tuple[int, int]:
    """Bytes of the largest cell of a block: states of a chunk, its parameters and their gradients, and the share
    ``density`` of these that is sent, each piece of them aligned. And those of the gradients of a chunk in fp32, where
    a block has any of fewer bits."""
    cell = 0
    for chunk in layout.chunks:
        sent = () if density is None else _sent(chunk, density)
        whole = chunk.nbytes + 2 * sum(_aligned(piece.nbytes) for piece in chunk.pieces)
        cell = max(cell, whole + sum(map(_aligned, sent)))
    return cell, max((widened(chunk, layout) for chunk in layout.chunks), default=0)


def widened(chunk: Chunk, layout: StateLayout, *, exactly: bool = False) -> int:
    """Bytes in which ``chunk`` is updated: the gradients of its elements of 16 bits in fp32, and these themselves where
    no whole master is at home. Of all elements of the chunk as many, or ``exactly`` of those that are widened. Of a
    piece that is rounded by chance, or whose states are not fp32, two numbers more for each element, and of the latter
    each moment, the gradient and the parameter; where ops are not fused, what they make in between. With factored
    states one parameter at a time: that, its update, and a line more than sums of rows and columns take; if they are
    not made at once, gradient, parameter and update of a part of it. With Muon, of a matrix, six bytes more for each
    element and four for each of a square, in four parts at their alignment."""
    if layout.reach.takes_wholes:
        return max(_widened_whole(layout.reach, piece.parameter, layout) for piece in chunk.pieces)
    moments = [state for state in layout.own if form_of(state).name != "scale"]
    drawn = any(not p.parameter.master and p.parameter.dtype == "bfloat16" for p in chunk.pieces)
    largest = min(PIECE, max(p.stop - p.start for p in chunk.pieces))
    if layout.reach is Reach.PIECES:
        return STATE_ITEMSIZE * (len(moments) + 4 + drawn) * largest
    copies = [(_copies(p.parameter, layout), p.stop - p.start) for p in chunk.pieces]
    every = sum(count * elements for count, elements in copies)
    wide = every if exactly else chunk.elements * max(count for count, _ in copies)
    return STATE_ITEMSIZE * (wide + max(2 * drawn, _BETWEEN.get(tuple(moments), 3)) * largest)


def _widened_whole(reach: Reach, own: Parameter, layout: StateLayout) -> int:
    numel, copies = own.numel, _copies(own, layout)
    if reach is Reach.MATRICES:
        made = 6 * numel + 4 * min(own.shape) ** 2 + 4 * ALIGNMENT if own.orthogonal else 0
        return _aligned(4 * numel * copies + made)
    sums = sum(numel // size for size in own.shape[-2:]) if len(own.shape) > 1 else 0
    if reach is Reach.WHOLES:
        made = numel * (1 + copies)
    else:
        made = 3 * (min(numel, max((PART, *own.shape[-1:]))) if in_order(own) else numel)
    return _aligned(STATE_ITEMSIZE * (made + sums)) + ALIGNMENT


def _copies(parameter: Parameter, layout: StateLayout) -> int:
    """How many numbers in fp32 an update makes of an element: its gradient, and itself."""
    if parameter.dtype not in ("bfloat16", "float16"):
        return 0
    return 1 if parameter.master and layout.masters is Masters.WHOLE else 2


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _sent(chunk: Chunk, density: float, names: Sequence[str] | None = None) -> list[int]:
    """Bytes of what is sent of the gradient of each piece of ``chunk`` (of the parameters ``names``): as many elements
    as the share comes to, or one more, each with a place of 4 bytes."""
    found = []
    for piece in chunk.pieces:
        if names is None or piece.parameter.name in names:
            elements = piece.stop - piece.start
            kept = min(elements, -int(-(elements * density) // 1))
            found.append(kept * (4 + piece.nbytes // elements))
    return found


def _nbytes(chunk: Chunk, names: Sequence[str], masters: Masters) -> dict[Move, int]:
    """Bytes that move when the parameters ``names`` of ``chunk`` are updated: none if there are none."""
    own = [p for p in chunk.pieces if p.parameter.name in names]
    states, every = chunk.nbytes if own else 0, sum(p.nbytes for p in own)
    read = sum(p.nbytes for p in own if masters is Masters.LOWER or not needs_master(p.parameter))
    return {
        (Verb.LOAD, Kind.STATE): states,
        (Verb.LOAD, Kind.PARAMETER): read,
        (Verb.LOAD, Kind.GRADIENT): every,
        (Verb.STORE, Kind.STATE): states,
        (Verb.STORE, Kind.PARAMETER): every,
    }
