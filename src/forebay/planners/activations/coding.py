"""Which activations may be kept as codes of fewer bits, and what that costs (ActNN, Chen et al., ICML 2021; GACT, Liu
et al., ICML 2022).

Only what a user has allowed, because backward then reads other numbers than forward made. And only where errors stay
what they are, unbiased noise of the gradient:

*   nothing that attention in one piece saves, or makes. It saves queries, keys, values and a logarithm, and takes an
    exponential of them again in backward: with codes of one and not of the other that is no probability any more;
*   no result of a softmax, no statistics (a mean, a reciprocal deviation): small, or sums in which errors add up;
*   nothing that leaves its block: who reads it is not the block's to say;
*   in a block that runs again, nothing that leads to attention in one piece or to whole numbers (which expert takes a
    token, say): backward would see others than forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from forebay.compression import CODE_DTYPES, Codes
from forebay.layout import MOVED_LEAST
from forebay.plans import Selection
from forebay.simulation import Costs
from forebay.trace import Segment, Tensor

__all__ = ["Coded", "changes", "codable"]

ATTENTION = "_scaled_dot_product"
"""What the names of ops have in common that are attention in one piece."""

NEVER_CODES = frozenset(
    ("_softmax", "_log_softmax", "_safe_softmax", "logsumexp", "mean", "var", "var_mean", "std", "std_mean", "rsqrt")
)
"""Ops whose results are never codes, without namespace and overload."""


@dataclass(frozen=True, slots=True)
class Coded:
    """What an op makes as codes of ``bits`` bits an element.

    ``held``: bytes on the device if the codes stay there. ``moved``: those of the codes alone, without what is too
    small for codes; ``out_seconds`` and ``back_seconds`` on the link if they leave. Making them takes
    ``encode_seconds`` of compute in forward, reading them ``decode_seconds`` in backward.
    """

    bits: int
    held: int
    moved: int
    encode_seconds: float
    decode_seconds: float
    out_seconds: float
    back_seconds: float

    @classmethod
    def of(cls, costs: Costs, roots: Sequence[Tensor], held: int, bits: int) -> Coded:
        """Of ``roots``, which are part of ``held`` bytes."""
        machine = costs.machine
        # Where blocks recompute or stream, every op on the cpu is watched, the codec's too.
        watched = machine.device_kind == "cpu"
        codes = [Codes.of(root.nbytes, root.dtype, bits) for root in roots]
        encode, decode = (
            sum(costs.coding(c, encode=making, watched=watched) for c in codes) for making in (True, False)
        )
        out, back = (sum(link.seconds(c.nbytes) for c in codes) for link in (machine.d2h, machine.h2d))
        moved = sum(c.nbytes for c in codes)
        return cls(bits, held - sum(root.nbytes for root in roots) + moved, moved, encode, decode, out, back)

    @property
    def seconds(self) -> float:
        """Seconds of compute."""
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
    found = set()
    refused: set[int] = set()
    for op, name in zip(segment.ops, ops, strict=True):
        plain = name.split(".")[1] if name.count(".") > 1 else name.split(".")[0]
        made = [r for r in op.outputs if r >= 0 and tensors[r].root == r]
        if plain.startswith(ATTENTION):
            refused.update(made, (tensors[r].root for r in op.inputs if r >= 0))
        elif plain not in NEVER_CODES:
            large = [r for r in made if tensors[r].nbytes >= MOVED_LEAST]
            if len(large) == 1 and tensors[large[0]].dtype in CODE_DTYPES:
                found.add(large[0])
    if again:
        refused |= _leading_to_choices(segment, ops)
    return frozenset((found & internal) - refused)


def _leading_to_choices(segment: Segment, ops: Sequence[str]) -> set[int]:
    """The roots from which attention in one piece is computed, or whole numbers."""
    tensors = segment.tensors
    leading: set[int] = set()
    for op, name in zip(reversed(segment.ops), reversed(ops), strict=True):
        results = {tensors[r].root for r in op.outputs if r >= 0}
        whole = any("float" not in tensors[r].dtype for r in results) and "dropout" not in name
        if whole or ATTENTION in name or results & leading:
            leading.update(results, (tensors[r].root for r in op.inputs if r >= 0))
    return leading


def changes(activations: Sequence[Selection]) -> tuple[str, ...]:
    """What ``activations`` change about the numbers, in words; nothing where they change none."""
    return tuple(_changes(activations))


def _changes(activations: Sequence[Selection]) -> Iterator[str]:
    for bits in sorted({t.bits for s in activations for t in s.treatments if t.lossy}, reverse=True):
        chosen = [s for s in activations if any(t.bits == bits for t in s.treatments)]
        blocks = [block for s in chosen for block in s.blocks]
        ops = sorted({t.op.removeprefix("aten.").split(".")[0] for s in chosen for t in s.treatments if t.bits == bits})
        where = f"block {blocks[0]}" if len(blocks) == 1 else f"{len(blocks)} blocks ({blocks[0]} to {blocks[-1]})"
        yield (
            f"backward reads activations that were kept as {bits} bits an element, stochastically rounded: results of "
            f"{', '.join(ops)} in {where} (ActNN, Chen et al., 2021; GACT, Liu et al., 2022)"
        )
