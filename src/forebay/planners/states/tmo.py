"""``tmo``: several devices train one model and swap activations over one channel, each other tensors or each in its
turn.

Lin et al., "Tensor movement orchestration in multi-GPU training systems", HPCA 2023. Data-parallel training that swaps
activations to the host has all GPUs swap the same tensors at the same time, over a PCIe channel that they share. Two
ways out: the GPUs swap disjoint sets of tensors, as far as there are enough, so that their transfers fall apart (the
first mechanism); or a coordinator hands the channel to one GPU after the other (the second). Speedups over swapping
that knows nothing of the others are 38 to 32 % on average where 1.33 to 2 times the memory is needed.

forebay prepares a model on one device, and a plan is for one: what is here are plans for several, which the simulator
plays side by side (``simulation.side_by_side``, ``in_turns`` for the second mechanism; ``planners.parallel`` takes the
faster one). Parameters stay on the devices. A block swaps all that it saves or nothing; the fewest blocks do with which
the device has room, and device d of n takes those that are d / n of the way from each to the next: disjoint where no
more than an n-th of the blocks swaps. The exchange of gradients is not priced.
"""

from __future__ import annotations

from collections.abc import Sequence

from forebay.errors import ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.planners.activations.choosing import level_of
from forebay.planners.activations.menu import KEEP, MOVE
from forebay.planners.bench import Bench
from forebay.planners.nearest import refused
from forebay.planners.parts import KEPT, Draft, Level, all_resident
from forebay.planners.problem import Problem
from forebay.planners.refusals import device_too_small
from forebay.planners.states.drafting import cannot_serve, expect_trace, on_host_alone
from forebay.plans import Plan
from forebay.units import format_apart

__all__ = ["swapped_blocks", "tmo", "tmo_plans"]

NAME = "tmo"


def tmo(problem: Problem, bench: Bench | None = None) -> Plan:
    """Raises ``CannotServe``: a problem is of one device."""
    raise cannot_serve(
        NAME,
        "orders the transfers of several devices over the channel that they share, and a plan is for one device; what "
        "several come to is simulated with --devices",
        "offload-all, lohan or auto",
    )


def tmo_plans(problem: Problem, devices: int, *, disjoint: bool = True, bench: Bench | None = None) -> list[Plan]:
    """A plan for each of so many devices with the budget of ``problem`` each, of which the host's is the share of one.
    Without ``disjoint`` all swap what the first does. Raises ``DoesNotFit``, and ``ConfigError`` without a batch or for
    fewer than two devices."""
    if devices < 2:
        raise ConfigError(f"the transfers of two devices or more are told apart, got {devices}")
    bench = bench or Bench(problem)
    expect_trace(bench, NAME, "what a block saves and how long it takes")
    places = range(devices) if disjoint else [0] * devices
    for count in range(1 + len(_able(bench))):
        drafts = [_draft(bench, swapped_blocks(_able(bench), count, place, devices)) for place in places]
        if all(bench.fits_device(draft) and _fits_host(bench, draft) for draft in drafts):
            why = f"{count} of {len(_able(bench))} blocks swap what they save"
            return [bench.timed(bench.plan(NAME, draft, reasons=(why,))) for draft in drafts]
    raise _too_small(bench, drafts[0])


def swapped_blocks(able: Sequence[str], count: int, place: int, devices: int) -> tuple[str, ...]:
    """``count`` of ``able``, evenly spread, those of device ``place`` of ``devices``."""
    places = ((number * devices + place) * len(able) // (count * devices) for number in range(count))
    return tuple(able[at] for at in places)


def _able(bench: Bench) -> tuple[str, ...]:
    """Blocks that save something that can move, in the order of the forward."""
    if bench.chain is None or bench.problem.trace is None:
        return ()
    able = {block for group in bench.chain.groups if group.whole(MOVE).moved for block in group.blocks}
    return tuple(dict.fromkeys(v.block for v in bench.problem.trace.visits if v.block in able))


def _draft(bench: Bench, blocks: Sequence[str]) -> Draft:
    return all_resident(bench.model, _level(bench, frozenset(blocks)))


def _level(bench: Bench, blocks: frozenset[str]) -> Level:
    """``blocks`` swap all that they save, all others keep it."""
    if bench.chain is None or bench.liveness is None or not blocks:
        return KEPT
    chosen = []
    for group in bench.chain.groups:
        chosen.append([group.whole(MOVE if block in blocks else KEEP) for block in group.blocks])
    return level_of(bench.liveness, bench.chain, chosen)


def _fits_host(bench: Bench, draft: Draft) -> bool:
    return bench.arenas(draft).host <= bench.problem.limit(Tier.HOST)


def _too_small(bench: Bench, draft: Draft) -> DoesNotFit:
    """``draft``, in which every block swaps, has no room."""
    if not bench.fits_device(draft):
        return refused(bench, device_too_small(bench, draft), draft, house=on_host_alone(NAME))
    needed, limit = bench.arenas(draft).host, bench.problem.limit(Tier.HOST)
    shown = format_apart(needed, limit)
    words = f"host memory: {shown[0]} of activations are swapped and {shown[1]} are allowed; raise host_memory"
    error = DoesNotFit(words, tier=Tier.HOST.value, needed=needed, allowed=limit)
    return refused(bench, error, draft, house=on_host_alone(NAME))
