"""Which activations may be kept as codes of fewer bits, and what that costs (ActNN, Chen et al., ICML 2021; GACT, Liu
et al., ICML 2022).

Only what a user has allowed, because backward then reads other numbers than forward made. And only where errors stay
what they are, noise of the gradient without a bias (of its first order):

*   nothing that attention in one piece saves, or makes. It saves queries, keys, values and a logarithm, and takes an
    exponential of them again in backward: with codes of one and not of the other that is no probability any more;
*   no result of a softmax; no statistics (a mean, a reciprocal deviation), nor what is computed from them alone: small,
    or sums in which errors add up;
*   nothing that is divided by or that a logarithm is taken of: near zero a small error is a large one there;
*   nothing that leaves its block: who reads it is not the block's to say;
*   in a block that runs again, nothing that leads to attention, a softmax or whole numbers (which expert takes a token,
    say): backward would see others than forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forebay.compression import CODE_DTYPES, Codes
from forebay.layout import MOVED_LEAST
from forebay.simulation import Costs
from forebay.trace import Segment, Tensor
from forebay.treatments import Selection

__all__ = ["Coded", "changes", "codable", "lossy"]

ATTENTION = "_scaled_dot_product"
"""What the names of ops have in common that are attention in one piece."""

SOFTMAX = frozenset(("_softmax", "_log_softmax", "_safe_softmax", "logsumexp"))
"""Ops that take exponentials and add them up, without namespace and overload."""

STATISTICS = frozenset(("mean", "var", "var_mean", "std", "std_mean", "norm", "linalg_vector_norm", "rsqrt", "sqrt"))
"""Ops that make statistics, and roots, which norms are made of."""

DIVISORS = frozenset((("div", 1), ("div_", 1), ("log", 0), ("log_", 0), ("log2", 0), ("log10", 0), ("log1p", 0)))
"""Ops and the places of the inputs that backward divides by."""


@dataclass(frozen=True, slots=True)
class Coded:
    """What an op makes as codes of ``bits`` bits an element.

    ``held``: bytes on the device if the codes stay there. ``moved``: those of the codes alone, without what is too
    small for codes; ``out_seconds`` and ``back_seconds`` on the link if they leave, and ``handover_seconds`` of compute
    to hand over both transfers. Making them takes ``encode_seconds`` of compute in forward, reading them
    ``decode_seconds`` in backward.
    """

    bits: int
    held: int
    moved: int
    encode_seconds: float
    decode_seconds: float
    out_seconds: float
    back_seconds: float
    handover_seconds: float

    @classmethod
    def of(cls, costs: Costs, roots: Sequence[Tensor], held: int, bits: int) -> Coded:
        """Of ``roots``, which are part of ``held`` bytes."""
        machine = costs.machine
        codes = [Codes.of(root.nbytes, root.dtype, bits) for root in roots]
        encode, decode = (sum(costs.coding(c, encode=making) for c in codes) for making in (True, False))
        out, back = (sum(link.seconds(c.nbytes) for c in codes) for link in (machine.leaving, machine.h2d))
        moved, handed = sum(c.nbytes for c in codes), 2 * len(codes) * costs.handover_seconds
        return cls(bits, held - sum(root.nbytes for root in roots) + moved, moved, encode, decode, out, back, handed)

    def beside(self, other: Coded) -> Coded:
        """Both, made in two runs of a block."""
        return Coded(
            self.bits,
            self.held + other.held,
            self.moved + other.moved,
            self.encode_seconds + other.encode_seconds,
            self.decode_seconds + other.decode_seconds,
            self.out_seconds + other.out_seconds,
            self.back_seconds + other.back_seconds,
            self.handover_seconds + other.handover_seconds,
        )

    @property
    def seconds(self) -> float:
        """Seconds of compute if the codes stay."""
        return self.encode_seconds + self.decode_seconds

    @property
    def link_seconds(self) -> float:
        """Seconds of both directions of the link."""
        return self.out_seconds + self.back_seconds


def codable(segment: Segment, ops: Sequence[str], *, again: bool) -> frozenset[int]:
    """The roots of a block's forward that may be codes; ``ops`` are the names of its ops. ``again``: in a block that
    runs again, where what is computed from codes is computed from other numbers."""
    tensors = segment.tensors
    internal = {root for op in segment.ops for root in op.dropped if root >= 0}
    found: set[int] = set()
    refused: set[int] = set()
    statistics: set[int] = set()
    for op, name in zip(segment.ops, map(_plain, ops), strict=True):
        made = {r for r in op.outputs if r >= 0 and tensors[r].root == r}
        read = [_root(segment, r) for r in op.inputs]
        refused.update(root for place, root in enumerate(read) if (name, place) in DIVISORS)
        if name.startswith(ATTENTION):
            refused.update(made, read)
        elif name in STATISTICS or (read and statistics.issuperset(read)):
            statistics |= made
        elif name not in SOFTMAX:
            large = [r for r in made if tensors[r].nbytes >= MOVED_LEAST]
            if len(large) == 1 and tensors[large[0]].dtype in CODE_DTYPES:
                found.add(large[0])
    if again:
        refused |= _leading_to_choices(segment, ops)
    return frozenset((found & internal) - refused - statistics)


def _leading_to_choices(segment: Segment, ops: Sequence[str]) -> set[int]:
    """The roots from which attention, a softmax or whole numbers are computed."""
    leading: set[int] = set()
    for op, name in zip(reversed(segment.ops), map(_plain, reversed(ops)), strict=True):
        results = {_root(segment, r) for r in op.outputs}
        whole = any(r >= 0 and "float" not in segment.tensors[r].dtype for r in op.outputs) and "dropout" not in name
        if whole or name in SOFTMAX or name.startswith(ATTENTION) or results & leading:
            leading.update(results, (_root(segment, r) for r in op.inputs))
    return leading


def _root(segment: Segment, tensor: int) -> int:
    """The root of what an op reads or makes; what comes from outside (below 0) stands for itself."""
    return segment.tensors[tensor].root if tensor >= 0 else tensor


def _plain(op: str) -> str:
    """The name of an op without namespace and overload."""
    parts = op.split(".")
    return parts[1] if len(parts) == 3 else parts[0]


def lossy(activations: Sequence[Selection]) -> bool:
    """Whether any of ``activations`` is kept as codes that lose precision."""
    return any(t.lossy for selection in activations for t in selection.treatments)


def changes(activations: Sequence[Selection]) -> tuple[str, ...]:
    """What ``activations`` change about the numbers, in words; nothing where they change none."""
    return tuple(_changes(activations))


def _changes(activations: Sequence[Selection]) -> Iterator[str]:
    for bits in sorted({t.bits for s in activations for t in s.treatments if t.lossy}, reverse=True):
        chosen = [s for s in activations if any(t.bits == bits for t in s.treatments)]
        blocks = [block for s in chosen for block in s.blocks]
        ops = sorted({_plain(t.op) for s in chosen for t in s.treatments if t.bits == bits})
        where = f"block {blocks[0]}" if len(blocks) == 1 else f"{len(blocks)} blocks ({blocks[0]} to {blocks[-1]})"
        yield (
            f"backward reads activations that were kept as {bits} bits an element, stochastically rounded: results of "
            f"{', '.join(ops)} in {where} (ActNN, Chen et al., 2021; GACT, Liu et al., 2022)"
        )
