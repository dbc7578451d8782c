"""The fewest bytes that can be live while an op runs, and what has run before it then. No torch.

What has run before an op is closed: with an op all that it needs. Of all closed sets that have what the op needs, and
not the op itself, that with the fewest bytes left over is a smallest cut of a network (Picard, "Maximal closure of a
graph and applications to combinatorial problems", Management Science 22, 1976): who is on the side of the source has
run. A tensor is paid for when its maker is on that side and a reader is on the other.
"""

from __future__ import annotations

from typing import Final, final

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from forebay.planners.ordering.parts import Part

__all__ = ["least_before"]

ENDLESS: Final = 1 << 30
"""Of what no cut goes through. scipy's flows are of 32 bits, and of two arcs in opposite directions the room of one and
the flow of the other are added up."""

LARGEST: Final = ENDLESS - 1
"""No flow is more: bytes are given in units that keep what all tensors add up to at that."""


def least_before(part: Part, op: int) -> tuple[frozenset[int], int]:
    """The ops of ``part`` that run before ``op`` so that the fewest bytes are live while it runs; of several such sets
    the smallest one. And those bytes: no order has fewer then. Where all tensors together are more than ``LARGEST``
    bytes, sizes are rounded down to units, and the bytes are a little less than the set's own."""
    return _Network(part, op).solved()


@final
class _Network:
    """Nodes: the source, the sink, the ops, and behind them tensors that have readers in the part."""

    def __init__(self, part: Part, op: int) -> None:
        self._part, self._op = part, op
        self._from: list[int] = []
        self._to: list[int] = []
        self._bytes: list[int] = []
        self._always = part.base
        self._count = 2 + len(part.ops)
        self._arc(2 + op, 1)
        for need in part.needs[op]:
            self._arc(0, 2 + need)
        for other, needs in enumerate(part.needs):
            for need in needs:
                self._arc(2 + other, 2 + need)
        for one in part.tensors:
            self._add(one.nbytes, one.maker, one.readers, one.stays)

    def _arc(self, start: int, end: int, nbytes: int = -1) -> None:
        """Of so many bytes, -1: no cut goes through it."""
        self._from.append(start)
        self._to.append(end)
        self._bytes.append(nbytes)

    def _add(self, nbytes: int, maker: int, readers: tuple[int, ...], stays: bool) -> None:
        start = 0 if maker < 0 else 2 + maker
        if maker == self._op:
            self._always += nbytes  # it makes that while it runs
        elif maker < 0 and stays:
            self._always += nbytes
        elif not nbytes or not (readers or stays):
            return
        elif stays or len(readers) == 1:
            self._arc(start, 1 if stays else 2 + readers[0], nbytes)
        else:
            self._arc(start, self._count, nbytes)
            for reader in readers:
                self._arc(self._count, 2 + reader)
            self._count += 1

    def solved(self) -> tuple[frozenset[int], int]:
        """The ops on the side of the source, and the bytes of the cut."""
        sizes = np.array(self._bytes, np.int64)
        unit = 1 + int(sizes[sizes > 0].sum()) // LARGEST
        rooms = np.where(sizes < 0, ENDLESS, sizes // unit)
        arcs = np.array((self._from, self._to), np.int32)  # with others scipy 1.13 finds no flow
        network = csr_array((rooms, (arcs[0], arcs[1])), shape=(self._count, self._count), dtype=np.int64)
        # What is there twice was added up: what is endless stays so.
        network.data = np.minimum(network.data, ENDLESS).astype(np.int32)
        found = maximum_flow(network.astype(np.int32), 0, 1)
        rest = (network.astype(np.int64) - found.flow.astype(np.int64)).tocsr()
        rest.data = np.maximum(rest.data, 0)
        rest.eliminate_zeros()
        reached = breadth_first_order(rest, 0, return_predecessors=False)
        ran = frozenset(int(node) - 2 for node in reached if 2 <= node < 2 + len(self._part.ops))
        return ran, self._always + int(found.flow_value) * unit
