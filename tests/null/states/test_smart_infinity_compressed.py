"""``smart-infinity-compressed``: the plan of ``smart-infinity`` with the largest elements of gradients, and what it
says, gains and costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import CannotServe
from forebay.layout import has_residual, needs_master
from forebay.machine import Machine
from forebay.memory import Kind, Tier
from forebay.planners import INEXACT, PLANNERS, STATES
from forebay.plans import Plan
from forebay.simulation import forecast, simulate
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.planning import machine
from tests.null.states.test_smart_infinity import ON, TRACE, made, narrow, with_drives
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

BOTH = pytest.mark.parametrize("trace", [TRACE, narrow()], ids=["wide", "narrow"])


def compressed(trace: Trace = TRACE, on: Machine = ON, **more: object) -> Plan:
    return made("smart-infinity-compressed", trace=trace, on=on, **more)  # type: ignore[arg-type]


def test_it_is_asked_for_by_name_and_no_exact_policy() -> None:
    name = "smart-infinity-compressed"
    assert PLANNERS[name] is INEXACT[name] and not set(INEXACT) & set(STATES)


def test_it_says_what_it_changes_and_else_is_the_plan_of_the_other() -> None:
    plan, whole = compressed(), made()
    assert plan.placements == whole.placements
    assert plan.streaming == replace(whole.streaming, gradient_density=0.01)
    (words,) = plan.changes_numbers
    assert "the largest 1 % of its elements" in words and "error feedback" in words and not whole.changes_numbers
    assert any("the largest 1 % of each gradient, with their places, go there" in reason for reason in plan.reasons)
    assert Plan.from_json(plan.to_json()) == plan


@BOTH
def test_two_percent_of_the_bytes_cross(trace: Trace) -> None:
    """Of fp32: 4 bytes of a place and 4 of a value for every hundredth element; in 16 bits 4 and 2, which is 3 %."""
    plan = compressed(trace)
    parameters = [p for b in trace.model.blocks for p in b.parameters]
    read = sum(p.nbytes for p in parameters if not needs_master(p))
    crossed = forecast(trace, ON, plan).moved[Lane.DISK_WRITE] - read
    chunks = 1 + max(p.numel for p in parameters) // plan.streaming.update_chunk
    exact = sum((4 + p.nbytes // p.numel) * p.numel / 100 for p in parameters)
    assert exact <= crossed <= exact + 8 * chunks * len(parameters)


@BOTH
def test_the_host_keeps_four_bytes_an_element(trace: Trace) -> None:
    plan, whole = compressed(trace), made(trace=trace)
    elements = sum(b.trainable_numel for b in trace.model.blocks)
    cells = (plan.host - whole.host) - 4 * elements
    assert 0 <= cells <= 0.04 * plan.host
    timeline = simulate(trace, ON, plan)
    held = {usage.tier: usage for usage in timeline.tiers}[Tier.HOST]
    assert held.at_peak[Kind.STATE] == 4 * elements and held.peak == plan.host
    check(trace, ON, plan)


def test_where_the_link_is_slow_it_gains_and_where_the_host_is_it_loses() -> None:
    """Drives that compute: what crosses their link is half as much, gradients no more. What is chosen from costs the
    host; where it is slower than the link, that is more than is gained."""
    trace, link = narrow(), 1e7
    fast = replace(
        with_drives(1e9, link), h2d=machine(h2d=1e12).h2d, d2h=machine(d2h=1e12).d2h, compute={"float32": 1e15}
    )
    for on, gains in ((replace(fast, host_bandwidth=1e12), True), (replace(fast, host_bandwidth=1e8), False)):
        whole, part = (
            simulate(trace, on, plan).step_seconds[-1] for plan in (made(trace=trace, on=on), compressed(trace, on))
        )
        assert (part < whole) == gains
        found = forecast(trace, on, compressed(trace, on))
        assert found.limits[Lane.DISK_WRITE] <= found.busy[Lane.DISK_WRITE] * (1 + 1e-9)


def test_what_is_refused_names_the_policy() -> None:
    for how, words in (({"disk": 0}, "no disk is allowed"), ({"states": ()}, "this optimizer keeps none")):
        with pytest.raises(CannotServe, match=f"policy smart-infinity-compressed .*{words}"):
            compressed(**how)
    with pytest.raises(CannotServe, match=r"policy smart-infinity-compressed .* uses them up on the host"):
        compressed(update="backward")


def test_parameters_of_more_bits_have_no_place_for_what_is_not_sent() -> None:
    blocks = [block(f"layers.{i}", ((64, 64), "float64", True)) for i in range(3)]
    wide = chain_trace(blocks, [Layer(b.name, saved=(8192,), out=8192) for b in blocks], input_nbytes=8192)
    assert not any(has_residual(p) for b in blocks for p in b.parameters)
    with pytest.raises(CannotServe, match=r"and layers.0.0 is trained in more bits.*What would fit: policy smart-inf"):
        compressed(wide)
