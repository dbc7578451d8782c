"""Segments of several blocks that run again together (Chen et al., 2016), by account.

A plan says of each block whether it runs again, so that a segment of a plan is one block. Segments of sqrt(n) blocks
are what papers compare with: here they are counted from the same trace and the same costs as the plans beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from typing import Final

from benchmarks.papers.record import Point
from benchmarks.papers.shapes import Shape, bench_of, last_that_fits, with_device
from forebay.machine import Machine
from forebay.planners import Bench
from forebay.planners.activations.items import INPUT, Item
from forebay.planners.activations.literature.layers import Layer, layers_of
from forebay.planners.parts import Level, all_resident
from forebay.units import TiB

__all__ = ["ENDLESS", "SEGMENTS", "largest_segmented", "segmented"]

SEGMENTS: Final = "sqrt(n)"
"""In the place of a policy's name."""

ENDLESS: Final = 1024 * TiB
"""Bytes of a device that has room for anything."""


def segmented(shape: Shape, batch: int, machine: Machine, size: int | None = None) -> Point:
    """A step in which segments of ``size`` blocks (None: the root of their number) run again, everything on the device.

    Blocks are those that may run again, in their order; the last segment does not. Of a segment that does what comes
    into its first block stays, and what leaves its last one. At its fullest the device has that of all segments so far
    and all that the blocks of one segment keep, beside what no block holds and what ops need in backward: as much as
    under the plan in which each block runs again by itself. The step is that with everything kept and the forward of
    all blocks that run again.
    """
    bench = bench_of(shape, batch, with_device(machine, ENDLESS))
    layers = [layer for layer in layers_of(bench) if layer.may_rerun]
    size = size or max(1, isqrt(len(layers)))
    made = Point(SEGMENTS, machine.name, str(shape), shape.parameters, batch, None, shape.flops(batch))
    device = bench.device(all_resident(bench.model))
    if size < len(layers):
        blocks = bench.device(all_resident(bench.model, Level(bench.recomputable)))
        device = blocks + _fullest(layers, size) - _fullest(layers, 1)
    if device > machine.device_capacity:
        return replace(made, device=device, refusal=f"{device} bytes")
    return replace(made, device=device, step_seconds=_seconds(bench, layers, size))


def largest_segmented(shape: Shape, batches: Sequence[int], machine: Machine) -> tuple[Point | None, tuple[Point, ...]]:
    """As ``shapes.largest_batch``, with segments."""
    return last_that_fits([partial(segmented, shape, batch, machine) for batch in batches])


def _fullest(layers: Sequence[Layer], size: int) -> int:
    """Bytes of activations at the fullest."""
    found = ends = 0
    for start in range(0, len(layers), size):
        segment = layers[start : start + size]
        comes = sum(item.held for item in _stays(segment[0]) if item.op == INPUT)
        found = max(found, ends + comes + sum(layer.items.held for layer in segment))
        ends += comes + sum(item.held for item in _stays(segment[-1]) if item.op != INPUT)
    return found


def _stays(layer: Layer) -> Sequence[Item]:
    """What is there in any case if the block runs again: what comes in, and what others need of what it makes."""
    return [item for item in layer.items.again or () if not item.reruns]


def _seconds(bench: Bench, layers: Sequence[Layer], size: int) -> float:
    """Seconds of the step."""
    last = (len(layers) - 1) // size * size
    return bench.seconds(all_resident(bench.model)) + sum(layer.seconds for layer in layers[:last])
