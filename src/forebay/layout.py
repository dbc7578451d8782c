"""How the bytes of a block lie: parameters, gradients and optimizer state. No torch.

Parameters
    one flat buffer in the model's dtypes, every parameter at ``Parameter.offset``.
Activations
    of a micro-batch that go to the host: tensor by tensor, each at a multiple of ``ALIGNMENT``.
Gradients
    one flat buffer, trainable parameters only, in the parameters' dtypes.
Optimizer state
    *chunks* of at most ``update_chunk`` elements. Inside a chunk each *stream* (fp32 master, first moment, second
    moment ...) is contiguous, and the streams follow each other, so that one read, one update and one write move
    all the state that belongs to those elements.
"""

from __future__ import annotations

from dataclasses import dataclass

from forebay.memory import ALIGNMENT
from forebay.trace import Block, Parameter

__all__ = [
    "MASTER",
    "MOVED_LEAST",
    "PAGE",
    "STATE_ITEMSIZE",
    "Chunk",
    "Piece",
    "StateLayout",
    "align",
    "gradient_offsets",
    "needs_master",
    "state_layout",
]

PAGE = 4096
"""Bytes: state chunks and disk-homed blocks start on a multiple of this, which O_DIRECT asks for."""

STATE_ITEMSIZE = 4
"""Bytes of one element of optimizer state: fp32."""

MOVED_LEAST = 4096
"""Bytes: a smaller activation stays on the device, where it costs less than its transfer."""

MASTER = "master"
"""Name of the stream that holds the fp32 master copy of 16-bit parameters."""


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """The next multiple of ``to``."""
    return -(-nbytes // to) * to


def needs_master(parameter: Parameter) -> bool:
    """Whether an update needs an fp32 master copy: the parameter is trained in 16 bits."""
    return parameter.trainable and parameter.dtype in ("bfloat16", "float16")


def gradient_offsets(block: Block) -> tuple[dict[str, int], int]:
    """Byte offset of each trainable parameter's gradient in the block's gradient buffer, and the buffer's length."""
    offsets, end = {}, 0
    for parameter in block.parameters:
        if parameter.trainable:
            offsets[parameter.name] = end
            end += align(parameter.nbytes)
    return offsets, end


@dataclass(frozen=True)
class Piece:
    """Elements ``start`` to ``stop`` of a parameter, at ``offset`` (elements) in each stream of a chunk."""

    parameter: Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """State of some elements: ``nbytes`` at ``offset`` in the block's state; streams are ``elements`` long each."""

    offset: int
    elements: int
    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class StateLayout:
    """The state of one block: its streams by name, its chunks, its length in bytes."""

    streams: tuple[str, ...]
    chunks: tuple[Chunk, ...]
    nbytes: int

    @property
    def largest_chunk(self) -> int:
        """Bytes of the largest chunk; 0 if there is no state."""
        return max((c.nbytes for c in self.chunks), default=0)


def state_layout(block: Block, state_names: tuple[str, ...], update_chunk: int) -> StateLayout:
    """Cuts the state of ``block`` into chunks of at most ``update_chunk`` elements.

    ``state_names`` are the optimizer's own streams; a master stream is added if a parameter needs one.
    """
    master = any(needs_master(p) for p in block.parameters)
    streams = ((MASTER,) if master else ()) + state_names
    step = ALIGNMENT // STATE_ITEMSIZE
    chunks: list[Chunk] = []
    pieces: list[Piece] = []
    filled = end = 0

    def close() -> None:
        nonlocal end, filled
        if pieces:
            nbytes = align(filled * STATE_ITEMSIZE * len(streams), PAGE)
            chunks.append(Chunk(end, filled, nbytes, tuple(pieces)))
            end += nbytes
        pieces.clear()
        filled = 0

    for parameter in block.parameters:
        start = 0
        while parameter.trainable and start < parameter.numel:
            room = align(update_chunk, step) - filled
            if room <= 0:
                close()
                continue
            stop = min(parameter.numel, start + room)
            pieces.append(Piece(parameter, start, stop, filled))
            filled = align(filled + stop - start, step)
            start = stop
    close()
    return StateLayout(streams, tuple(chunks), end)
