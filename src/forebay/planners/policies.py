"""Policies that decide without a search, each after a published system: what ``auto`` is compared with.

``stream``            Every block streams and its update runs on the host, under the next forward: what L2L and
                      ZeRO-Offload (``states``) have in common, without what either of them decides beyond that.
``resident``          Everything stays on the device, and no activation is dropped: plain PyTorch.
``recompute``         Everything stays, and every repeated block is run again for its backward: Chen et al., "Training
                      deep nets with sublinear memory cost", 2016, with one block as the segment instead of sqrt(n) of
                      them, as in most training code.
``stream-recompute``  Both: every block streams and every repeated block is run again.
``keep``              Every activation that autograd saves stays on the device; parameters are placed as ``auto`` does.
``chen``              Every repeated block is run again (Chen et al., 2016); parameters are placed as ``auto`` does. Its
                      sqrt(n) segments of several blocks cannot be said in a plan: a segment is one block.
``offload-all``       Every saved activation of 4 KiB or more (and of a thousandth of what its block saves) goes to the
                      host in forward and comes back in backward:
                      vDNN-all (Rhu et al., MICRO 2016), PyTorch's ``save_on_cpu``; parameters are placed as ``auto``
                      does. Ours departs from both in that the way back begins before backward asks.

Under each of them blocks are updated ahead of their step where there is room for a second copy and the step gains by
it (``speculation``).

``bench`` is one of the same problem whose sizes and simulations are used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forebay.errors import DoesNotFit
from forebay.planners.activations.choosing import all_moved
from forebay.planners.auto import first_that_fits, searched, without_a_trace
from forebay.planners.bench import Bench
from forebay.planners.homes import at_home
from forebay.planners.nearest import refused
from forebay.planners.parts import KEPT, Draft, Level, all_resident
from forebay.planners.problem import Problem
from forebay.planners.reasons import bought_by_speculation, kept, recomputed, unknown_activations
from forebay.planners.refusals import device_too_small
from forebay.planners.speculation import ahead
from forebay.plans import Plan

__all__ = ["POLICIES", "chen", "keep", "offload_all", "recompute", "resident", "settled", "stream", "stream_recompute"]


def stream(problem: Problem, bench: Bench | None = None) -> Plan:
    """Streams every block, whatever the device could hold. Raises ``DoesNotFit``."""
    return _finished(bench or Bench(problem), "stream")


def stream_recompute(problem: Problem, bench: Bench | None = None) -> Plan:
    """Streams every block and recomputes every block that may. Raises ``DoesNotFit``, and ``ConfigError`` without a
    batch."""
    return _finished(bench or Bench(problem), "stream-recompute")


def resident(problem: Problem, bench: Bench | None = None) -> Plan:
    """Keeps everything on the device. Raises ``DoesNotFit``."""
    return _finished(bench or Bench(problem), "resident")


def recompute(problem: Problem, bench: Bench | None = None) -> Plan:
    """Keeps everything on the device and recomputes every block that may. Raises ``DoesNotFit``, and ``ConfigError``
    without a batch."""
    return _finished(bench or Bench(problem), "recompute")


def keep(problem: Problem, bench: Bench | None = None) -> Plan:
    """Keeps every activation. Raises ``DoesNotFit``."""
    return _placed(bench or Bench(problem), "keep", lambda bench: KEPT)


def chen(problem: Problem, bench: Bench | None = None) -> Plan:
    """Recomputes every block that may. Raises ``DoesNotFit``, and ``ConfigError`` without a batch."""
    return _placed(bench or Bench(problem), "chen", lambda bench: Level(_all_blocks(bench)))


def offload_all(problem: Problem, bench: Bench | None = None) -> Plan:
    """Moves every saved activation that can move to the host. Raises ``DoesNotFit``, and ``ConfigError`` without a
    batch."""
    if problem.trace is None:
        raise problem.unknown("activations are moved by what a block saves")
    return _placed(bench or Bench(problem), "offload-all", all_moved)


def _all_blocks(bench: Bench) -> tuple[str, ...]:
    if bench.problem.trace is None:
        raise bench.problem.unknown("recomputation is planned by what a block saves")
    return bench.recomputable


POLICIES: Mapping[str, Callable[[Bench], Draft]] = MappingProxyType(
    {
        "resident": lambda bench: all_resident(bench.model),
        "recompute": lambda bench: all_resident(bench.model, Level(_all_blocks(bench))),
        "stream": first_that_fits,
        "stream-recompute": lambda bench: first_that_fits(bench, Level(_all_blocks(bench))),
    }
)
"""The draft of each policy, before homes are found for what does not stay on the device."""


def settled(bench: Bench, make: Callable[[Bench], Draft]) -> Draft:
    """What ``make`` drafts, with homes. Raises ``DoesNotFit``."""
    draft = make(bench)
    if not bench.fits_device(draft):
        raise refused(bench, device_too_small(bench, draft), draft)
    try:
        return at_home(bench, draft)
    except DoesNotFit as error:
        raise refused(bench, error, draft) from None


def _placed(bench: Bench, name: str, make: Callable[[Bench], Level]) -> Plan:
    """The plan with the activations of one level and everything else as ``auto`` decides. Raises ``DoesNotFit``."""
    level = make(bench)
    if bench.problem.trace is None:
        return without_a_trace(bench, name)
    draft = ahead(bench, searched(bench, [level]))
    reasons = (*kept(draft), *recomputed(draft), *bought_by_speculation(bench, draft))
    return bench.timed(bench.plan(name, draft, reasons=reasons))


def _finished(bench: Bench, name: str) -> Plan:
    draft = ahead(bench, settled(bench, POLICIES[name]))
    bought = bought_by_speculation(bench, draft)
    reasons = (*kept(draft), *recomputed(draft), *bought, *unknown_activations(bench.problem))
    return bench.timed(bench.plan(name, draft, reasons=reasons))
