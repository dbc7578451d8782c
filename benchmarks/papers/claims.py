"""The claims of papers on parameters and states: what each says, what our policy of the same name comes to on the
paper's machine, and why they differ. All claims, with those on ``activations``.

Only the abstracts of the papers, a post of DeepSpeed and PatrickStar's own list of models were at hand for the figures;
batches are of 1,024 tokens a sequence and ours where a paper's was not known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from benchmarks.papers.activations import ACTIVATIONS
from benchmarks.papers.devices import (
    harmony_pipeline,
    mobius_mapping,
    mobius_speed,
    mpress_imbalance,
    mpress_size,
    ppaware_speed,
    tmo_speed,
)
from benchmarks.papers.record import Point, Row
from benchmarks.papers.shapes import Gpt, best, largest, point, traced, with_disk, with_host
from forebay.budgets import Budget
from forebay.catalogue import load_machine
from forebay.planners import Bench
from forebay.planners.parts import Level, repeated_size
from forebay.planners.states.stronghold import uses, window
from forebay.planning import problem_of
from forebay.units import GiB, format_bytes, format_seconds

__all__ = ["CLAIMS"]

V100: Final = "v100-32gb"

TWO_WIDE: Final = tuple(Gpt(layers, 2048) for layers in range(16, 44, 2))
"""0.9 to 2.2 billion parameters."""

FOUR_WIDE: Final = tuple(Gpt(layers, 4096) for layers in (50, 55, 60, 65, 70, 75, 78, 82, 90))
"""10 to 18 billion parameters; 50, 65 and 78 layers are ZeRO-Offload's models of 10, 13 and 15 billion."""

EIGHT_WIDE: Final = (
    *(Gpt(layers, 8192) for layers in (25, 50, 62, 75, 87, 100, 124)),
    Gpt(96, 12288),
    Gpt(137, 12288),
    Gpt(128, 16384),
    Gpt(105, 20480),
    Gpt(128, 25600),
)
"""20 billion to a trillion parameters; the last has the width of ZeRO-Infinity's."""

THREE_WIDE: Final = tuple(Gpt(layers, 2048) for layers in range(10, 140, 4))
"""0.6 to 7 billion parameters."""


def _words(one: Point | None) -> str:
    return "nothing" if one is None else one.model


def _size(one: Point | None) -> int:
    return 0 if one is None else one.parameters


def zero_offload_size() -> Row:
    """ZeRO-Offload's largest model beside plain PyTorch's."""
    card = with_disk(load_machine(V100), there=False)
    plain, tried = largest("recompute", TWO_WIDE, 1, card)
    ours, others = largest("zero-offload", FOUR_WIDE, 1, card)
    return Row(
        name="zero-offload-size",
        system="ZeRO-Offload",
        claim="largest model on one V100 of 32 GB (DGX-2)",
        paper="13B, ten times the 1.4B of plain PyTorch",
        ours=f"{_words(ours)}; everything on the device: {_words(plain)}",
        agrees=_size(ours) >= 13_000_000_000,
        why="one sequence at a time, where the paper has four; no fragmentation, and 0.5 GiB left to CUDA",
        points=(*tried, *others),
    )


def zero_offload_speed() -> Row:
    """ZeRO-Offload's rate with 10B."""
    card = with_disk(load_machine(V100), there=False)
    shape = FOUR_WIDE[0]
    ours, tried = best("zero-offload", shape, (1, 4, 8, 10), card)
    return Row(
        name="zero-offload-speed",
        system="ZeRO-Offload",
        claim="rate of 10B on one V100",
        paper="40 TFLOP/s",
        ours=_rate(ours),
        agrees=ours is not None and abs(ours.teraflops / 40 - 1) <= 0.25,
        why="the paper's steps accumulate over several micro-batches before an update, ours update after each; the "
        "catalogue's V100 reaches 75 TFLOP/s in large products",
        points=tried,
    )


def zero3_offload() -> Row:
    """Parameters on the host too."""
    card = with_disk(load_machine(V100), there=False)
    sizes = tuple(Gpt(layers, 8192) for layers in (50, 62, 75, 87, 100, 124))
    ours, tried = largest("zero-infinity", sizes, 1, card)
    shape = Gpt(65, 4096)
    slow, some = best("zero-offload", shape, (1, 2, 4), card)
    fast, more = best("zero-infinity", shape, (4, 8, 16, 32), card)
    gain = fast.teraflops / slow.teraflops if fast is not None and slow is not None else 0.0
    return Row(
        name="zero3-offload",
        system="ZeRO-3 Offload",
        claim="one V100 and 1.5 TB of host memory: largest model; rate of 13B over ZeRO-Offload's",
        paper="over 40B; 2.3 times",
        ours=f"{_words(ours)}; {gain:.2f} times ({_rate(fast)} for {_rate(slow)})",
        agrees=_size(ours) >= 40_000_000_000 and gain > 1,
        why="each with its best batch, which is larger where parameters stream: the update is paid once a step",
        points=(*tried, *some, *more),
    )


def zero_infinity_tiers() -> Row:
    """How far each tier goes."""
    card = load_machine(V100)
    on_device, some = largest("recompute", TWO_WIDE, 1, card)
    on_host, more = largest("zero-infinity", EIGHT_WIDE, 1, with_disk(card, there=False))
    on_disk, most = largest("zero-infinity", EIGHT_WIDE, 1, card)
    refusal = next((one.refusal for one in most if not one.fits), "")
    return Row(
        name="zero-infinity-tiers",
        system="ZeRO-Infinity",
        claim="what device, host and NVMe of a DGX-2 hold (the paper: all 16 cards; ours: one of them)",
        paper="NVMe: a trillion parameters",
        ours=f"device {_words(on_device)}, host {_words(on_host)}, disk {_words(on_disk)}",
        agrees=_size(on_device) < _size(on_host) and _size(on_disk) >= 1_000_000_000_000,
        why="gradients have a home on the host, never on disk, and no linear is cut into tiles: a layer has to fit "
        f"into a slot. The smallest that was refused: {_short(refusal)}",
        points=(*some, *more, *most),
    )


def stronghold_size() -> Row:
    """STRONGHOLD's largest model, and what the host limits."""
    card = with_host(with_disk(load_machine(V100), there=False), 755 * GiB)
    shape = Gpt(500, 2560)
    ours = point("stronghold", shape, 1, card)
    rival, tried = largest("zero-offload", FOUR_WIDE, 1, card)
    gain = ours.parameters / rival.parameters if ours.fits and rival is not None else 0.0
    size = _words(ours) if ours.fits else f"it does not fit: {_short(ours.refusal)}"
    return Row(
        name="stronghold-size",
        system="STRONGHOLD",
        claim="largest model on one V100 of 32 GB and 755 GiB of host memory",
        paper="39.5B, up to 6.5 times what rivals train",
        ours=f"{size}; {gain:.1f} times zero-offload",
        agrees=ours.fits,
        why="ours keeps a second copy of what is updated under backward where the host has room for it"
        f"; host peak {format_bytes(ours.host)}",
        points=(ours, *tried),
    )


def stronghold_window() -> Row:
    """The window follows from the profile: the more a layer computes, the fewer layers hide its transfers."""
    card = with_host(with_disk(load_machine(V100), there=False), 755 * GiB)
    shape, found, tried = Gpt(20, 2560), dict[int, int | None](), list[Point]()
    for batch in (1, 2, 4, 8, 16):
        bench = Bench(problem_of(traced(shape, batch), card, Budget(card.device_capacity)))
        layers = [block for block in bench.model.blocks if not block.held]
        layers = [block for block in layers if block.nbytes <= repeated_size(layers)]
        found[batch] = window(uses(bench.costs, Level(bench.recomputable)), layers, card)
        tried.append(point("stronghold", shape, batch, card))
    sizes = [len(layers) if size is None else size for size in found.values()]
    return Row(
        name="stronghold-window",
        system="STRONGHOLD",
        claim="1.7B on one V100: the least window that hides every transfer",
        paper="the smallest window is found from a profile of the first steps",
        ours=", ".join(f"batch {batch}: {'none' if size is None else size}" for batch, size in found.items()),
        agrees=sizes == sorted(sizes, reverse=True),
        why="the paper's own figures were not at hand; ours counts what a link is behind over several layers",
        points=tuple(tried),
    )


def patrickstar() -> Row:
    """Model data in both memories against states on the host alone."""
    card = with_host(with_disk(load_machine(V100), there=False), 30 * GiB)
    theirs, some = largest("zero-offload", THREE_WIDE, 1, card)
    ours, more = largest("patrickstar", THREE_WIDE, 1, card)
    fast = None if theirs is None else point("patrickstar", _shape_of(theirs), 1, card)
    gain = _size(ours) / _size(theirs) if theirs is not None else 0.0
    faster = 0.0
    if fast is not None and fast.step_seconds and theirs is not None and theirs.step_seconds:
        faster = theirs.step_seconds / fast.step_seconds
    return Row(
        name="patrickstar",
        system="PatrickStar",
        claim="largest model beside DeepSpeed's, 8 V100 and 240 GB (ours: one of them with an eighth of the host)",
        paper="2.27 times as large, and faster",
        ours=f"{_words(ours)} for zero-offload's {_words(theirs)}: {gain:.2f} times as large; with the latter "
        f"{faster:.2f} times as fast",
        agrees=gain > 1 and faster >= 1,
        why="a gradient of ours does not take the place of its parameter, and a block that is on the device keeps its "
        "home on the host: both are host bytes that the paper saves",
        points=(*some, *more, *(() if fast is None else (fast,))),
    )


def lohan_size() -> Row:
    """175B on a consumer card."""
    card, shape = load_machine("rtx-4090-12-ssd"), Gpt(96, 12288)
    ours, tried = best("lohan", shape, (1, 2, 4), card, "backward")
    small = point("lohan", shape, 1, with_host(card, 256 * GiB), "backward")
    host = _rate(small) if small.fits else f"does not fit: {_short(small.refusal)}"
    return Row(
        name="lohan-size",
        system="LoHan",
        claim="175B on an RTX 4090 with 12 SSDs",
        paper="87 TFLOP/s; fits with 256 GB of host memory",
        ours=f"768 GiB of host memory: {_rate(ours)}; 256 GiB: {host}",
        agrees=ours is not None and small.fits,
        why="gradients are used up in backward as in the paper (update='backward'); larger batches do not fit on the "
        "device, so that the update is paid for fewer tokens",
        points=(*tried, small),
    )


def lohan_disks() -> Row:
    """The fall with one disk."""
    shape, batches = Gpt(40, 5120), (8, 16, 32)
    # With room for all of it in memory the disks would not be used: the host is that of the paper's claim.
    many, some = best("lohan", shape, batches, with_host(load_machine("rtx-4090-12-ssd"), 128 * GiB))
    one, more = best("lohan", shape, batches, with_host(load_machine("rtx-4090-1-ssd"), 128 * GiB))
    share = one.teraflops / many.teraflops if one is not None and many is not None else 0.0
    return Row(
        name="lohan-disks",
        system="LoHan",
        claim="13B on an RTX 4090: 12 SSDs and one",
        paper="143 to 156 TFLOP/s, 37.5 with one: 0.25 of it",
        ours=f"{_rate(many)}, {_rate(one)} with one: {share:.2f} of it",
        agrees=0 < share < 0.6,
        why="128 GiB of host memory, so that states are on disk as in the paper; ours leaves on the host what it has "
        "room for. A batch of 16 does not fit on the device, so that the update is paid for fewer tokens",
        points=(*some, *more),
    )


def _rate(one: Point | None) -> str:
    if one is None or not one.fits:
        return "nothing fits"
    return f"{one.teraflops:.0f} TFLOP/s (batch {one.batch}, {format_seconds(one.step_seconds or 0.0)})"


def _shape_of(one: Point) -> Gpt:
    return next(shape for shape in THREE_WIDE if str(shape) == one.model)


def _short(refusal: str) -> str:
    """A refusal without what would fit."""
    return refusal.partition(". What would fit")[0]


CLAIMS: Final[Mapping[str, Callable[[], Row]]] = MappingProxyType(
    {
        "zero-offload-size": zero_offload_size,
        "zero-offload-speed": zero_offload_speed,
        "zero3-offload": zero3_offload,
        "zero-infinity-tiers": zero_infinity_tiers,
        "patrickstar": patrickstar,
        "stronghold-size": stronghold_size,
        "stronghold-window": stronghold_window,
        "harmony-pipeline": harmony_pipeline,
        "mobius-mapping": mobius_mapping,
        "mobius-speed": mobius_speed,
        "tmo-speed": tmo_speed,
        "mpress-imbalance": mpress_imbalance,
        "mpress-size": mpress_size,
        "ppaware-speed": ppaware_speed,
        "lohan-disks": lohan_disks,
        "lohan-size": lohan_size,
        **ACTIVATIONS,
    }
)
"""By name, in the order of the table."""
