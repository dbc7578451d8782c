"""The ops of a step as a graph, and orders in which they may run. No torch.

What a trace records is one order. The graph keeps of it only what any order has to respect: who reads what whom has
made, and who must come behind whom for other reasons. A tensor is in memory from the op that makes it to the last op
that reads it, which is how a compiler lets go of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from forebay.buffers import LARGEST, Buffer, peak_live
from forebay.errors import ConfigError

__all__ = ["GRAPH_SCHEMA", "GraphOp", "GraphTensor", "OpGraph", "Ordered"]

GRAPH_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class GraphOp:
    """One op, and the numbers of those that it has to come behind although it reads nothing of theirs (``after``): they
    read what it overwrites, or draw random numbers before it."""

    name: str
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """``nbytes`` that op ``maker`` makes and the ops ``readers`` read. ``kept``: it is there until the end."""

    nbytes: int
    maker: int
    readers: tuple[int, ...] = ()
    kept: bool = False


@dataclass(frozen=True)
class OpGraph:
    """``ops`` in program order, which is one that is allowed, and the ``tensors`` that they make. What is there before
    the first op and behind the last one is not in it. Tensors name ops by their places.

    Raises ``ConfigError`` for another schema, for places that there are not, for sizes below 0 or above
    ``buffers.LARGEST``, and for a program order that is none: an op in front of what it needs.
    """

    ops: tuple[GraphOp, ...]
    tensors: tuple[GraphTensor, ...]
    schema: int = GRAPH_SCHEMA

    def __post_init__(self) -> None:
        if self.schema != GRAPH_SCHEMA:
            raise ConfigError(f"this graph has schema {self.schema}, this forebay reads schema {GRAPH_SCHEMA}")
        for place, op in enumerate(self.ops):
            wrong = next((other for other in op.after if not 0 <= other < place), None)
            if wrong is not None:
                raise ConfigError(f"op {place} ({op.name}) comes behind op {wrong}: that must be one before it")
        for number, tensor in enumerate(self.tensors):
            if not 0 <= tensor.maker < len(self.ops):
                raise ConfigError(f"tensor {number}: its maker is op {tensor.maker}, and there are {len(self.ops)} ops")
            wrong = next((r for r in tensor.readers if not tensor.maker < r < len(self.ops)), None)
            if wrong is not None:
                raise ConfigError(
                    f"tensor {number}: op {wrong} reads what op {tensor.maker} makes: it must be one of the "
                    f"{len(self.ops)} ops, behind that one"
                )
            if not 0 <= tensor.nbytes <= LARGEST:
                raise ConfigError(f"tensor {number}: a size is 0 to {LARGEST} bytes, got {tensor.nbytes}")

    @cached_property
    def needs(self) -> tuple[frozenset[int], ...]:
        """Of each op those that have to run before it, without what follows from others."""
        found = [set(op.after) for op in self.ops]
        for tensor in self.tensors:
            for reader in tensor.readers:
                found[reader].add(tensor.maker)
        return tuple(map(frozenset, found))

    def buffers(self, order: tuple[int, ...]) -> tuple[Buffer, ...]:
        """The tensors as buffers where the ops run in ``order``: from the place of the maker up to behind that of the
        last reader. Ids begin with the name of the op that makes them."""
        place = {op: at for at, op in enumerate(order)}
        made = []
        for number, tensor in enumerate(self.tensors):
            last = len(order) - 1 if tensor.kept else max(place[op] for op in (tensor.maker, *tensor.readers))
            what = f"{self.ops[tensor.maker].name}-{number}"
            made.append(Buffer(what, place[tensor.maker], last + 1, tensor.nbytes))
        return tuple(made)

    def peak(self, order: tuple[int, ...]) -> int:
        """The most bytes that are live at one time where the ops run in ``order``."""
        return peak_live(self.buffers(order))

    def to_json(self) -> str:
        """The graph as one JSON object."""
        from forebay.records import dump

        return dump(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> OpGraph:
        """Reads ``to_json``'s text. Raises ``ConfigError`` naming the field that is wrong."""
        from forebay.records import load

        return load(cls, text)


@dataclass(frozen=True)
class Ordered:
    """An order of the ops of ``given``: their places in program order. No order has a lower peak than ``lower_bound``
    bytes. ``found_by`` names the planner, ``solve_seconds`` are those that it took."""

    given: OpGraph
    order: tuple[int, ...]
    lower_bound: int
    found_by: str
    solve_seconds: float

    @cached_property
    def peak(self) -> int:
        """The most bytes that are live at one time."""
        return self.given.peak(self.order)

    @cached_property
    def program_peak(self) -> int:
        """The same in program order."""
        return self.given.peak(tuple(range(len(self.given.ops))))

    @property
    def gap(self) -> float:
        """By how much the peak is above the lower bound, as a share of that."""
        return self.peak / self.lower_bound - 1 if self.lower_bound else 0.0
