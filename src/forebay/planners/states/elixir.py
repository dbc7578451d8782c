"""``elixir``: how many blocks are resident, and how many are cached on the device, is searched for.

Huang, Fang, Liu, Li and You, "Elixir: train a large language model on a small GPU cluster", 2022 (arXiv 2212.05339).
After a run of the profiler has said what activations take, the rest of the device is shared out between blocks of the
rCache, which spare a chunk of parameters its way back from the host, and chunks whose optimizer states are on the
device, which spare both ways and the update on the host. Their search compares what a byte gains in either use, from
bandwidths measured beforehand, and gives room to the one first and what is left to the other.

Ours departs in that chunks are blocks, so that no chunk size is searched for; and in that the two uses are not compared
by a formula: from no resident block to as many as there is room for, in steps, with the rest of the room given to
cached blocks (slots of their own), each is simulated and the fastest taken. Both answers that the paper's comparison
can give are among them. As there, the slots that everything else streams through come first, states that are not on
the device are on the host, and the update is over before the next forward begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft
from forebay.planners.problem import Problem
from forebay.planners.shapes import Filling, filled
from forebay.planners.states.drafting import expect_trace, finished, on_host, on_host_alone, serial, streamed
from forebay.plans import Plan

__all__ = ["elixir", "grid"]

PARTS: Final = 8
"""Steps from no resident block to all of them."""

FEW_PARTS: Final = 4
"""The same for long steps (``Bench.is_long``), whose simulation takes its time."""


def elixir(problem: Problem, bench: Bench | None = None) -> Plan:
    """The fastest of ``grid``. Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    expect_trace(bench, "elixir", "the activations of a step and its seconds")
    drafts = list(grid(bench))
    limit = problem.limit(Tier.HOST)
    fitting = [draft for draft in drafts if bench.arenas(draft).host <= limit]
    if not fitting:
        # Raises: of all of them the one that asks the least of the host.
        on_host(bench, min(drafts, key=lambda draft: bench.arenas(draft).host), "elixir")
    best = min(fitting, key=bench.seconds)
    said = f"the fastest of {len(fitting)} ways to share the device between resident and cached blocks"
    return finished(bench, "elixir", best, said)


def grid(bench: Bench) -> Iterator[Draft]:
    """Drafts that fit on the device, with more and more resident blocks. Raises ``DoesNotFit``."""
    base = serial(streamed(bench, on_host_alone("elixir")))
    blocks, parts = len(bench.model.blocks), FEW_PARTS if bench.is_long else PARTS
    counts = sorted({blocks * part // parts for part in range(parts + 1)})
    yield from dict.fromkeys(filled(bench, base, Filling(most=count)) for count in counts)
