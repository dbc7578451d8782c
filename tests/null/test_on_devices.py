"""Policies over several devices: what stages hold, what they give up, who is refused. No torch."""

from __future__ import annotations

from functools import cache

import pytest

from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.machine import Machine
from forebay.planners import LITERATURE, SEVERAL, STATES, Bench
from forebay.planners.parallel import ON_DEVICES, ServerBench, plan_server
from forebay.planners.parallel.data_parallel import swaps
from forebay.planners.parallel.wrapped import stage_counts
from forebay.servers import Server, ServerPlan
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine

LAYERS, DEVICES, LINK = 8, 4, 1e9
ACTIVATION = 1 << 16
TRACE = chain(LAYERS, activation=ACTIVATION)
ON = machine(compute=1e9, h2d=LINK, d2h=LINK)
JOINED = Server((0, 0, 1, 1), LINK, 10 * LINK)
PIPELINES = ("dapple", "dapple-recompute", "mpress", "ppaware")


def made(
    policy: str,
    device: int = ENOUGH,
    *,
    trace: Trace = TRACE,
    on: Machine = ON,
    server: Server = JOINED,
    each: int = 2,
    host: int = ENOUGH,
) -> ServerPlan:
    return plan_server(ServerBench(Bench(asked(trace, on, device=device, host=host)), server, each), policy)


@cache
def kept() -> tuple[int, ...]:
    """Bytes on each device where every stage keeps what it saves."""
    return tuple(share.peak for share in made("dapple").devices)


# All of them.


def test_they_have_the_names_of_the_policies_for_one_device() -> None:
    assert set(ON_DEVICES) - {"dapple", "dapple-recompute"} <= {*LITERATURE, *STATES, *SEVERAL}
    with pytest.raises(ConfigError, match="policy 'rotor' is not for several devices; there are dapple"):
        made("rotor")


@pytest.mark.parametrize("policy", ON_DEVICES)
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_devices_hold_no_more_than_is_allowed_or_it_says_how_much_would_do(policy: str, share: float) -> None:
    device, found = round(share * kept()[0]), None
    try:
        plan = made(policy, device)
    except DoesNotFit as refused:
        found = refused
        plan, device = made(policy, refused.needed), refused.needed
    assert found is None or (found.tier == "device" and found.needed == device > found.allowed)
    assert plan.policy == policy and len(plan.devices) == DEVICES and plan.reasons
    assert 0 < min(share.peak for share in plan.devices) <= plan.peak <= device
    assert all(0 < share.busy <= plan.step_seconds * 1.001 for share in plan.devices) and 0 <= plan.idle_share < 1


def test_without_a_batch_it_asks_for_one() -> None:
    from tests.null.synthetic import block, problem

    with pytest.raises(ConfigError, match="give one"):
        ServerBench(Bench(problem([block("one", ((8, 8), "float32", True))], device=ENOUGH)), JOINED, 1)


@pytest.mark.parametrize("policy", sorted({*PIPELINES, "tmo"}))
def test_one_device_is_refused_with_what_would_do(policy: str) -> None:
    with pytest.raises(CannotServe, match=rf"policy {policy} .*there is one device.*--devices 2") as refused:
        made(policy, server=Server((0,), LINK, LINK))
    assert refused.value.nearest


@pytest.mark.parametrize("policy", sorted({*PIPELINES, "harmony", "mobius"}))
def test_more_stages_than_blocks_are_refused_with_what_would_do(policy: str) -> None:
    with pytest.raises(CannotServe, match=r"on each of 9 devices, and the model has 8.*--devices 8"):
        made(policy, server=Server((0,) * 9, LINK, LINK))


def test_no_links_between_devices_is_said_by_who_swaps_over_them() -> None:
    with pytest.raises(CannotServe, match=r"policy mpress swaps to other devices.*--devices 2\+2:25GB.*ppaware"):
        made("mpress", server=Server((0, 0, 1, 1), LINK))


@pytest.mark.parametrize("policy", ["harmony", "mobius", "zero-infinity"])
def test_too_small_a_host_is_refused(policy: str) -> None:
    with pytest.raises(DoesNotFit, match=r"host memory: policy .* 1000 B are allowed.*host_memory") as refused:
        made(policy, host=1000)
    assert made(policy, host=refused.value.needed).host == refused.value.needed


# Pipelines.


def test_early_stages_hold_more_micro_batches() -> None:
    """Of two stages that are alike the earlier one holds one micro-batch more: of each of its two layers three saved
    tensors and its result, and what came in."""
    first, second, third, last = kept()
    assert second - third == (2 * (3 + 1) + 1) * ACTIVATION
    assert first > second > third > last
    few = [share.peak for share in made("dapple", each=1, server=Server((0, 0), LINK)).devices]
    assert few[0] > few[1]


def test_running_again_holds_less_and_takes_longer() -> None:
    plain, again = made("dapple"), made("dapple-recompute")
    assert again.peak < plain.peak and again.step_seconds > plain.step_seconds
    # Inputs of two blocks, for each micro-batch under way, in place of all that they save.
    busy = [share.busy for share in plain.devices]
    assert all(share.busy > own for share, own in zip(again.devices, busy, strict=True))


def test_a_pipeline_that_fits_gives_up_nothing() -> None:
    plain = made("dapple")
    for policy in ("mpress", "ppaware"):
        plan = made(policy)
        assert plan.step_seconds == plain.step_seconds and plan.moved == plain.moved


def test_mpress_fills_the_room_of_late_devices_before_anything_runs_again() -> None:
    """Room for all of it on all devices together, and not on the first one. With links to the host that are slow."""
    device, on = sum(kept()) // DEVICES + 6 * ACTIVATION, machine(compute=1e9, h2d=1e5, d2h=1e5)
    assert device < kept()[0]
    plan, plain = made("mpress", device, on=on), made("dapple", on=on)
    assert plan.moved[Lane.PEER_OUT] > plain.moved[Lane.PEER_OUT] and plan.moved[Lane.D2H] == 0
    assert plan.devices[-1].peak > kept()[-1]
    assert [share.busy for share in plan.devices] == pytest.approx([share.busy for share in plain.devices])
    assert plan.step_seconds < made("dapple-recompute", device, on=on).step_seconds
    with pytest.raises(DoesNotFit):
        made("dapple", device)


def test_mpress_trains_a_deeper_model_than_a_plain_pipeline_and_faster_than_one_that_runs_again() -> None:
    """The shape of the paper's comparison, at one budget for each device."""
    device = kept()[0]

    def fits(policy: str, layers: int) -> ServerPlan | None:
        try:
            return made(policy, device, trace=chain(layers, activation=ACTIVATION))
        except DoesNotFit:
            return None

    deepest = {policy: max(n for n in range(8, 33, 4) if fits(policy, n)) for policy in ("dapple", "mpress")}
    assert deepest["dapple"] == LAYERS < deepest["mpress"]
    plan, again = (fits(policy, deepest["dapple"] + 4) for policy in ("mpress", "dapple-recompute"))
    assert plan is not None and again is not None and plan.step_seconds < again.step_seconds


def test_ppaware_offloads_what_hides_and_earlier_stages_more() -> None:
    fast = machine(compute=1e9, h2d=1e10, d2h=1e10)
    free = Server((0, 1, 2, 3), 1e10)
    plan = made("ppaware", round(0.8 * kept()[0]), on=fast, server=free)
    plain = made("dapple", on=fast, server=free)
    assert plan.moved[Lane.D2H] > plain.moved[Lane.D2H]
    assert plan.step_seconds == pytest.approx(plain.step_seconds, rel=0.02)
    assert plan.host and plan.devices[-1].peak == plain.devices[-1].peak
    slow = machine(compute=1e9, h2d=1e4, d2h=1e4)
    again = made("ppaware", round(0.8 * kept()[0]), on=slow, server=Server((0, 1, 2, 3), 1e4, LINK))
    assert again.moved[Lane.D2H] == 0 and again.step_seconds > plain.step_seconds


# Stages that are swapped.


def test_numbers_of_stages_are_multiples_of_the_devices() -> None:
    assert list(stage_counts(26, 4)) == [4, 8, 12, 16, 24] and not list(stage_counts(3, 4))


def test_mobius_is_as_fast_as_harmony_and_faster_where_neighbours_meet() -> None:
    """Parameters that take longer than what they are for, on two root complexes as fast as one link."""
    trace = chain(16, width=512)
    on = machine(compute=1e10, h2d=1e9, d2h=1e9)
    device = 2 * max(block.nbytes for block in trace.model.blocks) * 3
    apart = Server((0, 0, 1, 1), 1e9)
    seconds = {
        policy: made(policy, device, trace=trace, on=on, server=apart).step_seconds for policy in ("harmony", "mobius")
    }
    assert seconds["mobius"] < seconds["harmony"]
    assert all(made(policy, device, trace=trace, on=on).peak <= device for policy in seconds)


def test_a_pipeline_of_swapped_stages_brings_fewer_bytes_than_devices_that_swap_for_each_micro_batch() -> None:
    """Once for all micro-batches, not once for each; what stages hand on is small beside parameters here."""
    trace = chain(LAYERS, width=256)
    bench = ServerBench(Bench(asked(trace, ON, device=ENOUGH)), JOINED, 4)
    ours, theirs = (plan_server(bench, policy) for policy in ("harmony", "zero-infinity"))
    assert ours.moved[Lane.D2H] * 4 < theirs.moved[Lane.D2H]


# tmo.


def test_tmo_takes_the_faster_of_its_two_ways_which_is_no_slower_than_swapping_alike() -> None:
    on, device = machine(compute=2e8, h2d=1e8, d2h=1e8), kept()[0] * 2
    resident = max(share.peak for share in made("tmo").devices)
    bench = ServerBench(Bench(asked(TRACE, on, device=min(device, resident - 8 * ACTIVATION))), Server((0, 0), 1e8), 2)
    ways = {said: max(way[1].step_seconds) for said, way in swaps(bench).items()}
    plan = plan_server(bench, "tmo")
    assert len(ways) == 3 and plan.step_seconds == min(seconds for said, seconds in ways.items() if said)
    assert plan.step_seconds <= ways[""] * 1.001 and plan.moved[Lane.D2H] > 0
    several = ServerBench(bench.bench, Server((0, 1), 1e8), 2)
    assert len(swaps(several)) == 2  # no turns where links do not meet
