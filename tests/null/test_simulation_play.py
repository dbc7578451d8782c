"""Programs made by hand, played against the clock: every time and every peak has a closed form."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.errors import PlanInvalid
from forebay.machine import Disk
from forebay.memory import Kind, Tier
from forebay.simulation.sharing import COPYING, LANES, Sharing
from forebay.timeline import Event, Lane
from tests.null.simulating import MACHINE, compute, fetch, flat_link, land, read, run, spans, update, write


def test_a_chain_takes_the_sum_of_its_parts() -> None:
    # read 1 s, fetch 2 s, compute 3 s, gradient 1 s, update 2 s, write 1 s
    timeline = run(read(100), fetch(200, 0), compute(0, 1), land(100, 2), update(200, 3), write(100, 4), seconds=[3.0])
    assert [(e.lane, e.start, e.end) for e in timeline.events] == [
        (Lane.DISK_READ, 0, 1),
        (Lane.STALL, 0, 3),
        (Lane.H2D, 1, 3),
        (Lane.COMPUTE, 3, 6),
        (Lane.D2H, 6, 7),
        (Lane.UPDATE, 7, 9),
        (Lane.DISK_WRITE, 9, 10),
    ]
    assert timeline.counters == {"fetches": 1, "stalls": 1}
    assert [(e.nbytes, e.what) for e in timeline.events if e.lane is Lane.H2D] == [(200, "fetch a")]


def test_lanes_without_dependencies_take_as_long_as_the_longest() -> None:
    timeline = run(compute(0), fetch(500), land(300), update(200), read(100), write(50), seconds=[4.0])
    assert max(e.end for e in timeline.events) == max(4, 5, 3, 2, 1, 0.5)
    assert all(e.start == 0 for e in timeline.events)


def test_a_lane_keeps_the_order_of_the_program() -> None:
    # The second fetch could start at once; the first waits for compute until 2.
    timeline = run(compute(0), fetch(100, 0), fetch(100), seconds=[2.0])
    assert spans(timeline, Lane.H2D) == [(2, 3), (3, 4)]


def test_prefetching_hides_all_but_the_first_fetch() -> None:
    # Blocks of 1 s of transfer and 3 s of compute, two slots: fetch i waits for compute i - 2.
    actions = [fetch(100), fetch(100), compute(0, 0), compute(0, 1), fetch(100, 2), compute(0, 4)]
    timeline = run(*actions, seconds=[3.0])
    assert spans(timeline, Lane.STALL) == [(0, 1)]
    assert timeline.step_seconds == (1 + 3 * 3,)


def test_compute_that_waits_is_a_stall() -> None:
    # Compute 1 s, fetch of 3 s that must wait for it (one slot), compute 1 s.
    timeline = run(compute(0), fetch(300, 0), compute(0, 1), seconds=[1.0])
    assert [e for e in timeline.events if e.lane is Lane.STALL] == [Event(Lane.STALL, 1, 4)]
    assert timeline.busy()[Lane.COMPUTE] + timeline.busy()[Lane.STALL] == timeline.step_seconds[0]


def test_two_directions_of_a_link_share_it() -> None:
    # Alone 4 s and 1 s. Both at 0.8: d2h ends at 1 / 0.8 = 1.25; h2d has 4 - 1 left, alone again: 4.25.
    timeline = run(fetch(400), land(100), duplex=0.8)
    assert spans(timeline, Lane.D2H) == [(0, pytest.approx(1.25))]
    assert spans(timeline, Lane.H2D) == [(0, pytest.approx(4.25))]


def test_a_link_that_is_half_duplex_gains_nothing_by_overlap() -> None:
    timeline = run(fetch(400), land(100), duplex=0.5)
    assert max(e.end for e in timeline.events) == pytest.approx(5)


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_shared_cores_conserve_work(lanes: int) -> None:
    # Everything in 1 s pieces on the same cores: whatever the order, 1 s each in all.
    actions = [compute(0), fetch(100), land(100), update(100)][: 1 + lanes]
    timeline = run(*actions, seconds=[1.0], shared_cores=1.0)
    assert max(e.end for e in timeline.events) == pytest.approx(1 + lanes)


def test_host_lanes_on_one_core_take_turns() -> None:
    # Nothing computes: three lanes of 1 s each on a single core.
    timeline = run(fetch(100), land(100), update(100), shared_cores=1.0)
    assert max(e.end for e in timeline.events) == pytest.approx(3)


def test_one_core_of_two_is_what_a_host_lane_takes_from_compute() -> None:
    # Compute loses a third beside one host lane: 2 + 1 threads on 2 cores, each gets 2/3 of one.
    timeline = run(compute(0), update(100), seconds=[3.0], shared_cores=1 / 3)
    assert spans(timeline, Lane.UPDATE) == [(0, pytest.approx(1.5))]
    assert spans(timeline, Lane.COMPUTE) == [(0, pytest.approx(1.5 + 3 - 1.5 * 2 / 3))]
    # Two host lanes have a core each while nothing computes; beside compute all have 1/2: 4 threads on 2 cores.
    sharing = Sharing(replace(MACHINE, shared_cores=1 / 3))
    compute_bit, h2d, d2h, disk = 1, 2, 4, 16
    assert sharing.shares(h2d | d2h)[1:3] == [1.0, 1.0]
    assert sharing.shares(compute_bit | h2d | d2h)[:3] == pytest.approx([1 / 2] * 3)
    assert sharing.shares(compute_bit | disk)[0] == 1  # this disk takes no core


def test_a_process_beside_the_storage_has_its_part_of_the_disk_and_copies_for_it_take_none() -> None:
    disk = Disk(1 << 40, flat_link(1), flat_link(1), duplex=0.6)
    sharing = Sharing(replace(MACHINE, shared_cores=0.0, disk=disk))
    reads, writes, beside = (1 << LANES.index(lane) for lane in (Lane.DISK_READ, Lane.DISK_WRITE, Lane.STORAGE_UPDATE))
    copied = reads << COPYING
    of_disk = [LANES.index(lane) for lane in (Lane.DISK_READ, Lane.DISK_WRITE, Lane.STORAGE_UPDATE)]
    assert [sharing.shares(beside | reads | writes)[lane] for lane in of_disk] == pytest.approx([0.4] * 3)
    assert sharing.shares(beside | reads)[of_disk[2]] == 0.6
    assert [sharing.shares(beside | copied)[lane] for lane in (of_disk[0], of_disk[2])] == [1.0, 1.0]
    # On cores that are shared a copy is one thread more.
    crowded = Sharing(replace(MACHINE, shared_cores=1.0, disk=disk)).shares(beside | copied)
    assert [crowded[lane] for lane in (of_disk[0], of_disk[2])] == [0.5, 0.5]
    whole = Sharing(replace(MACHINE, shared_cores=0.0, disk=replace(disk, duplex=1.0)))
    assert [whole.shares(beside | reads | writes)[lane] for lane in of_disk] == [1.0] * 3
    # A device inside the disk has its own bytes, and the disk its two directions.
    within = Sharing(replace(MACHINE, disk=replace(disk, update_rate=1.0))).shares(beside | reads)
    assert [within[lane] for lane in (of_disk[0], of_disk[2])] == [1.0, 1.0]


def test_a_disk_that_takes_a_part_of_a_core_takes_it_from_who_computes_and_updates() -> None:
    # Compute loses a fifth beside a busy disk: a quarter of a thread. 4 s of compute, 100 bytes to read.
    disk = replace(MACHINE.disk or Disk(1, flat_link(1), flat_link(1)), shared_cores=0.2)
    timeline = run(compute(0), read(100), seconds=[4.0], shared_cores=1.0, disk=disk)
    assert spans(timeline, Lane.DISK_READ) == [(0, pytest.approx(1.25))]
    assert spans(timeline, Lane.COMPUTE) == [(0, pytest.approx(1.25 + 4 - 1.25 * 0.8))]
    sharing = Sharing(replace(MACHINE, shared_cores=1.0, disk=disk))
    compute_bit, h2d, update_bit, reads, writes = 1, 2, 8, 16, 32
    # Two threads, and two disk lanes of a quarter each: and the disk is as fast beside two as beside one.
    crowded = sharing.shares(compute_bit | h2d | reads | writes)
    assert crowded[:2] == pytest.approx([1 / 2.5] * 2) and crowded[4:6] == pytest.approx([0.8] * 2)
    # One thread has the core but for what the disk takes; alone the disk has all that it wants.
    assert sharing.shares(update_bit | reads)[3] == pytest.approx(0.8) and sharing.shares(reads)[4] == 1
    # A device with cores of its own loses nothing to a disk.
    apart = Sharing(replace(MACHINE, disk=disk))
    assert apart.shares(compute_bit | reads)[::4][:2] == [1, 1] and apart.alone(crowds=False) & reads
    assert not sharing.alone(crowds=False) & reads
    # Nor does it run ahead where the disk itself updates, and no thread copies for a process beside it.
    within = Sharing(replace(MACHINE, shared_cores=1.0, disk=replace(disk, update_rate=1.0)))
    assert not within.alone(crowds=False) & reads


def test_updates_and_copies_share_host_memory() -> None:
    # Update and fetch want 100 bytes/s each, the memory carries 150: each gets 3/4. Both have 300 bytes.
    timeline = run(update(300), fetch(300), host_bandwidth=150.0)
    assert spans(timeline, Lane.UPDATE) == [(0, pytest.approx(4))]
    assert spans(timeline, Lane.H2D) == [(0, pytest.approx(4))]
    # Where the device is host memory too, a copied byte is read and written there: 300 are wanted.
    timeline = run(update(300), fetch(300), host_bandwidth=150.0, device_kind="cpu")
    assert spans(timeline, Lane.H2D) == [(0, pytest.approx(3 * (100 + 200) / 200))]  # 200: what the copy has alone
    # Alone neither is slowed, though the memory be said to be slower than they were measured to be.
    assert spans(run(update(300), host_bandwidth=50.0), Lane.UPDATE) == [(0, 3)]
    # Copies among themselves have been measured together: duplex.
    assert spans(run(fetch(300), land(300), host_bandwidth=150.0), Lane.H2D) == [(0, 3)]
    h2d, d2h = 2, 4
    assert Sharing(replace(MACHINE, host_bandwidth=150.0)).crowded(h2d | d2h, 100.0, 100.0, 0.0)[1:3] == [1, 1]


def test_every_transfer_pays_its_latency() -> None:
    timeline = run(fetch(100), fetch(100), h2d=flat_link(100.0, latency=0.5))
    assert spans(timeline, Lane.H2D) == [(0, 1.5), (1.5, 3)]


def test_step_seconds_are_those_of_the_step_call() -> None:
    # Each step: 2 s of compute, then an update of 3 s; the next step's compute does not wait for it.
    step = [compute(0), update(300, 0), compute(0, step=1), update(300, 2, step=1)]
    assert run(*step, seconds=[2.0]).step_seconds == (2, 2)
    # Without overlap the call waits for updates and for what they write: 2 + 3 + 1 s.
    waits = [
        compute(0),
        update(300, 0),
        write(100, 1),
        compute(0, 2, step=1),
        update(300, 3, step=1),
        write(100, 4, step=1),
    ]
    assert run(*waits, seconds=[2.0], settled=True).step_seconds == (6, 6)
    # An update on the device is part of the call either way.
    resident = [compute(0), update(300, lane=Lane.COMPUTE), compute(0, step=1), update(300, step=1, lane=Lane.COMPUTE)]
    assert run(*resident, seconds=[2.0]).step_seconds == (5, 5)


def test_a_wait_at_the_beginning_of_a_step_belongs_to_that_step() -> None:
    # Step 1 fetches what the update of step 0 has made: 1 s compute, 2 s update, 1 s fetch, 1 s compute.
    timeline = run(compute(0), update(200, 0), fetch(100, 1, step=1), compute(0, 2, step=1))
    assert timeline.step_seconds == (1, 2 + 1 + 1)
    assert spans(timeline, Lane.STALL) == [(1, 4)]


def test_the_peak_is_where_compute_needs_most() -> None:
    standing = {Tier.DEVICE: {Kind.PARAMETER: 1000}, Tier.HOST: {Kind.STATE: 70, Kind.GRADIENT: 30}}
    timeline = run(
        compute(0, peak=500, changes=[(Kind.ACTIVATION, 200)]),  # 1000 + 500
        compute(0, peak=400, changes=[(Kind.ACTIVATION, -200), (Kind.GRADIENT, 100)]),  # 1200 + 400: the peak
        land(100, 1),
        compute(0, 2, peak=450),  # 1000 + 450
        standing=standing,
    )
    device, host, disk = timeline.tiers
    assert (device.peak, device.live) == (1600, 1000)
    at_peak = {kind: n for kind, n in device.at_peak.items() if n}
    # 100 of the 400 stay as a gradient, the others are gone when the action ends.
    assert at_peak == {Kind.PARAMETER: 1000, Kind.ACTIVATION: 200, Kind.GRADIENT: 100, Kind.TEMPORARY: 300}
    assert (host.tier, host.peak, host.live, host.limit) == (Tier.HOST, 100, 100, None)
    assert (disk.tier, disk.peak) == (Tier.DISK, 0)


def test_what_replaces_freed_bytes_takes_no_more_than_the_peak() -> None:
    # 50 bytes go before 80 come: the action never needs more than 40 beside what was there.
    changes = [(Kind.ACTIVATION, -50), (Kind.GRADIENT, 80)]
    usage = run(compute(0, peak=40, changes=changes), standing={Tier.DEVICE: {Kind.ACTIVATION: 50}}).tiers[0]
    assert (usage.peak, usage.live) == (90, 80)
    assert {kind: n for kind, n in usage.at_peak.items() if n} == {Kind.ACTIVATION: 50, Kind.GRADIENT: 40}


def test_what_an_action_leaves_counts_though_its_peak_was_not_said() -> None:
    usage = run(compute(0, peak=0, changes=[(Kind.ACTIVATION, 60)])).tiers[0]
    assert (usage.peak, usage.live, usage.at_peak[Kind.ACTIVATION]) == (60, 60, 60)


@pytest.mark.parametrize(("landing", "peak"), [(100, 1000 + 100 + 100), (300, 1000 + 300 + 300 + 50)])
def test_a_gradient_counts_until_it_has_landed(landing: int, peak: int) -> None:
    # Two ops of 2 s make a gradient each. If a gradient lands in 1 s, the first is gone before the third op: the most
    # is the first beside what the second op makes. In 3 s, it is still there at 4 s, when the third op starts.
    gradient = [(Kind.GRADIENT, landing)]
    timeline = run(
        compute(0, peak=landing, changes=gradient),
        land(landing, 0),
        compute(0, peak=landing, changes=gradient),
        land(landing, 2),
        compute(0, peak=50),
        seconds=[2.0],
        standing={Tier.DEVICE: {Kind.PARAMETER: 1000}},
    )
    assert timeline.tiers[0].peak == peak
    assert timeline.tiers[0].live == 1000
    assert sum(timeline.tiers[0].at_peak.values()) == peak


def test_bytes_freed_at_an_instant_are_free_for_what_begins_then() -> None:
    # The landing ends at 1 s, exactly when the second op begins.
    timeline = run(
        compute(0, peak=100, changes=[(Kind.GRADIENT, 100)]),
        land(100, 0),
        compute(0, 1, peak=100),
        standing={Tier.DEVICE: {Kind.PARAMETER: 7}},
    )
    assert timeline.tiers[0].peak == 107


def test_actions_that_take_no_time_are_events_too() -> None:
    timeline = run(fetch(0), compute(0, 0), seconds=[0.0])
    assert [(e.lane, e.start, e.end) for e in timeline.events] == [(Lane.H2D, 0, 0), (Lane.COMPUTE, 0, 0)]
    assert timeline.step_seconds == (0,)


def test_an_action_that_waits_for_a_later_one_is_refused() -> None:
    with pytest.raises(PlanInvalid, match=r"action 0 \(fetch a\) waits for action 1, which is not before it") as caught:
        run(fetch(1, 1), compute(0))
    assert (caught.value.action, caught.value.subject) == (0, "fetch a")
    with pytest.raises(PlanInvalid, match="stall lane"):
        run(replace(fetch(1), lane=Lane.STALL))
