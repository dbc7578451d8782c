"""What a training step is made of, as far as a planner needs to know it. No torch here.

A *block* is the set of parameters that move together: one transformer layer, an embedding, a head. Its bytes
lie in one flat buffer, in the order of ``parameters``, so that one copy fetches all of it.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALIGNMENT", "Block", "Footprint", "Model", "Parameter"]

ALIGNMENT = 64
"""Bytes: every parameter starts on a multiple of this inside its block (a cache line; kernels want 16)."""


@dataclass(frozen=True)
class Parameter:
    """One parameter: plain PyTorch name, shape and stride in elements, place in its block in bytes."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    nbytes: int
    offset: int
    trainable: bool
    aliases: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        """Number of elements."""
        n = 1
        for size in self.shape:
            n *= size
        return n


@dataclass(frozen=True)
class Block:
    """Parameters that move together.

    ``modules`` are the names of the modules whose forward needs them. ``held`` says that these modules enclose
    other blocks, so that the parameters are in use while the other blocks stream. ``nbytes`` is the length of the
    flat buffer, padding included.
    """

    name: str
    parameters: tuple[Parameter, ...]
    modules: tuple[str, ...]
    nbytes: int
    held: bool = False

    @property
    def trainable_numel(self) -> int:
        """Number of elements that an optimizer updates."""
        return sum(p.numel for p in self.parameters if p.trainable)

    @property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradients that one backward makes, in the parameters' own dtype."""
        return sum(p.nbytes for p in self.parameters if p.trainable)


@dataclass(frozen=True)
class Model:
    """The blocks of a model in order of their first module, and the bytes of its buffers."""

    blocks: tuple[Block, ...]
    buffer_nbytes: int = 0

    @property
    def parameter_nbytes(self) -> int:
        """Bytes of all parameters, padding included."""
        return sum(b.nbytes for b in self.blocks)

    def block(self, name: str) -> Block:
        """The block called ``name``; KeyError if there is none."""
        return next(b for b in self.blocks if b.name == name)


@dataclass(frozen=True)
class Footprint:
    """Device bytes of one step beside parameters and states: the peak of activations, temporaries and gradients.

    ``measured`` says whether the figure comes from a run of the step under fake tensors (True) or is unknown and
    was set to 0 (False): then nothing but the blocks can be promised beforehand.
    """

    peak: int
    input_nbytes: int
    measured: bool
    note: str = ""
