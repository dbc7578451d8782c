"""How low layouts are, how long they take, and what allocators would have reserved.

scripts/bench layout
scripts/bench layout hard large
scripts/bench layout traces
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from benchmarks.case import BenchmarkError
from benchmarks.layout.instances import Kind, instance, random_buffers
from forebay.buffers import BufferSet
from forebay.checking.addresses import check_addresses
from forebay.lowering import step_buffers
from forebay.planners.layout import lay_out
from forebay.recording import recording_of
from forebay.simulation.allocators import ALLOCATORS, replay
from forebay.trace import Trace
from forebay.units import format_bytes

__all__ = ["MODELS", "TOPICS", "compare"]

MODELS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "gpt2": (4, 1024),
        "gpt2-xl": (2, 1024),
        "llama-3.2-1b": (2, 2048),
        "llama-3.2-3b": (1, 2048),
        "qwen2.5-0.5b": (4, 1024),
        "gemma-2-2b": (1, 2048),
        "pythia-1.4b": (2, 1024),
        "phi-3-mini": (1, 2048),
        "t5-base": (8, 512),
        "flan-t5-large": (4, 512),
        "olmoe-1b-7b": (1, 1024),
        "vit-base": (16, 0),
    }
)
"""Recipes with sequences in a batch and tokens in a sequence (0: images)."""

Say = Callable[[str], None]


def compare(topics: Sequence[str], say: Say) -> None:
    """Runs ``topics`` (none: all of them). Raises ``BenchmarkError`` for one that there is not."""
    for topic in topics or TOPICS:
        if topic not in TOPICS:
            raise BenchmarkError(f"there is no topic {topic!r}; topics are {', '.join(TOPICS)}")
        TOPICS[topic](say)


def _hard(say: Say) -> None:
    """Instances of a known layout at their capacity."""
    for count in (150, 250, 450):
        for seed in range(8):
            _say(f"hard-{count}-{seed}", instance(seed, Kind(count=count)), say)


def _large(say: Say) -> None:
    """Many buffers, of random lives and cut from a rectangle."""
    _say("random-20000", random_buffers(20000, seed=0), say, seconds=9.0)
    _say("dense-20000", random_buffers(20000, seed=1, times=2000), say, seconds=9.0)
    given = instance(0, Kind(count=20000), capacity=1 << 28)
    _say("cut-20000", BufferSet(given.buffers, given.lower_bound * 101 // 100), say, seconds=9.0)


def _say(name: str, given: BufferSet, say: Say, seconds: float | None = None) -> None:
    start = time.perf_counter()
    found = lay_out(given, seconds=seconds)
    spent = time.perf_counter() - start
    check_addresses(found)
    room = "" if given.capacity is None else f", capacity {given.capacity}: {'fits' if found.feasible else 'NOT FOUND'}"
    say(
        f"{name}: {len(given.buffers)} buffers in {spent:.2f} s, {found.gap:.2%} over the bound of "
        f"{found.lower_bound}{room} ({found.found_by})"
    )


def _traces(say: Say) -> None:
    """A training step of each model, in plain PyTorch and with every block recomputed."""
    for name, (batch, seq) in MODELS.items():
        trace = _traced(name, batch, seq)
        blocks = [block.name for block in trace.model.blocks if block.module is not None]
        for what, recompute in (("kept", ()), ("recomputed", blocks)):
            buffers = tuple(replace(buffer, alignment=64) for buffer in step_buffers(trace, recompute))
            found = lay_out(BufferSet(buffers))
            check_addresses(found)
            recording = recording_of(buffers, steps=2)
            over = {n: replay(n, recording, partial(make, recording)).over for n, make in ALLOCATORS.items()}
            say(
                f"{name}, {batch} x {seq}, {what}: {len(buffers)} buffers, {format_bytes(found.lower_bound)} live, "
                f"arena {found.gap:.3%} over in {found.solve_seconds:.2f} s; "
                + ", ".join(f"{n} {share:.1%}" for n, share in over.items())
            )


def _traced(name: str, batch: int, seq: int) -> Trace:
    from forebay.profiler.capture import capture
    from forebay.recipes.tasks import sample

    found = sample(name, batch=batch, seq=seq or 1, dtype="bfloat16")
    return capture(found.model, found.batch, "adamw", "cuda").trace


TOPICS: Mapping[str, Callable[[Say], None]] = MappingProxyType({"hard": _hard, "large": _large, "traces": _traces})
