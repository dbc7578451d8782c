"""Homes for drafts of which one is to be chosen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.auto import proven
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home
from forebay.planners.nearest import refused, with_larger
from forebay.planners.parts import Draft, Level
from forebay.planners.refusals import device_too_small
from forebay.planners.shapes import least_device

__all__ = ["Refusal", "housed", "least_refused", "nothing_fits"]


Refusal = tuple[DoesNotFit, Draft]
"""Why a draft has no home, and the draft."""


def housed(
    bench: Bench,
    drafts: Iterable[Draft],
    levels: Sequence[Level],
    accepted: Callable[[Bench, Draft], bool] = proven,
) -> list[Draft]:
    """Those of ``drafts``, each of which fits on the device, that have homes too, and that are ``accepted``, by default
    by the checker. Raises ``DoesNotFit`` where there are none; ``levels`` are what was tried of activations."""
    fitting, refusals = list[Draft](), list[Refusal]()
    for draft in drafts:
        try:
            settled = at_home(bench, draft)
        except DoesNotFit as refusal:
            refusals.append((refusal, draft))
            continue
        if accepted(bench, settled):
            fitting.append(settled)
    if fitting:
        return fitting
    if refusals:
        raise refused(bench, *least_refused(bench, refusals, accepted))
    raise nothing_fits(bench, levels)


def least_refused(
    bench: Bench, refusals: Sequence[Refusal], accepted: Callable[[Bench, Draft], bool] = proven
) -> Refusal:
    """The one of ``refusals`` whose draft is ``accepted`` with the least more of its tier, the disk first: a host that
    is large enough is there already."""
    ranked = sorted(refusals, key=lambda refusal: (refusal[0].tier != Tier.DISK.value, refusal[0].needed))
    for error, draft in ranked:
        with suppress(DoesNotFit):
            enough = bench.with_limits(with_larger(bench.problem, Tier(error.tier), error.needed))
            if accepted(enough, at_home(enough, draft)):
                return error, draft
    return ranked[0]


def nothing_fits(bench: Bench, levels: Sequence[Level]) -> DoesNotFit:
    """That the device is too small for the least that it could do with."""
    least = least_device(bench, levels)
    return refused(bench, device_too_small(bench, least), least)
