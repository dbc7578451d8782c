"""The claims of papers on activations: what each says, what our policy of its name comes to on the same kind of model,
and why they differ.

Only the abstracts of the papers were at hand for the figures, and what ``planners/activations/literature`` cites.
Models are those that the papers name, or of their kind; a card is one of the catalogue, with the memory of the paper's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import isqrt
from statistics import mean
from types import MappingProxyType
from typing import Final

from benchmarks.papers.nets import Megatron, ResNet
from benchmarks.papers.record import Point, Row
from benchmarks.papers.segments import ENDLESS, largest_segmented, segmented
from benchmarks.papers.shapes import (
    Gpt,
    Shape,
    bench_of,
    largest_batch,
    last_that_fits,
    point,
    with_device,
    with_disk,
)
from forebay.catalogue import load_machine
from forebay.machine import Curve, Link, Machine
from forebay.planners.activations.literature.chained import links_of
from forebay.planners.activations.literature.layers import layers_of
from forebay.planners.parts import all_resident
from forebay.units import GiB

__all__ = ["ACTIVATIONS"]

RESNET_50: Final = ResNet((3, 4, 6, 3))
RESNET_101: Final = ResNet((3, 4, 23, 3))

SIXTEEN: Final = 31 * GiB // 2
"""Bytes of a card of 16 GB that are left beside CUDA's own."""

BATCHES: Final = tuple(range(16, 1025, 16))
"""Images in a batch."""

SHARES: Final = (2, 3, 4)
"""Times less memory for activations."""

SEGMENT_SIZES: Final = (3, 5, 8, 11)
"""Blocks in a segment; the second is the root of the 33 bottlenecks of ResNet-101."""

OVERSUBSCRIBED: Final = (1.25, 1.5, 2.0)
"""Times the largest batch with everything kept."""

CLOSELY: Final = 1.1
"""Times a step that match it closely."""

DELTA_LEAST: Final = 2.0
"""Times the largest batch, as in its paper."""

HIDDEN: Final = 0.05
"""Share of a step by which it may be longer than with everything kept for its copies to be hidden."""


def _v100(nbytes: int = SIXTEEN) -> Machine:
    return with_device(with_disk(load_machine("v100-32gb"), there=False), nbytes)


def checkmate_batch() -> Row:
    """The largest batch that fits."""
    card = _v100()
    plain, some = largest_batch("resident", RESNET_50, BATCHES, card)
    blocks, more = largest_batch("recompute", RESNET_50, BATCHES, card)
    segments, most = largest_segmented(RESNET_50, BATCHES, card)
    ours, tried = largest_batch("checkmate", RESNET_50, BATCHES, card)
    sizes = [0 if one is None else one.batch for one in (plain, segments, blocks, ours)]
    return Row(
        name="checkmate-batch",
        system="Checkmate",
        claim=f"largest batch of a network that runs no op more than once again, 16 GB; ours: {RESNET_50} on a V100",
        paper="up to 5.1 times the input of plain training, over the networks tried",
        ours=f"{sizes[3]} images; everything kept {sizes[0]}, segments of sqrt(n) {sizes[1]}, of one block {sizes[2]}: "
        f"{sizes[3] / max(1, sizes[0]):.2f} times plain, {sizes[3] / max(1, sizes[1]):.2f} times sqrt(n)",
        agrees=sizes[3] >= max(sizes[:3]) > 0,
        why="the paper's factor is that of its best network, which the abstract does not name; sqrt(n) is counted by "
        "account; a plan makes each block again from its own input, where the paper's schedules begin anywhere",
        points=(*some, *more, *most, *tried),
    )


def rotor_segments() -> Row:
    """The time of a step within the memory that segments take."""
    card, batch = _v100(ENDLESS), 64
    theirs = [segmented(RESNET_101, batch, card, size) for size in SEGMENT_SIZES]
    ours = [point("rotor", RESNET_101, batch, with_device(card, one.device)) for one in theirs]
    gains = {
        size: their.step_seconds / our.step_seconds - 1
        for size, their, our in zip(SEGMENT_SIZES, theirs, ours, strict=True)
        if their.step_seconds and our.step_seconds
    }
    words = ", ".join(f"{size} blocks {gain:+.1%}" for size, gain in gains.items())
    return Row(
        name="rotor-segments",
        system="rotor",
        claim=f"images a second within the memory of segments of so many blocks; ours: {RESNET_101}, {batch} images",
        paper="consistently more than other checkpointing, over networks, image sizes and batches",
        ours=f"{words}; mean {mean(gains.values()) if gains else 0.0:+.1%}",
        agrees=bool(gains) and gains.get(isqrt(sum(RESNET_101.depths)), min(gains.values())) >= 0,
        why="the abstract has no figure; segments are counted by account; agrees: at sqrt(n) blocks; a segment of ours "
        "is one block, which short segments beat where the first few blocks hold the most",
        points=(*theirs, *ours),
    )


def capuchin_swaps() -> Row:
    """Batches that do not fit."""
    card = _v100()
    plain, tried = largest_batch("resident", RESNET_50, BATCHES, card)
    batches = [round(times * (plain.batch if plain else BATCHES[0])) for times in OVERSUBSCRIBED]
    policies = ("capuchin", "vdnn-dyn", "recompute")
    points = {name: [point(name, RESNET_50, batch, card) for batch in batches] for name in policies}
    gains = {name: _faster(points["capuchin"], points[name]) for name in policies[1:]}
    return Row(
        name="capuchin-swaps",
        system="Capuchin",
        claim=f"images a second where the batch does not fit; ours: {RESNET_50} on a V100 of 16 GB, "
        f"{', '.join(map(str, batches))} images for {plain.batch if plain else 0} that do",
        paper="up to 286 % more than vDNN, up to 55 % more than gradient checkpointing",
        ours="; ".join(f"{_signed(gain)} than {name}" for name, gain in gains.items()),
        agrees=all(gain and min(gain.values()) >= 0 for gain in gains.values()),
        why="vdnn-dyn is the fastest of vDNN's ways that fits; gradient checkpointing is a segment for each block "
        "(recompute); copies here overlap with compute in vDNN too, but for one tensor after the other",
        points=(*tried, *(one for own in points.values() for one in own)),
    )


def _faster(ours: Sequence[Point], theirs: Sequence[Point]) -> dict[int, float]:
    """By batch, how much more ``ours`` do in a second, as a share, where both fit."""
    return {
        our.batch: their.step_seconds / our.step_seconds - 1
        for our, their in zip(ours, theirs, strict=True)
        if our.step_seconds and their.step_seconds
    }


def _signed(gains: Mapping[int, float]) -> str:
    return ", ".join(f"{gain:+.0%} ({batch})" for batch, gain in gains.items()) or "nothing to compare"


OFFLOADED: Final[Mapping[str, tuple[Shape, int]]] = MappingProxyType(
    {"ResNet-101": (RESNET_101, 64), "GPT": (Gpt(24, 4096), 4)}
)
"""By name, with a batch."""


def pofo_offloading() -> Row:
    """Making again and offloading against making again alone."""
    card, tried, removed, words, below = _v100(ENDLESS), list[Point](), list[float](), list[str](), list[int]()
    for name, (shape, batch) in OFFLOADED.items():
        kept, standing, held = _kept(shape, batch, card)
        said = []
        for share in SHARES:
            within = with_device(card, standing + held // share)
            both = [point(policy, shape, batch, within) for policy in ("rotor", "pofo")]
            rotor, pofo = (one.step_seconds / kept - 1 if one.step_seconds else None for one in both)
            said.append(f"1/{share} {_over(rotor)} and {_over(pofo)}")
            if rotor and pofo is not None:
                removed.append(1 - pofo / rotor)
            if pofo is not None and pofo < 0.2:
                below.append(share)
            tried += both
        words.append(f"{name}: {', '.join(said)}")
    least, most = min(removed, default=0.0), max(removed, default=0.0)
    return Row(
        name="pofo-offloading",
        system="POFO",
        claim="overhead within a share of the memory for activations, rotor and pofo; ours: ResNet-101 with 64 images "
        f"and {OFFLOADED['GPT'][0]} with 4 sequences, a V100 and {card.d2h.curve.best / 1e9:.1f} GB/s to the host",
        paper="offloading removes a third of the overhead; 4 to 6 times less memory with less than 20 %",
        ours=f"{'; '.join(words)}: {least:.0%} to {most:.0%} of it removed, "
        f"less than 20 % down to 1/{max(below, default=1)}",
        agrees=least >= 0 and most >= 1 / 3,
        why="what hides depends on how much a byte of activations computes, and the platforms are not in the abstract; "
        "a segment is one block: inputs of all blocks are held or offloaded, where the paper makes them again as well",
        points=tuple(tried),
    )


def _over(overhead: float | None) -> str:
    return "does not fit" if overhead is None else f"{overhead:+.1%}"


def _kept(shape: Shape, batch: int, machine: Machine) -> tuple[float, int, int]:
    """With everything kept on a device that has room for it: seconds of a step, and bytes of the device beside and of
    what its layers hold."""
    bench = bench_of(shape, batch, with_device(machine, ENDLESS))
    draft = all_resident(bench.model)
    held = sum(layer.items.held for layer in layers_of(bench))
    return bench.seconds(draft), bench.device(draft) - held, held


def selective_overhead() -> Row:
    """What running the core of attention again costs, beside running everything again."""
    card = with_device(with_disk(load_machine("a100-80gb"), there=False), ENDLESS)
    found, tried = {}, []
    for shape, batch in ((Megatron(2, 6144, 64), 4), (Megatron(2, 12288, 96), 1)):
        bench = bench_of(shape, batch, card)
        compute = sum(link.forward + link.backward for link in links_of(bench, layers_of(bench)))
        points = [point(name, shape, batch, card) for name in ("resident", "recompute", "selective")]
        kept, full, core = (one.step_seconds or 0.0 for one in points)
        found[shape] = (full - kept) / compute, (core - kept) / compute
        tried += points
    words = [f"{shape}: {full:.1%} and {core:.1%}" for shape, (full, core) in found.items()]
    less = [1 - core / full for full, core in found.values()]
    return Row(
        name="selective-overhead",
        system="selective",
        claim="overhead of a layer that runs again, and of one whose core of attention does; ours: layers of 22B and "
        "175B, one A100",
        paper="over 90 % less of it (with sequence parallelism); operations: 2.7 % more for 175B",
        ours=f"{'; '.join(words)}: {min(less):.0%} to {max(less):.0%} less",
        agrees=min(less) > 0.5,
        why="the softmax, its mask and its dropout are passes of their own over the scores in eager PyTorch, in the "
        "paper one kernel; and what sequence parallelism saves is not here",
        points=tuple(tried),
    )


def flashneuron_writes() -> Row:
    """Up to which batch writes to a drive hide under the forward."""
    shape, card = Gpt(24, 1024), with_device(load_machine("v100-32gb"), SIXTEEN)
    batches = tuple(range(1, 65))
    plain, tried = largest_batch("resident", shape, batches, card)
    ours, more = largest_batch("flashneuron", shape, batches, card)
    hiding = {drives: _largest_hidden(shape, batches, _drives(card, drives)) for drives in (1, DRIVES)}
    base, most = (one.batch if one else 1 for one in (plain, ours))
    words = ", ".join(
        f"{drives} drive{'s' if drives > 1 else ''} {one.batch if one else 0}" for drives, (one, _) in hiding.items()
    )
    return Row(
        name="flashneuron-writes",
        system="FlashNeuron",
        claim="largest batch on a V100 of 16 GB with activations on drives, and with writes that do not make the step "
        f"longer; ours: GPT of {shape}",
        paper="12.4 to 14.0 times the batch of the card's memory, up to 37.8 % more throughput",
        ours=f"{most} sequences for {base}: {most / base:.1f} times; at most {HIDDEN:.0%} longer with {words}",
        agrees=most > base and all(one is not None and one.batch > base for one, _ in hiding.values()),
        why="nothing is compressed, and a simulated card computes as fast with small batches, so that throughput gains "
        "nothing; 16-bit products leave little time to write in; loss from all logits at once bounds the batch",
        points=(*tried, *more, *(one for _, own in hiding.values() for one in own)),
    )


DRIVES: Final = 8
"""Of the catalogue's V100."""


def _drives(machine: Machine, count: int) -> Machine:
    """``machine`` with ``count`` of its drives."""
    if machine.disk is None:
        return machine

    def slower(link: Link) -> Link:
        return Link(Curve(tuple((n, rate * count / DRIVES) for n, rate in link.curve.points)), link.latency)

    return replace(
        machine, disk=replace(machine.disk, read=slower(machine.disk.read), write=slower(machine.disk.write))
    )


def _largest_hidden(shape: Shape, batches: Sequence[int], machine: Machine) -> tuple[Point | None, tuple[Point, ...]]:
    """The largest batch whose step under ``flashneuron`` is as long as with everything kept."""

    def made(batch: int) -> Point:
        one = point("flashneuron", shape, batch, machine)
        kept = point("resident", shape, batch, with_device(machine, ENDLESS)).step_seconds
        if one.step_seconds and kept and one.step_seconds > kept * (1 + HIDDEN):
            return replace(one, step_seconds=None, refusal=f"{one.step_seconds / kept - 1:.0%} longer")
        return one

    return last_that_fits([partial(made, batch) for batch in batches])


ROCKMATE: Final[Mapping[str, tuple[Shape, int]]] = MappingProxyType(
    {"GPT-2": (Gpt(12, 768), 8), "ResNet-50": (RESNET_50, 64)}
)


def rockmate_checkmate() -> Row:
    """A menu for each block and rotor's recursion, beside all ops at once."""
    return _beside_checkmate(
        "rockmate",
        system="Rockmate",
        paper="as efficient as Checkmate, as fast as rotor; 2 to 5 times less memory for 10 to 20 % of overhead",
        most=1.05,
        why="checkmate stops after a number of relaxations and may be behind by what its gap says",
    )


def dtr_checkmate() -> Row:
    """Evicting when memory is full, beside the best that is known beforehand."""
    return _beside_checkmate(
        "dtr",
        system="DTR",
        paper="closely matches the performance of optimal static checkpointing, without knowing the model beforehand",
        most=CLOSELY,
        why=f"the abstract has no figure: closely is {CLOSELY - 1:.0%} here; its runtime evicts tensor by tensor in "
        "backward, too, where a plan makes a block again once and as a whole",
    )


def _beside_checkmate(policy: str, *, system: str, paper: str, most: float, why: str) -> Row:
    """The step of ``policy`` over checkmate's, for each model and share of the memory for activations; they agree where
    it is no more than ``most``."""
    card, ratios, tried = _v100(ENDLESS), dict[tuple[str, int], float](), list[Point]()
    for name, (shape, batch) in ROCKMATE.items():
        _, standing, held = _kept(shape, batch, card)
        for share in SHARES:
            within = with_device(card, standing + held // share)
            both = [point(one, shape, batch, within) for one in (policy, "checkmate")]
            tried += both
            if both[0].step_seconds and both[1].step_seconds:
                ratios[name, share] = both[0].step_seconds / both[1].step_seconds
    return Row(
        name=f"{policy}-checkmate",
        system=system,
        claim="step beside checkmate's, within so much less memory for activations; ours: V100",
        paper=paper,
        ours=", ".join(f"{name} 1/{share}: {ratio:.3f}" for (name, share), ratio in ratios.items()),
        agrees=bool(ratios) and max(ratios.values()) <= most,
        why=why,
        points=tuple(tried),
    )


def delta_batches() -> Row:
    """How far swapping and making again go together, decided when memory is full."""
    card, found = _v100(), {}
    for shape in (RESNET_50, RESNET_101):
        found[str(shape)] = [largest_batch(policy, shape, BATCHES, card) for policy in ("resident", "delta")]
    times = {name: after.batch / before.batch for name, ((before, _), (after, _)) in found.items() if before and after}
    return Row(
        name="delta-batches",
        system="DELTA",
        claim="largest batch over that of plain training; ours: a V100 of 16 GB",
        paper="2.04 times with ResNet-50, 2.25 with ResNet-101; 40 to 70 % of memory saved",
        ours=", ".join(f"{name}: {ratio:.2f} times" for name, ratio in times.items()),
        agrees=len(times) == len(found) and min(times.values()) >= DELTA_LEAST,
        why=f"agrees: {DELTA_LEAST:g} times or more with both; here all that a block saves may go, and the host has "
        "room for it",
        points=tuple(one for both in found.values() for _, tried in both for one in tried),
    )


def tsplit_scale() -> Row:
    """How far parts of tensors go, and how fast, where whole tensors are moved or made again."""
    card = _v100()
    plain, tried = largest_batch("resident", RESNET_50, BATCHES, card)
    base = plain.batch if plain else BATCHES[0]
    policies = ("tsplit", "vdnn-dyn", "superneurons")
    found = {name: largest_batch(name, RESNET_50, BATCHES, card) for name in policies}
    most = {name: one.batch if one else 0 for name, (one, _) in found.items()}
    batches = [round(times * base) for times in OVERSUBSCRIBED]
    points = {name: [point(name, RESNET_50, batch, card) for batch in batches] for name in policies}
    gains = {name: _faster(points["tsplit"], points[name]) for name in policies[1:]}
    return Row(
        name="tsplit-scale",
        system="TSPLIT",
        claim=f"largest model or batch, and rate where it does not fit; ours: {RESNET_50} on a V100 of 16 GB, "
        f"{', '.join(map(str, batches))} images for {base} that fit",
        paper="up to 10.5 times the scale of vDNN and 3.1 of SuperNeurons; up to 4.7 and 2.7 times the throughput",
        ours=f"{most['tsplit']} images for {base} with everything kept; "
        + "; ".join(f"{name}: {most[name]} images, {_signed(gain)}" for name, gain in gains.items()),
        agrees=all(most["tsplit"] >= most[name] for name in gains)
        and all(gain and min(gain.values()) >= 0 for gain in gains.values()),
        why="the paper cuts ops as well, so that what one op reads and makes need not be there at once; ours cuts what "
        "is saved between forward and backward",
        points=(
            *tried,
            *(one for _, own in found.values() for one in own),
            *(p for own in points.values() for p in own),
        ),
    )


ACTIVATIONS: Final[Mapping[str, Callable[[], Row]]] = MappingProxyType(
    {
        "checkmate-batch": checkmate_batch,
        "rotor-segments": rotor_segments,
        "capuchin-swaps": capuchin_swaps,
        "pofo-offloading": pofo_offloading,
        "selective-overhead": selective_overhead,
        "flashneuron-writes": flashneuron_writes,
        "rockmate-checkmate": rockmate_checkmate,
        "tsplit-scale": tsplit_scale,
        "dtr-checkmate": dtr_checkmate,
        "delta-batches": delta_batches,
    }
)
"""By name, in the order of the table."""
