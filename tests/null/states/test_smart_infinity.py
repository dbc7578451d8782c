"""``smart-infinity``: states on disk that are updated there; what a storage that computes gains, and who is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.layout import needs_master
from forebay.machine import Machine
from forebay.memory import Tier
from forebay.planners import make_plan
from forebay.plans import Plan, Update, UpdateTime
from forebay.simulation import forecast, simulate
from forebay.timeline import Lane
from forebay.trace import Trace
from tests.null.planning import ENOUGH, asked, chain, machine
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace
from tests.null.updating import at_home

LAYERS = 8
TRACE = chain(LAYERS, width=256)
ON = machine(disk=1e8)


def narrow() -> Trace:
    """16-bit layers, whose fp32 masters are states."""
    blocks = [block(f"layers.{i}", *[((256, 256), "bfloat16", True)] * 3) for i in range(LAYERS)]
    return chain_trace(blocks, [Layer(b.name, saved=(8192,) * 3, out=8192) for b in blocks], input_nbytes=8192)


def made(
    policy: str = "smart-infinity",
    *,
    trace: Trace = TRACE,
    on: Machine = ON,
    device: int = ENOUGH,
    host: int = ENOUGH,
    disk: int = ENOUGH,
    states: tuple[str, ...] = ("exp_avg", "exp_avg_sq"),
    update: UpdateTime = "step",
) -> Plan:
    wanted = asked(replace(trace, state_names=states), on, device=device, host=host, disk=disk, states=states)
    return make_plan(replace(wanted, update=update), policy)


def with_drives(rate: float, link: float = 1e8) -> Machine:
    """A machine whose drives update ``rate`` bytes/s themselves."""
    plain = machine(disk=link)
    assert plain.disk is not None
    return replace(plain, disk=replace(plain.disk, update_rate=rate))


def test_all_states_are_on_disk_and_updated_there() -> None:
    plan = made()
    assert {p.states for p in plan.placements} == {Tier.DISK} and {p.parameters for p in plan.placements} == {Tier.HOST}
    assert plan.updated(Update.STORAGE) == tuple(b.name for b in TRACE.model.blocks)
    assert not plan.streaming.overlap_update and not plan.updated(Update.AHEAD) and not plan.changes_numbers
    assert any("updated there, by a process of its own" in reason for reason in plan.reasons)
    assert not any("no room for all" in reason for reason in plan.reasons)


def test_updates_are_over_before_the_next_forward() -> None:
    events = simulate(TRACE, ON, made()).events
    updates, compute = ([e for e in events if e.lane is lane] for lane in (Lane.STORAGE_UPDATE, Lane.COMPUTE))
    assert updates and not any(u.start < c.end and c.start < u.end for u in updates for c in compute)


@pytest.mark.parametrize("trace", [TRACE, narrow()], ids=["wide", "narrow"])
def test_what_crosses_are_gradients_and_parameters(trace: Trace) -> None:
    """2M there and 2M back of a model of 2M bytes in 16 bits, where states would be 12 bytes a parameter either way."""
    plan = made(trace=trace)
    moved = forecast(trace, ON, plan).moved
    parameters = [p for b in trace.model.blocks for p in b.parameters]
    nbytes, read = sum(p.nbytes for p in parameters), sum(p.nbytes for p in parameters if not needs_master(p))
    assert (moved[Lane.DISK_WRITE], moved[Lane.DISK_READ]) == (nbytes + read, nbytes)


@pytest.mark.parametrize("trace", [TRACE, narrow()], ids=["wide", "narrow"])
def test_what_wears_the_disk_are_the_states(trace: Trace) -> None:
    """Wherever they are updated: the process writes them as the host would."""
    kept = sum(
        3 * 4 * p.numel if needs_master(p) else 2 * 4 * p.numel for b in trace.model.blocks for p in b.parameters
    )
    assert forecast(trace, ON, made(trace=trace)).disk_written == kept


def test_drives_that_compute_take_the_states_off_the_link() -> None:
    """An update is bound by the link of the disk, over which 12 bytes a parameter come and go; with the
    update in the drives it is 2 and 2. The same rate inside as outside: so many times as fast at most, and nearly."""
    trace, link = narrow(), 1e7
    slow = replace(
        with_drives(1e9, link), h2d=machine(h2d=1e12).h2d, d2h=machine(d2h=1e12).d2h, compute={"float32": 1e15}
    )
    home = made("stream", trace=trace, on=slow)
    placed = tuple(replace(p, states=Tier.DISK, update=Update.STEP) for p in home.placements)
    on_disk = made(trace=trace, on=slow)
    sizes = made("zero-infinity", trace=trace, on=slow)
    there = replace(on_disk, placements=placed, host=max(on_disk.host, sizes.host) + (1 << 26))
    usual, near = (simulate(trace, slow, plan).step_seconds[-1] for plan in (there, on_disk))
    assert 4 < usual / near <= 6


def test_the_slower_the_drives_compute_the_later() -> None:
    trace = narrow()
    seconds = [
        simulate(trace, on, made(trace=trace, on=on)).step_seconds[-1] for on in map(with_drives, (1e7, 1e8, 1e9))
    ]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 2 * seconds[1]


def test_a_process_of_the_host_gains_nothing_over_the_host() -> None:
    """It reads, updates and writes one after the other, where the host does all three at a time."""
    trace = narrow()
    on_disk = made(trace=trace)
    host = at_home(on_disk, host=on_disk.host + (1 << 26))
    usual, beside = (simulate(trace, ON, plan).step_seconds[-1] for plan in (host, on_disk))
    assert usual < beside < 3 * usual


def test_parameters_follow_where_the_host_is_too_small() -> None:
    free = made()
    plan = made(host=free.host * 6 // 10)
    on_disk = [p for p in plan.placements if p.parameters is Tier.DISK]
    assert on_disk and plan.host < free.host and plan.updated(Update.STORAGE) == free.updated(Update.STORAGE)
    check(replace(TRACE, state_names=("exp_avg", "exp_avg_sq")), ON, plan)


def test_no_disk_says_what_would_do() -> None:
    with pytest.raises(CannotServe, match=r"where they are stored, on disk, and no disk is allowed") as refused:
        made(disk=0)
    disk, policy = refused.value.nearest
    assert disk.what == "disk" and "a disk of" in disk.words and policy.words == "policy zero-offload or auto"
    assert made(disk=disk.needed).disk == disk.needed


def test_too_small_a_disk_names_no_optimizer_that_would_be_refused() -> None:
    """Without states there is nothing to update where it is stored."""
    enough = made().disk
    with pytest.raises(DoesNotFit, match=r"^disk: ") as refused:
        made(disk=enough - 1)
    named = [remedy.optimizer for remedy in refused.value.nearest if remedy.optimizer]
    assert named == ["adamw-8bit", "sgd with momentum"]
    assert made(disk=enough - 1, states=("momentum_buffer",)).disk < enough
    with pytest.raises(CannotServe, match="this optimizer keeps none"):
        made(disk=enough - 1, states=())


def test_too_small_a_device_without_a_disk_says_both() -> None:
    """With either of them alone the other would be missing."""
    with pytest.raises(DoesNotFit, match=r"^device memory: .* and at once a disk of") as refused:
        made(device=1, disk=0)
    device = refused.value.nearest[0]
    (disk,) = device.at_once
    assert (device.what, disk.what) == ("device", "disk")
    for alone in ((device.needed, 0), (1, disk.needed)):
        with pytest.raises(DoesNotFit):
            made(device=alone[0], disk=alone[1])
    plan = made(device=device.needed, disk=disk.needed)
    assert (plan.device, plan.disk) == (device.needed, disk.needed)


def test_too_small_a_host_is_asked_for_with_the_disk() -> None:
    with pytest.raises(DoesNotFit) as refused:
        made(device=1, host=1, disk=0)
    device = refused.value.nearest[0]
    asked = {remedy.what: remedy.needed for remedy in (device, *device.at_once)}
    assert set(asked) == {"device", "host", "disk"}
    assert made(**asked).host == asked["host"]


def test_too_small_a_disk_says_by_how_much() -> None:
    enough = made().disk
    with pytest.raises(DoesNotFit, match=r"disk: .* are needed") as refused:
        made(disk=enough - 1)
    assert refused.value.needed == enough


def test_a_smaller_optimizer_is_named_with_what_it_takes_on_disk() -> None:
    """Its states are there too."""
    with pytest.raises(DoesNotFit) as refused:
        made(disk=made().disk - 1)
    smaller = next(r for r in refused.value.nearest if r.optimizer == "sgd with momentum")
    assert 0 < smaller.needed < made().disk
    assert made(disk=smaller.needed, states=("momentum_buffer",)).disk == smaller.needed


def test_gradients_that_are_used_up_on_the_host_do_not_go_to_the_storage() -> None:
    with pytest.raises(CannotServe, match="uses them up on the host"):
        made(update="backward")


def test_an_optimizer_without_states_has_nothing_to_store() -> None:
    with pytest.raises(CannotServe, match="this optimizer keeps none"):
        made(states=())


@pytest.mark.parametrize("rate", [0.0, -1.0])
def test_a_rate_is_above_nothing(rate: float) -> None:
    with pytest.raises(ConfigError, match="update_rate of a disk must be more than 0"):
        with_drives(rate)


@pytest.mark.parametrize(("rate", "update"), [(1e6, 1e10), (1e9, 1e7)])
def test_auto_is_never_behind_where_drives_compute(rate: float, update: float) -> None:
    on, trace = replace(with_drives(rate), update_rate=update), narrow()
    wanted = asked(trace, on, device=made("l2l", trace=trace, on=on).device, disk=ENOUGH)
    found, theirs = make_plan(wanted, "auto"), make_plan(wanted, "smart-infinity")
    assert found.step_seconds is not None and theirs.step_seconds is not None
    assert found.step_seconds <= 1.01 * theirs.step_seconds
    assert bool(found.updated(Update.STORAGE)) == (rate > update)


@pytest.mark.parametrize("on", [ON, with_drives(1e8)], ids=["process", "drives"])
def test_no_lane_is_faster_than_its_limit(on: Machine) -> None:
    """What goes to a process on the host crosses no link of the disk; what goes to drives does."""
    found = forecast(TRACE, on, made(on=on))
    assert all(found.limits[lane] <= found.busy[lane] * (1 + 1e-9) for lane in (Lane.DISK_READ, Lane.DISK_WRITE))
    crossed = found.moved[Lane.DISK_WRITE] / 1e8
    assert found.limits[Lane.DISK_WRITE] == pytest.approx(crossed if on is not ON else 2 * crossed * 1e8 / 1e10)
