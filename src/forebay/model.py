"""What is trained: the blocks of a model, and the parameters in them. No torch here.

A *block* is the set of parameters that move together: one transformer layer, an embedding, a head. Its bytes
lie in one flat buffer, in the order of ``parameters``, so that one copy fetches all of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

__all__ = ["Block", "Model", "Parameter"]


@dataclass(frozen=True)
class Parameter:
    """One parameter: plain PyTorch ``name``, ``shape`` and ``stride`` in elements, ``dtype`` without ``torch.``.

    Its ``nbytes`` lie in the block's buffer from ``offset`` (bytes) on. ``trainable``: it requires grad, and has
    elements. ``aliases`` are further names of the same parameter (tied weights). ``master``: if it is trained in 16
    bits, an fp32 copy is kept of it; else what an update makes of it is rounded up or down by chance. ``orthogonal``:
    its updates are made orthogonal (``forebay.optim.Muon``).
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    nbytes: int
    offset: int
    trainable: bool
    aliases: tuple[str, ...] = ()
    master: bool = True
    orthogonal: bool = False

    @property
    def sort(self) -> tuple[object, ...]:
        """What parameters have in common whose bytes and states are alike."""
        return self.shape, self.nbytes, self.dtype, self.trainable, self.master, self.orthogonal

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
    flat buffer, padding included. ``beside`` are the blocks that the model itself runs again in backward together with
    this one (a checkpoint of its own around several): the parameters of all are there until each has gone backward.
    """

    name: str
    parameters: tuple[Parameter, ...]
    modules: tuple[str, ...]
    nbytes: int
    held: bool = False
    beside: tuple[str, ...] = ()

    @cached_property
    def module(self) -> str | None:
        """The one module inside whose forward all uses of the parameters lie: what can be recomputed as a whole.

        None where the parameters are used in several places, while other blocks stream, or by the model itself.
        """
        outer = self.modules[0] if self.modules else ""
        inside = all(name == outer or name.startswith(f"{outer}.") for name in self.modules)
        return outer if outer and inside and not self.held else None

    @cached_property
    def is_read_outside(self) -> bool:
        """Whether the model itself reads parameters of other modules, outside of their forward (a head's weight, for a
        loss of its own): they are there from the beginning of its forward to the end."""
        names = (name for p in self.parameters for name in (p.name, *p.aliases))
        return "" in self.modules and all("." in name for name in names)

    @cached_property
    def trainable_numel(self) -> int:
        """Number of elements that an optimizer updates."""
        return sum(p.numel for p in self.parameters if p.trainable)

    @cached_property
    def gradient_nbytes(self) -> int:
        """Bytes of the gradients that one backward makes, in the parameters' own dtype."""
        return sum(p.nbytes for p in self.parameters if p.trainable)


@dataclass(frozen=True)
class Model:
    """The blocks of a model in order of their first module, and the bytes of its buffers (``buffer_nbytes``)."""

    blocks: tuple[Block, ...]
    buffer_nbytes: int = 0

    @property
    def parameter_nbytes(self) -> int:
        """Bytes of all parameters, padding included."""
        return sum(b.nbytes for b in self.blocks)

    @property
    def trained_dtypes(self) -> frozenset[str]:
        """The dtypes of parameters that are trained, and that have a master if they are of 16 bits."""
        return frozenset(p.dtype for block in self.blocks for p in block.parameters if p.trainable and p.master)

    def without_masters(self) -> Model:
        """The same without masters of parameters in bf16."""

        def bare(parameter: Parameter) -> Parameter:
            return replace(parameter, master=parameter.dtype != "bfloat16")

        blocks = (replace(block, parameters=tuple(map(bare, block.parameters))) for block in self.blocks)
        return replace(self, blocks=tuple(blocks))

    def block(self, name: str) -> Block:
        """The block called ``name``; KeyError if there is none."""
        return self._by_name[name]

    @cached_property
    def _by_name(self) -> Mapping[str, Block]:
        return {block.name: block for block in self.blocks}
