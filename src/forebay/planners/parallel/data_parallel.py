"""Devices that all train the whole model, each on micro-batches of its own: ``tmo``, and ``zero-infinity`` beside which
pipelines are set.

``zero-infinity`` (Rajbhandari et al., SC 2021), with its tier on the host: every device brings every layer twice for
each of its micro-batches and takes its gradients back (``simulation.swapping.alike``). Each brings whole layers over
its own link; the paper's devices bring a part of each and exchange those, which moves fewer bytes over links to the
host and as many between devices as ours moves in all.

``tmo`` (Lin et al., HPCA 2023) is described in ``states.tmo``, which makes the plans; here both of its mechanisms are
played, and the faster one is taken. The exchange of gradients is not priced in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.planners.parallel.bench import ServerBench
from forebay.planners.states.tmo import tmo_plans
from forebay.plans import Plan
from forebay.servers import DeviceShare, ServerPlan
from forebay.simulation.several import SeveralForecast, side_by_side
from forebay.simulation.swapping import STEPS, alike
from forebay.units import format_seconds

__all__ = ["Swaps", "swaps", "tmo", "zero_infinity"]

Swaps = tuple[list[Plan], SeveralForecast]
"""Plans of all devices, and what steps of them come to."""

DISJOINT: Final = "devices swap what others do not"
TURNS: Final = "devices swap the same and take turns"


def zero_infinity(bench: ServerBench) -> ServerPlan:
    """Raises ``DoesNotFit``."""
    policy, layers, count = "zero-infinity", bench.layers, bench.micro_batches
    largest = 2 * max(layer.parameters for layer in layers) + max(layer.gradients for layer in layers)
    inputs = sum(layer.handed for layer in layers[:-1])
    before = (None, *layers)
    passes = [bench.saved(layer, other) + bench.passing(layer) for other, layer in zip(before, layers, strict=False)]
    need = bench.beside + largest + inputs + max(passes)
    if need > bench.limit:
        raise bench.refusal(policy, Tier.DEVICE, need, bench.limit, "for two layers, and inputs of all of them")
    # Each device's gradients have a place, from which the update takes their sum.
    gradients = sum(layer.gradients for layer in layers) * (bench.server.devices - 1)
    host = bench.host_states() + gradients
    bench.expect_host(policy, host)
    played = alike(layers, bench.costs, bench.server, count)
    seconds = bench.each * sum(layer.forward + layer.backward for layer in layers)
    shares = (DeviceShare(len(layers), seconds, need),) * bench.server.devices
    said = f"every device brings {len(layers)} blocks twice for each of its {bench.each} micro-batches"
    return ServerPlan(policy, max(played.step_seconds), shares, host, played.moved_a_step, (said,))


def tmo(bench: ServerBench) -> ServerPlan:
    """Raises ``DoesNotFit``, and ``CannotServe`` for one device."""
    bench.expect_several("tmo", "orders the transfers of several devices", "offload-all, lohan or auto")
    try:
        ways = swaps(bench)
    except DoesNotFit as error:
        raise _of_all(bench, error) from None
    said, (plans, played) = min(
        ((said, way) for said, way in ways.items() if said), key=lambda pair: max(pair[1][1].step_seconds)
    )
    costs = bench.costs
    seconds = bench.each * costs.ops(0, sum(len(costs.trace.segments[v.segment].ops) for v in costs.trace.visits))
    shares = tuple(DeviceShare(len(bench.layers), seconds, plan.device) for plan in plans)
    others = format_seconds(max(ways[""][1].step_seconds))
    reasons: tuple[str, ...] = (said, f"devices that swap the same at the same time take {others}")
    if not any(plan.activations for plan in plans):
        reasons = ("nothing is swapped: every device has room for all",)
    host = sum(plan.host for plan in plans)
    return ServerPlan("tmo", max(played.step_seconds), shares, host, played.moved_a_step, reasons)


def _of_all(bench: ServerBench, error: DoesNotFit) -> DoesNotFit:
    """``error``, which speaks of one device and its part of the host, for all of them."""
    tier, count = Tier(error.tier), bench.server.devices
    instead = "policy zero-infinity, of which the devices keep nothing, or dapple-recompute, of which each has a part"
    if tier is Tier.DEVICE:
        where = "on each device for all of the model beside what cannot be swapped"
        return bench.refusal("tmo", tier, error.needed, error.allowed, where, instead)
    where = f"for the activations that {count} devices swap"
    return bench.refusal("tmo", tier, count * error.needed, bench.bench.problem.limit(tier), where, instead)


def swaps(bench: ServerBench) -> dict[str, Swaps]:
    """The ways in which devices can swap, by what is said of each; "": all the same at the same time, as where nobody
    knows of the others. Raises ``DoesNotFit``, and ``ConfigError`` for one device."""
    problem, server = bench.bench.problem, bench.server
    share = replace(
        problem,
        host_limit=problem.host_limit // server.devices,
        budget=replace(problem.budget, host=problem.limit(Tier.HOST) // server.devices),
    )
    own = bench.bench.with_limits(share)
    apart = tmo_plans(share, server.devices, bench=own)
    same = tmo_plans(share, server.devices, disjoint=False, bench=own)

    def played(plans: Sequence[Plan], *, in_turns: bool) -> SeveralForecast:
        return side_by_side(
            plans,
            bench.costs,
            STEPS,
            channel=server.channel,
            in_turns=in_turns,
            roots=server.roots,
            micro_batches=bench.each,
        )

    ways = {"": (same, played(same, in_turns=False)), DISJOINT: (apart, played(apart, in_turns=False))}
    if len(set(server.roots)) == 1:
        ways[TURNS] = same, played(same, in_turns=True)
    return ways
