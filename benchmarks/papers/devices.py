"""The claims about several devices of one server: stages that are swapped, pipelines of stages that stay, shared
links."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from benchmarks.papers.record import Point, Row
from benchmarks.papers.shapes import Gpt, traced, with_disk, with_host
from forebay.budgets import Budget
from forebay.catalogue import load_machine
from forebay.collector import collector_paused
from forebay.errors import DoesNotFit
from forebay.machine import Machine
from forebay.planners import Bench
from forebay.planners.parallel import ServerBench, plan_server
from forebay.planners.parallel.data_parallel import swaps
from forebay.planners.parts import all_resident
from forebay.planning import problem_of
from forebay.servers import Server, ServerPlan
from forebay.timeline import Lane
from forebay.units import TiB, format_bytes, format_seconds

__all__ = [
    "harmony_pipeline",
    "mobius_mapping",
    "mobius_speed",
    "mpress_imbalance",
    "mpress_size",
    "ppaware_speed",
    "tmo_speed",
]

COMMODITY: Final = "rtx-3090"
EIGHT: Final = Gpt(40, 4096)
FIFTEEN: Final = Gpt(48, 5120)
EACH: Final = 4
"""Micro-batches of a sequence for each device."""

TOPOLOGIES: Final = ("4", "2+2", "1+3")
"""Devices by the root complex that their links end on, which is as fast as one link."""

DGX: Final = "8:150GB"
"""Eight cards with six NVLinks of 25 GB/s each."""

DEEP: Final = tuple(Gpt(layers, 2048) for layers in range(72, 280, 16))
"""3.7 to 14 billion parameters."""

LONG: Final = Gpt(40, 4096)


def bench(shape: Gpt, batch: int, card: Machine, devices: str, device: int | None = None) -> ServerBench:
    """``shape`` over ``devices``, each a ``card`` with ``device`` bytes (None: all that it has)."""
    problem = problem_of(traced(shape, batch), card, Budget(device or card.device_capacity))
    return ServerBench(Bench(problem), Server.parse(devices, card.h2d.curve.best), EACH)


def commodity(shape: Gpt, devices: str) -> ServerBench:
    """On cards without links between them, in a server with as much memory as it takes."""
    return bench(shape, 1, with_host(with_disk(load_machine(COMMODITY), there=False), TiB), devices)


def planned(asked: ServerBench, policy: str) -> ServerPlan | None:
    """None where it does not fit."""
    try:
        return plan_server(asked, policy)
    except DoesNotFit:
        return None


def point(policy: str, shape: Gpt, asked: ServerBench, plan: ServerPlan | None, batch: int = 1) -> Point:
    machine = f"{asked.server.devices} x {asked.costs.machine.name}"
    count = batch * asked.micro_batches
    found = Point(policy, machine, str(shape), shape.parameters, count, None, shape.flops(count))
    if plan is None:
        return found
    return Point(
        policy,
        machine,
        str(shape),
        shape.parameters,
        count,
        plan.step_seconds,
        shape.flops(count),
        plan.peak,
        plan.host,
    )


def pair(shape: Gpt, asked: ServerBench, policies: tuple[str, str], batch: int = 1) -> tuple[float, tuple[Point, ...]]:
    """How many times as long a step of the second of ``policies`` takes as one of the first; 0 where either does not
    fit."""
    ours, theirs = (planned(asked, policy) for policy in policies)
    points = tuple(point(name, shape, asked, one, batch) for name, one in zip(policies, (ours, theirs), strict=True))
    gain = theirs.step_seconds / ours.step_seconds if ours is not None and theirs is not None else 0.0
    return gain, points


def mobius_speed() -> Row:
    """Mobius beside data-parallel training with parameters on the host, by topology."""
    words, gains, points = [], [], []
    for shape in (EIGHT, FIFTEEN):
        for name in TOPOLOGIES:
            gain, found = pair(shape, commodity(shape, name), ("mobius", "zero-infinity"))
            gains.append(gain)
            points += found
            words.append(f"{shape} on {name}: {gain:.1f} times ({format_seconds(found[0].step_seconds or 0.0)})")
    return Row(
        name="mobius-speed",
        system="Mobius",
        claim="fine-tuning on servers of commodity cards: over the prior art (DeepSpeed with heterogeneous memory)",
        paper="3.8 to 5.1 times",
        ours="; ".join(words),
        agrees=min(gains) > 1,
        why=f"4 cards of {COMMODITY}, {EACH} micro-batches of a sequence for each, root complexes as fast as one link; "
        "which of the paper's topologies and batches its figures are of was not at hand",
        points=tuple(points),
    )


def mobius_mapping() -> Row:
    """What it gains to place stages that follow each other on different root complexes."""
    words, gains, points = [], [], []
    for name in TOPOLOGIES:
        gain, found = pair(FIFTEEN, commodity(FIFTEEN, name), ("mobius", "harmony"))
        gains.append(gain)
        points += found
        words.append(f"{name}: {1 / gain:.3f} of the seconds in order" if gain else f"{name}: does not fit")
    return Row(
        name="mobius-mapping",
        system="Mobius",
        claim="stages mapped across root complexes (cross mapping) beside one device after the other",
        paper="contention is least where stages next to each other do not share a root complex",
        ours=f"{FIFTEEN}: {'; '.join(words)}",
        agrees=min(gains) >= 1 - 1e-9 and max(gains) > 1,
        why="with all cards on one root complex there is nothing to choose; the paper's own figures were not at hand",
        points=tuple(points),
    )


def harmony_pipeline() -> Row:
    """Harmony's bytes and seconds beside those of devices that swap for every micro-batch."""
    asked = commodity(EIGHT, "4")
    ours, theirs = planned(asked, "harmony"), planned(asked, "zero-infinity")
    said, agrees = "it does not fit", False
    if ours is not None and theirs is not None:
        gain, fewer = theirs.step_seconds / ours.step_seconds, theirs.moved[Lane.H2D] / ours.moved[Lane.H2D]
        moved = f"{format_bytes(ours.moved[Lane.H2D])} for {format_bytes(theirs.moved[Lane.H2D])}"
        said = f"{EIGHT}: {gain:.1f} times; {moved} to the devices in a step, {fewer:.0f} times fewer"
        agrees = gain > 1 and fewer > 4
    return Row(
        name="harmony-pipeline",
        system="Harmony",
        claim="one server of commodity cards: throughput and swap load, over baselines with virtualized memory",
        paper="up to 7.6 times; up to two orders of magnitude fewer bytes",
        ours=said,
        agrees=agrees,
        why=f"4 cards of {COMMODITY} on one root complex, {EACH} micro-batches for each; what the baseline swaps is "
        "what a plan would, parameters twice a micro-batch, where virtual memory swaps pages that are not needed",
        points=(point("harmony", EIGHT, asked, ours), point("zero-infinity", EIGHT, asked, theirs)),
    )


def tmo_speed() -> Row:
    """Both ways of ordering transfers beside devices that all swap the same at the same time."""
    shape, card = Gpt(24, 1024), with_disk(load_machine("v100-32gb"), there=False)
    whole = Bench(problem_of(traced(shape, 16), card, Budget(card.device_capacity)))
    footprint = whole.device(all_resident(whole.model))
    words, gains, points = [], [], []
    for times in (1.33, 2.0):
        asked = bench(shape, 16, card, "4", round(footprint / times))
        with collector_paused():
            ways = {said: max(way[1].step_seconds) for said, way in swaps(asked).items()}
        plain = ways.pop("")
        gains.append(plain / min(ways.values()))
        listed = ", ".join(f"{said}: {plain / seconds - 1:.0%}" for said, seconds in ways.items())
        words.append(f"{times:g} times the memory: {listed}")
        points.append(point("tmo", shape, asked, planned(asked, "tmo"), 16))
    return Row(
        name="tmo-speed",
        system="Tensor movement orchestration",
        claim="data-parallel training that swaps over one channel, over swapping that knows nothing of the others",
        paper="38 to 32 % faster on average, at 1.33 to 2 times the device's memory",
        ours=f"{shape}: {'; '.join(words)}",
        agrees=min(gains) >= 1 and max(gains) > 1.01,
        why="4 cards whose links end on one root complex as fast as one of them. Copies that meet share it fairly "
        "here, which loses nothing; what is gained is what of them then hides under computation",
        points=tuple(points),
    )


def mpress_imbalance() -> Row:
    """What the stages of a plain pipeline hold."""
    shape = Gpt(24, 2048)
    asked = bench(shape, 2, replace(load_machine("v100-32gb"), device_capacity=TiB), DGX)
    plan = plan_server(asked, "dapple")
    first, last = plan.devices[0].peak, min(share.peak for share in plan.devices[1:])
    peaks = ", ".join(format_bytes(share.peak) for share in plan.devices)
    return Row(
        name="mpress-imbalance",
        system="MPress",
        claim="devices of a pipeline with one forward and one backward in turn (8 stages) hold unequal amounts",
        paper="early stages hold activations of the most micro-batches, and late devices have room to spare",
        ours=f"{shape}: {peaks}",
        agrees=first > 1.5 * last and plan.devices[0].peak == plan.peak,
        why="the last stage has the loss, over all logits at once; the paper's own bytes were not at hand",
        points=(point("dapple", shape, asked, plan, 2),),
    )


def mpress_size() -> Row:
    """The largest model of a plain pipeline, of one that runs everything again, and of MPress; and seconds."""
    card = with_disk(load_machine("v100-32gb"), there=False)
    going, found, points = ["dapple", "dapple-recompute", "mpress"], dict[str, Gpt](), list[Point]()
    for shape in DEEP:
        asked = bench(shape, 2, card, DGX)
        for policy in list(going):
            plan = planned(asked, policy)
            points.append(point(policy, shape, asked, plan, 2))
            if plan is None:
                going.remove(policy)
            else:
                found[policy] = shape
        if not going:
            break
    above = DEEP[DEEP.index(found["dapple"]) + 1]
    gain, both = pair(above, bench(above, 2, card, DGX), ("mpress", "dapple-recompute"), 2)
    swapped, more = pair(above, bench(above, 2, card, DGX), ("mpress", "zero-infinity"), 2)
    sized = [found[policy].parameters for policy in ("dapple", "dapple-recompute", "mpress")]
    sizes = ", ".join(f"{policy} {shape}" for policy, shape in found.items())
    return Row(
        name="mpress-size",
        system="MPress",
        claim="GPT in a pipeline over 8 V100 of 32 GB with NVLink: largest model; speed over recomputation and ZeRO",
        paper="larger models than the recomputation baseline, and faster than the ZeRO series",
        ours=f"{sizes}; one size above what the plain pipeline trains: {gain:.2f} times as fast as recomputation, "
        f"{swapped:.2f} times as fast as zero-infinity",
        agrees=sized[0] < sized[1] < sized[2] and min(gain, swapped) > 1,
        why=f"parameters, gradients and states stay on the devices, batches of 2 sequences, {EACH} micro-batches for "
        "each device. At the least ours runs everything again, as the baseline does: inputs of blocks do not move. The "
        "paper's sizes were not at hand",
        points=(*points, *both, *more),
    )


def ppaware_speed() -> Row:
    """Offloading by the position in the pipeline, and what is cheap again, beside running everything again."""
    words, gains, points = [], [], []
    for batch in (8, 12):
        asked = bench(LONG, batch, with_disk(load_machine("h100"), there=False), "4:300GB")
        gain, found = pair(LONG, asked, ("ppaware", "dapple-recompute"), batch)
        gains.append(gain)
        points += found
        words.append(f"batch {batch}: {gain:.2f} times as fast")
    return Row(
        name="ppaware-speed",
        system="Kuaishou (ATC 24)",
        claim="pipeline-aware offloading and balanced checkpointing, over full recomputation",
        paper="MFU from 32.3 % to 42.7 %, 1.32 times (175B, 32,768 tokens, 256 H800; tensor and data parallel too)",
        ours=f"{LONG} on 4 H100: {'; '.join(words)}",
        agrees=max(gains) > 1 and min(gains) >= 1,
        why="a pipeline alone, 1,024 tokens a sequence; at best what running everything again costs is spared: a third",
        points=tuple(points),
    )
