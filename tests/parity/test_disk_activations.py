"""Activations that wait for backward on disk: the numbers stay those of plain PyTorch, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import forebay
from forebay.arenas import DISK_BLOCK, DISK_BOUNCE
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.layout import MOVED_LEAST, PAGE
from forebay.memory import Kind, Tier
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.timeline import Lane
from forebay.treatments import Fate
from tests.parity.compare import assert_same_training
from tests.parity.offloading import (
    SPLITS,
    SUBJECTS,
    Named,
    disk_formula,
    in_parts,
    movable,
    moving,
    selections,
    trace_of,
    with_disk,
)
from tests.parity.recomputing import AMPLE, plan_of, recomputable
from tests.parity.test_offload import counters, moved
from tests.parity.test_recompute import losses_and_gradients
from tests.parity.treated import SUBJECTS as RECOMPUTED
from tests.parity.treated import eligible, treated

SETTINGS = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
VERBS = ("offload", "write", "read", "reload")


def disk_plan(
    name: str, folder: Path, fates: dict[Named, Fate], *, resident: bool = True, ring: int = 0, window: int = 20_000
) -> Plan:
    """The ops in ``fates`` go where that says; the ring holds the largest and ``ring`` bytes more."""
    plan = plan_of(find_blocks(SUBJECTS[name].model(torch.float32)).model, (), resident=resident, slots=2)
    on_host = [one for one, fate in fates.items() if fate is Fate.OFFLOAD]
    plan = moving(plan, on_host, offload_window=window, reload_window=window)
    sizes = [n for one, fate in fates.items() if fate is Fate.DISK for n in one.nbytes]
    return replace(with_disk(plan, folder, sizes, ring=ring), activations=selections(fates, fates))


def every(name: str, *fates: Fate) -> dict[Named, Fate]:
    named = movable(trace_of(SUBJECTS[name], torch.float32))
    return {one: fates[i % len(fates)] for i, one in enumerate(named)}


@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_same_numbers_with_all_that_may_be_moved_on_disk(name: str, resident: bool, tmp_path: Path) -> None:
    """Each storage goes there and comes back once, and every tier takes what the formulas say."""
    fates = every(name, Fate.DISK)
    plan = disk_plan(name, tmp_path, fates, resident=resident, ring=8 * PAGE)
    model = assert_same_training(
        SUBJECTS[name], torch.float32, steps=1, plan=plan, device_memory=AMPLE, disk=str(tmp_path), device="cpu"
    )
    assert counters(model) == 0
    passes = 2
    expected = sorted(n for one in fates for n in one.nbytes) * passes
    pages = sorted(-(-n // PAGE) * PAGE for n in expected)
    for verb in VERBS:
        assert sorted(n for _, n in moved(model, verb)) == (pages if verb in ("write", "read") else sorted(expected))
    assert len({tuple(sorted(what for what, _ in moved(model, verb))) for verb in VERBS}) == 1
    tiers = {t.tier: t for t in forebay.report(model).timeline.tiers}
    assert tiers[Tier.DISK].at_peak[Kind.ACTIVATION] == disk_formula(n for one in fates for n in one.nbytes)
    assert tiers[Tier.HOST].at_peak[Kind.ACTIVATION] == 0
    assert plan.streaming.disk_window + DISK_BLOCK * DISK_BOUNCE <= tiers[Tier.HOST].at_peak[Kind.STAGING]
    assert tiers[Tier.HOST].peak == plan.host
    assert tiers[Tier.DISK].peak == plan.disk
    forebay.close(model)
    assert not list(tmp_path.iterdir())


def assert_nothing_changes(name: str, plan: Plan, device: CpuDevice, folder: Path, *, steps: int) -> None:
    """Training under ``plan`` is plain PyTorch's to the bit, and everything that was to leave has left. Closes
    ``device``."""
    try:
        model = assert_same_training(
            SUBJECTS[name],
            torch.float32,
            steps=steps,
            plan=plan,
            device_memory=AMPLE,
            disk=str(folder),
            device=device,
        )
        assert counters(model) == 0
        forebay.close(model)
    finally:
        device.close()


@given(
    data=st.data(),
    name=st.sampled_from(["llama-tied", "vit", "convnet", "used-twice"]),
    ring=st.sampled_from([0, PAGE, 5 * PAGE]),
    seed=st.integers(0, 9),
    resident=st.booleans(),
)
@SETTINGS
def test_any_ops_anywhere_with_late_jobs(
    data: st.DataObject, name: str, ring: int, seed: int, resident: bool, tmp_path: Path
) -> None:
    """Two steps of two micro-batches, with a ring that goes round many times."""
    named = movable(trace_of(SUBJECTS[name], torch.float32))
    chosen = {one: data.draw(st.sampled_from([Fate.OFFLOAD, Fate.DISK, None])) for one in named}
    fates = {one: fate for one, fate in chosen.items() if fate is not None}
    plan = disk_plan(name, tmp_path, fates, resident=resident, ring=ring)
    plan = in_parts(plan, lambda: data.draw(SPLITS))
    late = (Lane.D2H, Lane.H2D, Lane.DISK_READ, Lane.DISK_WRITE)
    device = CpuDevice(AMPLE, delays=RandomDelays(seed, max_seconds=0.002, lanes=late))
    assert_nothing_changes(name, plan, device, tmp_path, steps=2)


@given(
    data=st.data(),
    name=st.sampled_from(["gpt2-dropout", "llama", "convnet"]),
    ring=st.sampled_from([0, 3 * PAGE]),
    seed=st.integers(0, 9),
)
@SETTINGS
def test_any_ops_of_recomputed_blocks(data: st.DataObject, name: str, ring: int, seed: int, tmp_path: Path) -> None:
    """Masks of dropout included, which depend on all draws before them."""
    case = RECOMPUTED[name]
    trace = trace_of(case, torch.float32)
    ops = data.draw(st.lists(st.sampled_from(eligible(trace)), unique=True, min_size=4))
    fates = {one: data.draw(st.sampled_from(Fate)) for one in ops}
    plan = plan_of(trace.model, recomputable(trace.model), resident=data.draw(st.booleans()), slots=2)
    plan = treated(plan, fates, window=20_000)
    sizes = [n for one, fate in fates.items() if fate is Fate.DISK for n in one.nbytes if n >= MOVED_LEAST]
    plan = with_disk(plan, tmp_path, sizes, ring=ring)
    plan = in_parts(plan, lambda: data.draw(SPLITS))
    expected = losses_and_gradients(case, torch.float32, None, steps=2)
    device = CpuDevice(AMPLE, delays=RandomDelays(seed, max_seconds=0.002))
    try:
        actual = losses_and_gradients(case, torch.float32, plan, steps=2, disk=str(tmp_path), device=device)
    finally:
        device.close()
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("lane", [Lane.D2H, Lane.H2D, Lane.DISK_READ, Lane.DISK_WRITE])
def test_one_late_lane_changes_nothing(lane: Lane, tmp_path: Path) -> None:
    fates = every("llama", Fate.DISK, Fate.DISK, Fate.OFFLOAD)
    plan = disk_plan("llama", tmp_path, fates, ring=3 * PAGE, window=2**20)
    device = CpuDevice(AMPLE, delays=RandomDelays(seed=3, max_seconds=0.002, lanes=(lane,)))
    assert_nothing_changes("llama", plan, device, tmp_path, steps=1)


@pytest.mark.parametrize("short", ["file", "ring"])
def test_what_has_no_room_stays_on_the_device(short: str, tmp_path: Path) -> None:
    fates = every("llama", Fate.DISK)
    sizes = [n for one in fates for n in one.nbytes]
    plan = disk_plan("llama", tmp_path, fates)
    smaller = {"disk_activations": plan.streaming.disk_activations - PAGE} if short == "file" else {"disk_window": PAGE}
    plan = replace(plan, streaming=replace(plan.streaming, **smaller))
    model = assert_same_training(
        SUBJECTS["llama"], torch.float32, steps=1, plan=plan, device_memory=AMPLE, disk=str(tmp_path), device="cpu"
    )
    passes = 2
    expected = 1 if short == "file" else sum(n > PAGE for n in sizes)
    assert counters(model) == passes * expected
    assert len(moved(model, "write")) == passes * (len(sizes) - expected)
    forebay.close(model)
