"""What the policies share whose micro-batches pass the model together: who has room for all of them, and is fastest.

``forebay.accumulate`` has every micro-batch of a step pass a block before the next block is fetched; a trace, and what
a bench says of a draft, are of one micro-batch. So the step is that of ``simulation.together``, and the room is that of
``lowering.accumulation``. Of what a block makes only its input is kept, on the device or on the host; the rest is made
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from forebay.lowering import accumulation_of
from forebay.memory import Tier
from forebay.planners.activations.swapping import swaps
from forebay.planners.auto import proven
from forebay.planners.bench import Bench
from forebay.planners.parts import Draft, Level
from forebay.planners.shapes import streamed_through, usual_window
from forebay.planners.states.drafting import cannot_serve, expect_trace
from forebay.planners.states.housing import housed, nothing_fits
from forebay.simulation import together

__all__ = ["fits_all", "grouped", "seconds_of_all", "through_each"]

LEVELS: Final = 2
"""Of the amounts of activations that ``lohan`` knows: all run again from inputs that stay, or that move."""


def grouped(bench: Bench, policy: str, make: Callable[[Bench, Sequence[Level]], Iterator[Draft]]) -> Draft:
    """The fastest for all micro-batches of a step, of what ``make`` drafts for a device with room for one; with homes.

    Where none has room for all of them it is one without: ``planners.room`` asks again, for less. Raises
    ``DoesNotFit``, ``CannotServe`` for a step of one micro-batch, and ``ConfigError`` without a batch.
    """
    if bench.problem.micro_batches == 1:
        raise cannot_serve(
            policy,
            "groups the micro-batches of a step by layer, and this step has one",
            f"{policy} with 2 micro-batches or more (micro_batches=, --accumulate); zero-infinity or auto with one",
        )
    expect_trace(bench, policy, "what a layer makes and how long it takes")
    levels = swaps(bench)[:LEVELS]
    found = housed(bench, make(bench, levels), levels, lambda bench, draft: True)
    able = [draft for draft in found if fits_all(bench, draft)]
    # The checker takes its time: it is asked for the fastest first, and as a rule for no other.
    ranked = sorted(able or found, key=partial(seconds_of_all, bench))
    best = next(filter(partial(proven, bench), ranked), None)
    if best is None:
        raise nothing_fits(bench, levels)
    return best


def through_each(
    bench: Bench, levels: Sequence[Level], slots: Sequence[tuple[int, ...]], most_ahead: int | None = None
) -> Iterator[Draft]:
    """Everything streams at each of ``levels`` through each of ``slots``, with as many blocks ahead as those allow, or
    ``most_ahead`` if that is less, as far as the device has room for one micro-batch."""
    for level in levels:
        for each in slots:
            draft = streamed_through(bench, each, usual_window(bench), level)
            if bench.fits_device(draft):
                allowed = max(0, len(each) - 1)
                ahead = allowed if most_ahead is None else min(most_ahead, allowed)
                yield replace(draft, streaming=replace(draft.streaming, prefetch_distance=ahead))


def fits_all(bench: Bench, draft: Draft) -> bool:
    """Whether every tier has room for all micro-batches of a step. That ``draft`` fits with one is known."""
    needs = accumulation_of(bench.costs.trace, bench.plan("", draft), liveness=bench.liveness)
    if needs is None:
        return True
    count = bench.problem.micro_batches
    return all(needs.needed(tier, count) <= bench.problem.limit(tier) for tier in (Tier.DEVICE, Tier.HOST, Tier.DISK))


def seconds_of_all(bench: Bench, draft: Draft) -> float:
    """Seconds of a step of all micro-batches under ``draft``, with updates in fewer and larger chunks than they run in
    where there are many (like ``Bench.seconds``)."""
    plan = replace(bench.plan("", draft), streaming=bench.coarse(draft))
    return together(plan, bench.costs, bench.problem.micro_batches, liveness=bench.liveness).seconds
