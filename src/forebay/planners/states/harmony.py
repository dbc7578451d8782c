"""``harmony``: all micro-batches of a step pass a layer while it is on the device, and it is updated as soon as it can.

Li, Phanishayee, Murray, Tarnawski and Kim, "Harmony: overcoming the hurdles of GPU memory capacity to train massive DNN
models on commodity servers", VLDB 2022 (arXiv 2202.01306). Training is taken apart into tasks of one layer pack and one
micro-batch each, and these are put in another order: a pack runs for the whole group of micro-batches before the next
one is swapped in, forward and backward, so that its weights cross the link once for all of them and not once for each
(input-batch grouping); a pack's weights are updated right after its backward and not at the end of the step
(just-in-time scheduling). The next pack comes while one computes (double buffering). Of what a pack makes only its
input is kept; the rest is made again in backward. A scheduler searches packs and micro-batches with an estimate of the
step's time.

Ours departs in five things. One device: tasks are not bound late to one of several, which are simulated
(``planners.parallel.wrapped``). A pack is a block; the search is over the slots, over whether the inputs stay on the
device or move to the host, and over the updates, with the simulator's time for all micro-batches. How many they are is
not searched for: the user says it (``micro_batches=``), and gives them to ``forebay.accumulate``. The update runs on
the host, as in the paper's variant with the optimizer there, under backward into a second copy where that is faster
(see ``l2l``). What the host has no room for goes to disk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from forebay.planners.bench import Bench
from forebay.planners.parts import Draft, Level
from forebay.planners.problem import Problem
from forebay.planners.speculation import candidates, fits
from forebay.planners.states.drafting import finished
from forebay.planners.states.grouping import fits_all, grouped, seconds_of_all, through_each
from forebay.plans import Plan, Update

__all__ = ["harmony"]

PACKS: Final = 2
"""Layers on the device at most: one computes, one comes."""


def harmony(problem: Problem, bench: Bench | None = None) -> Plan:
    """The fastest step of all micro-batches through two slots of a layer's size. Raises ``DoesNotFit``, ``CannotServe``
    for a step of one micro-batch, and ``ConfigError`` without a batch."""
    bench = bench or Bench(problem)
    best = grouped(bench, "harmony", _drafts)
    early = _early(bench, best)
    count = bench.problem.micro_batches
    said = f"each layer is fetched once in forward and once in backward for all {count} micro-batches of a step"
    return finished(bench, "harmony", early, said)


def _drafts(bench: Bench, levels: Sequence[Level]) -> Iterator[Draft]:
    return through_each(bench, levels, bench.slot_options(PACKS), PACKS - 1)


def _early(bench: Bench, draft: Draft) -> Draft:
    """``draft`` with every update as soon as its gradients are complete, if there is room for that and it is faster."""
    able = candidates(bench, draft)
    early = draft.updating(Update.AHEAD, able)
    if not able or not fits(bench, early) or (fits_all(bench, draft) and not fits_all(bench, early)):
        return draft
    return min((draft, early), key=partial(seconds_of_all, bench))
