"""What a process beside the storage takes for a chunk, beyond what reading and writing its bytes take in a row.

It is the process of ``runtime.storage_side``, asked for chunks of which it updates nothing. It reads and writes by
turns, where a lane of the disk has the next transfer queued when one ends: neither the disk nor the kernel can work
ahead. And each chunk is told, begun by a process that has to wake up, and answered to a thread that has to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle

from forebay.cells import cell_of
from forebay.device.base import Device
from forebay.layout import PAGE, STATE_ITEMSIZE, align, state_layout
from forebay.machine import Link
from forebay.memory import Ledger, Tier
from forebay.model import Block, Parameter
from forebay.optim.rules import AdamRule
from forebay.profiler.effort import Effort
from forebay.profiler.stopwatch import medians, span
from forebay.runtime.storage_orders import Order
from forebay.runtime.storage_side import StorageWorker, Territory
from forebay.states import Masters
from forebay.tiers.diskfile import TierFile
from forebay.tiers.handed import hand_over
from forebay.tiers.shared import SharedArena
from forebay.timeline import Lane
from forebay.units import MiB

__all__ = ["alternating", "by_turns"]

_LARGEST = 4 * MiB
"""Bytes of states: of about as many is a chunk of a plan."""

_LEAST = 0.05
"""Of its rate that a disk can be found to keep: what is slower still was disturbed by somebody else."""


def by_turns(device: Device, file: TierFile, read: Link, write: Link, effort: Effort) -> tuple[float, float]:
    """``Disk.order_seconds`` and ``Disk.alternation`` of the disk of ``file``, which is full of bytes and is
    overwritten with its own: the line through two sizes of chunks, over the seconds of ``read`` and ``write``. Raises
    ``StorageError`` where the process cannot be started."""
    room = max(_LARGEST, effort.disk_sizes[0])
    sizes = [size for size in effort.disk_sizes if size <= room]
    sizes = sorted({sizes[0], sizes[-1]})
    with _worker(file, sizes) as orders:
        taken = medians({size: partial(_seconds, device, *orders[size]) for size in sizes}, effort.rounds, effort.bound)
    return alternating({size: (taken[size], read.seconds(size) + write.seconds(size)) for size in sizes})


def alternating(found: dict[int, tuple[float, float]]) -> tuple[float, float]:
    """Seconds of an order, and the share of their rates that reads and writes by turns keep, by what ``found`` says of
    sizes: seconds of a chunk, and those of its bytes in a row."""
    (taken, alone), *more = [found[size] for size in sorted(found)]
    slower = 1.0
    if more:
        later, longer = more[-1]
        slower = max(1.0, (later - taken) / (longer - alone)) if longer > alone else 1.0
    share = max(_LEAST, 1 / slower)
    return max(0.0, taken - alone / share), share


@contextmanager
def _worker(
    file: TierFile, sizes: list[int]
) -> Iterator[dict[int, tuple[Callable[[Order], None], Iterator[Order], int]]]:
    """By bytes of states, what has the process answer an order, orders without end, and how many are asked for at a
    time; until it is left."""
    rule = AdamRule(decoupled=True, amsgrad=False)
    each = len(rule.state_names) * STATE_ITEMSIZE
    # As many bytes of each size, and the same ones of the file: nothing is changed.
    counts = {size: max(1, min(file.nbytes, 4 * sizes[-1]) // size) for size in sizes}
    blocks = [(_block(f"{size}-{n}", size // each), n * size) for size in sizes for n in range(counts[size])]
    chunk = sizes[-1] // each
    largest = max(
        cell_of(part).nbytes
        for block, _ in blocks
        for part in state_layout(block, rule.state_names, chunk, Masters.WHOLE).chunks
    )
    cell = align(largest, PAGE)
    with SharedArena(cell, ledger=Ledger(Tier.HOST), what="probe") as memory:
        worker = StorageWorker(rule, Territory(tuple(blocks), hand_over(file), chunk, memory, cell, 0, None))
        try:
            # The first answer comes when torch is loaded there.
            worker.update(Order(blocks[0][0].name, 0, 0, {}))
            yield {
                size: (worker.update, cycle([Order(f"{size}-{n}", 0, 0, {}) for n in range(count)]), count)
                for size, count in counts.items()
            }
        finally:
            worker.close()


def _block(name: str, elements: int) -> Block:
    nbytes = elements * STATE_ITEMSIZE
    return Block(name, (Parameter("weight", (elements,), (1,), "float32", nbytes, 0, True),), (name,), align(nbytes))


def _seconds(device: Device, ask: Callable[[Order], None], orders: Iterator[Order], count: int) -> float:
    """Seconds of one chunk among ``count`` that follow each other on the lane, as in a step."""
    device.drain_events()
    queued = [device.submit(Lane.STORAGE_UPDATE, partial(ask, next(orders)), nbytes=1) for _ in range(count)]
    for one in queued:
        one.wait()
    return span([event for event in device.drain_events() if event.lane is Lane.STORAGE_UPDATE]) / count
