"""How the bytes of a block lie at home: parameters, gradients and optimizer state. No torch.

Parameters
    one flat buffer in the model's dtypes, every parameter at ``Parameter.offset``.
Activations
    of a micro-batch that go to the host: tensor by tensor, each at a multiple of ``ALIGNMENT``.
Gradients
    one flat buffer, trainable parameters only, in the parameters' dtypes.
Optimizer state
    *chunks* of at most ``update_chunk`` elements. Inside a chunk each *stream* (fp32 master or its lower half, first
    moment, second moment ...) is contiguous, in its own form (``states``), and the streams follow each other, so that
    one read, one update and one write move all the state that belongs to those elements. Where states are factored, a
    chunk has whole parameters, and one that is larger has a chunk of its own.
Residuals
    what of the gradients of a block was not sent yet: one flat buffer of fp32, trainable parameters only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from forebay.errors import ConfigError
from forebay.memory import ALIGNMENT
from forebay.model import Block, Parameter
from forebay.states import BLOCK, Masters, Reach, StateForm, form_of, is_wide, reach_of

__all__ = [
    "LOWER",
    "MASTER",
    "MOVED_LEAST",
    "PAGE",
    "RESIDUAL",
    "STATE_ITEMSIZE",
    "Chunk",
    "Piece",
    "StateLayout",
    "align",
    "chunk_elements",
    "gradient_offsets",
    "has_residual",
    "has_stream",
    "in_order",
    "is_dense",
    "is_drawn",
    "is_same_order",
    "needs_master",
    "residual_offsets",
    "state_layout",
    "states_nbytes",
    "touched_nbytes",
    "untrained_nbytes",
    "with_masters",
]

PAGE = 4096
"""Bytes: state chunks and disk-homed blocks start on a multiple of this, which O_DIRECT asks for."""

STATE_ITEMSIZE = 4
"""Bytes of one element of a master copy, of a gradient widened for an update, of a state in fp32, of a residual."""

MOVED_LEAST = 4096
"""Bytes: a smaller activation stays on the device, where it costs less than its transfer."""

MASTER = "master"
"""Name of the stream that holds the fp32 master copy of 16-bit parameters."""

LOWER = f"{MASTER}:lower"
"""Name of the stream that holds the lower half of the master of parameters in bf16."""

RESIDUAL = "residual"
"""Name of what of a gradient was not sent, where it is kept with the states."""


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of ``to``."""
    return -(-nbytes // to) * to


def needs_master(parameter: Parameter) -> bool:
    """Whether an fp32 master copy is kept for updates: the parameter is trained in 16 bits, and not by chance."""
    return parameter.trainable and parameter.master and parameter.dtype in ("bfloat16", "float16")


def is_drawn(parameter: Parameter) -> bool:
    """Whether what an update makes of it is rounded up or down by chance: it is trained in bf16 without a master."""
    return parameter.trainable and not parameter.master and parameter.dtype == "bfloat16"


def with_masters(states: tuple[str, ...], masters: Masters) -> tuple[str, ...]:
    """The streams of an optimizer with ``states`` for parameters that need a master."""
    return (LOWER if masters is Masters.LOWER else MASTER, *states)


def has_stream(stream: str, parameter: Parameter) -> bool:
    """Whether ``parameter``, which is trained, has values of ``stream``."""
    if stream in (MASTER, LOWER):
        return needs_master(parameter)
    return form_of(stream).shape_for(parameter) is not None


def is_same_order(shape: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Whether elements of ``shape`` lie alike by both strides. Of one element in a dimension they say nothing."""
    return all(size == 1 or one == two for size, one, two in zip(shape, stride, other, strict=True))


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of ``shape`` fill one stretch of memory, in any order of the dimensions. Where there
    are none, nothing is left open."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def in_order(parameter: Parameter) -> bool:
    """Whether the elements lie in memory in the order of their indices."""
    expected = 1
    for size, stride in zip(reversed(parameter.shape), reversed(parameter.stride), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def untrained_nbytes(block: Block) -> int:
    """Bytes of the parameters that no update changes. One that writes another copy of the block takes them along."""
    return sum(parameter.nbytes for parameter in block.parameters if not parameter.trainable)


def gradient_offsets(block: Block) -> tuple[dict[str, int], int]:
    """Byte offset of each trainable parameter's gradient in the block's gradient buffer, and the buffer's length."""
    return _offsets((p, p.nbytes) for p in block.parameters if p.trainable)


def has_residual(parameter: Parameter) -> bool:
    """Whether what of its gradient is not sent can be kept in fp32, with no bit less than it has."""
    return parameter.dtype in ("float32", "bfloat16", "float16")


def residual_offsets(block: Block) -> tuple[dict[str, int], int]:
    """Byte offset of each trainable parameter's residual in those of the block, and their length. Raises
    ``ConfigError`` for a parameter that has none."""
    trained = [p for p in block.parameters if p.trainable]
    for parameter in trained:
        if not has_residual(parameter):
            raise ConfigError(
                f"{parameter.name} is {parameter.dtype}, and what of a gradient is not sent is kept in fp32; leave "
                f"gradient_density out, or train it in 32 or 16 bits"
            )
    return _offsets((p, STATE_ITEMSIZE * p.numel) for p in trained)


def _offsets(sizes: Iterable[tuple[Parameter, int]]) -> tuple[dict[str, int], int]:
    """Where each of what has these bytes begins, one after the other, each aligned; and where the last one ends."""
    offsets, end = {}, 0
    for parameter, nbytes in sizes:
        offsets[parameter.name] = end
        end += align(nbytes)
    return offsets, end


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter, at ``offset`` (elements) in each stream of a chunk."""

    parameter: Parameter
    start: int
    stop: int
    offset: int

    @property
    def begin(self) -> int:
        """Bytes of the parameter that come before it."""
        return self.start * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one of its parameter's elements."""
        return self.parameter.nbytes // self.parameter.numel

    @property
    def nbytes(self) -> int:
        """Bytes of its parameter's elements, and of their gradient."""
        return (self.stop - self.start) * self.itemsize

    def values(self, form: StateForm) -> tuple[int, int]:
        """Of the values that its parameter has in ``form``: which is the first of this piece, and how many it has."""
        if form.is_of_wholes:
            return 0, form.count_for(self.parameter)
        return form.count(self.start), form.count(self.stop - self.start)


@dataclass(frozen=True)
class Chunk:
    """State of some elements: ``nbytes`` at ``offset`` in the block's state; streams that are not factored are
    ``elements`` long each."""

    offset: int
    elements: int
    nbytes: int
    pieces: tuple[Piece, ...]

    def before(self, form: StateForm, piece: Piece) -> int:
        """Values in ``form`` that its stream has before those of ``piece``."""
        if not form.is_of_wholes:
            return form.count(piece.offset)
        return sum(form.count_for(p.parameter) for p in self.pieces if p.offset < piece.offset)


@dataclass(frozen=True)
class StateLayout:
    """The state of one block: its streams by name, its chunks, its length in bytes."""

    streams: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    nbytes: int

    @property
    def masters(self) -> Masters:
        """How masters are kept, if any are."""
        return Masters.LOWER if LOWER in self.streams else Masters.WHOLE

    @cached_property
    def own(self) -> tuple[str, ...]:
        """The streams that are no masters."""
        return tuple(stream for stream in self.streams if stream not in (MASTER, LOWER))

    @cached_property
    def reach(self) -> Reach:
        """What of a parameter an update looks at together."""
        return reach_of(self.own)

    @property
    def has_masters(self) -> bool:
        """Whether any are kept."""
        return LOWER in self.streams or MASTER in self.streams

    def reads(self, parameter: Parameter) -> bool:
        """Whether an update reads the ``parameter``: not where its master is whole."""
        return not needs_master(parameter) or self.masters is Masters.LOWER

    @property
    def largest_chunk(self) -> int:
        """Bytes of the largest chunk; 0 if there is no state."""
        return max((c.nbytes for c in self.chunks), default=0)

    def spans(self, chunk: Chunk) -> dict[str, tuple[int, int]]:
        """Where each stream begins in ``chunk``, and its bytes."""
        made, end = {}, 0
        for stream in self.streams:
            nbytes = _stream_nbytes(form_of(stream), chunk.elements, chunk.pieces)
            made[stream] = end, nbytes
            end += nbytes
        return made

    def touched(self, chunk: Chunk) -> int:
        """Bytes that updating ``chunk`` has to move at least: states and parameters in and out, gradients in. The same
        in place and from one copy into another."""
        states = _chunk_nbytes(map(form_of, self.streams), chunk.elements, chunk.pieces)
        return _touched(states, sum(p.nbytes for p in chunk.pieces))


def touched_nbytes(streams: Iterable[str], parameter: Parameter) -> int:
    """Bytes that an update of ``parameter`` has to move at least: its states and itself in and out, its gradient in."""
    return _touched(states_nbytes(streams, parameter), parameter.nbytes)


def states_nbytes(streams: Iterable[str], parameter: Parameter) -> int:
    """Bytes of ``streams`` for all of ``parameter``."""
    return sum(form_of(stream).nbytes_for(parameter) for stream in streams)


def _touched(states: int, nbytes: int) -> int:
    return 2 * states + 3 * nbytes


def _chunk_nbytes(forms: Iterable[StateForm], elements: int, pieces: Sequence[Piece]) -> int:
    """Bytes of streams of these ``forms`` in a chunk of so many ``elements``."""
    return sum([_stream_nbytes(form, elements, pieces) for form in forms])


def _stream_nbytes(form: StateForm, elements: int, pieces: Sequence[Piece]) -> int:
    if form.is_of_wholes:
        return sum(form.nbytes_for(piece.parameter) for piece in pieces)
    return form.nbytes(elements)


def chunk_elements(update_chunk: int, state_names: tuple[str, ...], masters: Masters) -> int:
    """The most elements of a chunk: so many that every stream of the next piece begins at its alignment, and with a
    block of its own where a state has a scale for each. Where states are factored, a larger parameter is one chunk."""
    return align(update_chunk, _step(state_names, masters))


def _step(state_names: tuple[str, ...], masters: Masters) -> int:
    narrowest = form_of(LOWER).itemsize if masters is Masters.LOWER else STATE_ITEMSIZE
    return ALIGNMENT // narrowest if is_wide(state_names) else BLOCK


def state_layout(block: Block, state_names: tuple[str, ...], update_chunk: int, masters: Masters) -> StateLayout:
    """Cuts the state of ``block`` into chunks of at most ``update_chunk`` elements, or, where states are factored, of
    whole parameters.

    ``state_names`` are the optimizer's own streams; one for ``masters`` is added if a parameter needs one.
    """
    needed = any(needs_master(p) for p in block.parameters)
    streams = with_masters(state_names, masters) if needed else state_names
    step, most = _step(state_names, masters), chunk_elements(update_chunk, state_names, masters)
    forms = [form_of(stream) for stream in streams]
    whole = reach_of(state_names).takes_wholes
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    filled = end = 0

    def close() -> None:
        nonlocal end, filled
        if pieces:
            nbytes = align(_chunk_nbytes(forms, filled, pieces), PAGE)
            chunks.append(Chunk(end, filled, nbytes, tuple(pieces)))
            end += nbytes
        pieces.clear()
        filled = 0

    for parameter in block.parameters:
        start = 0
        while parameter.trainable and start < parameter.numel:
            room = most - filled
            if room <= 0 or (whole and pieces and room < parameter.numel):
                close()
                continue
            stop = parameter.numel if whole else min(parameter.numel, start + room)
            pieces.append(Piece(parameter, start, stop, filled))
            filled = align(filled + stop - start, step)
            start = stop
    close()
    return StateLayout(streams, tuple(chunks), end)
