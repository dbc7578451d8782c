"""The record of a plan before it runs, its JSON and its table."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from forebay.budgets import Budget, DiskBudget
from forebay.errors import ConfigError
from forebay.memory import Kind, Tier, TierUsage
from forebay.phases import PHASES, PhasePeaks
from forebay.planning import assess
from forebay.plans import Placement, Plan, Streaming
from forebay.reporting.forecast import Alternative, PlanReport, StepForecast
from forebay.reporting.plan import plan_table
from forebay.timeline import Lane
from forebay.units import format_bytes
from tests.null.planning import ENOUGH, chain, machine

MiB = 2**20
GiB = 2**30

KEYS = {
    "fits",
    "policy",
    "step_seconds",
    "step_seconds_low",
    "step_seconds_high",
    "tokens_per_second",
    "limit_seconds",
    "binding",
    "exact",
    "peaks",
    "budgets",
    "phases",
    "accumulation",
    "solve_seconds",
    "alternatives",
    "reasons",
}

PLAN = Plan(
    planner="auto",
    budget=Budget(64 * MiB, 512 * MiB, None, DiskBudget("/scratch", GiB)),
    placements=(Placement("layers.0", Tier.HOST, Tier.HOST, Tier.DISK),),
    streaming=Streaming(slots=(8 * MiB, 8 * MiB)),
    device=60 * MiB,
    host=300 * MiB,
    disk=400 * MiB,
)

STEP = StepForecast(
    seconds=2.0,
    low=1.5,
    high=2.5,
    tokens_per_second=512.0,
    limit_seconds=1.0,
    binding=Lane.DISK_WRITE,
    limits={Lane.COMPUTE: 0.4, Lane.DISK_WRITE: 1.0},
    busy={Lane.COMPUTE: 0.5, Lane.DISK_WRITE: 1.6},
    moved={Lane.COMPUTE: 0, Lane.DISK_WRITE: 400 * 10**6},
    disk_written=400 * 10**6,
)

PHASE = PhasePeaks(device=16 * MiB, host=300 * MiB, pinned=0, disk=400 * MiB, beside=3 * MiB)

REPORT = PlanReport(
    model="llama-3.1-8b (8.0 G parameters, batch 1 of 128 tokens)",
    machine="rtx-4090",
    policy="auto",
    budgets={Tier.DEVICE: 64 * MiB, Tier.HOST: 512 * MiB, Tier.DISK: GiB},
    solve_seconds=0.25,
    plan=PLAN,
    step=STEP,
    tiers=(
        TierUsage(Tier.DEVICE, 64 * MiB, 0, 60 * MiB, {Kind.PARAMETER: 16 * MiB, Kind.ACTIVATION: 44 * MiB}),
        TierUsage(Tier.HOST, 512 * MiB, 0, 300 * MiB, {Kind.GRADIENT: 300 * MiB}),
        TierUsage(Tier.PINNED, None, 0, 0, {}),
        TierUsage(Tier.DISK, GiB, 0, 400 * MiB, {Kind.STATE: 400 * MiB}),
    ),
    phases={name: replace(PHASE, beside=0) if name in ("step", "eval") else PHASE for name in PHASES},
    alternatives=(Alternative("stream: 3.00 s a step (1.50 times as long)", 3.0, {Tier.DEVICE: 30 * MiB}),),
    reasons=("writing to disk binds: " + "the host has no room for the states of all blocks " * 3,),
    notes=("rates of rtx-4090 are from the catalogue, not measured",),
)

REFUSED = PlanReport(
    model="llama-3.1-8b",
    machine="rtx-4090",
    policy="auto",
    budgets={Tier.DEVICE: MiB, Tier.HOST: MiB},
    solve_seconds=0.1,
    alternatives=(Alternative("device_memory 21.0 GiB"),),
    reasons=("device memory: 21.0 GiB are needed and 1.0 MiB are allowed",),
)


def show(report: PlanReport, width: int = 80) -> str:
    text = io.StringIO()
    Console(file=text, width=width, no_color=True, force_terminal=False).print(plan_table(report))
    return text.getvalue()


def row(shown: str, name: str) -> str:
    return next(" ".join(line.split()) for line in shown.splitlines() if line.strip().startswith(name))


def test_json_has_exactly_the_fixed_keys() -> None:
    for report in (REPORT, REFUSED):
        found = report.to_json_dict()
        assert set(found) == KEYS
        json.dumps(found)


def test_figures() -> None:
    found = REPORT.to_json_dict()
    assert found["fits"] is True
    assert (found["step_seconds_low"], found["step_seconds"], found["step_seconds_high"]) == (1.5, 2.0, 2.5)
    assert (found["limit_seconds"], found["binding"], found["exact"]) == (1.0, "disk_write", True)
    assert found["peaks"] == {"device": 60 * MiB, "host": 300 * MiB, "pinned": 0, "disk": 400 * MiB}
    assert found["budgets"] == {"device": 64 * MiB, "host": 512 * MiB, "pinned": None, "disk": GiB}
    assert list(found["phases"]) == list(PHASES)
    assert found["phases"]["load"] == {
        "device": 16 * MiB,
        "host": 300 * MiB,
        "pinned": 0,
        "disk": 400 * MiB,
        "host_beside": 3 * MiB,
    }
    assert found["alternatives"][0]["peaks"] == {"device": 30 * MiB}
    assert STEP.limit_share == 0.5


def test_what_does_not_fit_has_no_figures_but_reasons_and_what_would() -> None:
    found = REFUSED.to_json_dict()
    assert found["fits"] is False
    nulls = KEYS - {"fits", "policy", "budgets", "solve_seconds", "alternatives", "reasons"}
    assert {key for key in KEYS if found[key] is None} == nulls
    assert found["alternatives"] == [{"change": "device_memory 21.0 GiB", "step_seconds": None, "peaks": None}]
    shown = show(REFUSED)
    assert "does not fit on rtx-4090" in shown
    assert "21.0 GiB are needed" in shown and "What would fit" in shown


def test_changed_numbers_are_said() -> None:
    changed = replace(REPORT, plan=replace(PLAN, changes_numbers=("8-bit states",)))
    assert changed.to_json_dict()["exact"] is False
    assert "not those of plain PyTorch: 8-bit states" in show(changed)
    assert "exactly those of plain PyTorch" in show(REPORT)


def test_the_table_at_80_columns() -> None:
    shown = show(REPORT)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "\x1b" not in shown
    assert row(shown, "step").startswith("step 2.00 s (1.50 s to 2.50 s)")
    assert row(shown, "physical limit") == "physical limit 1.00 s, 50 % of the step"
    assert row(shown, "binding") == "binding disk_write (80 % busy)"
    # 400 MB a step are 0.4 TB in 1,000.
    assert row(shown, "written to disk") == "written to disk 0.4 TB in 1,000 steps"
    assert row(shown, "peak") == "peak 60.0 MiB 300.0 MiB 400.0 MiB"
    assert row(shown, "budget") == "budget 64.0 MiB 512.0 MiB 1.0 GiB"
    assert row(shown, "headroom") == "headroom 4.0 MiB 212.0 MiB 624.0 MiB"
    assert row(shown, "load") == "load 16.0 MiB 300.0 MiB 400.0 MiB 3.0 MiB"
    assert row(shown, "eval") == "eval 16.0 MiB 300.0 MiB 400.0 MiB -"
    assert row(shown, "disk_write") == "disk_write 1.60 s 80 % 1.00 s 381.5 MiB 238.4 MiB/s"
    assert "- stream: 3.00 s a step" in shown


def test_a_sentence_is_not_cut() -> None:
    words = " ".join(show(REPORT, width=60).split())
    assert " ".join(REPORT.reasons[0].split()) in words


def test_a_record_that_contradicts_itself() -> None:
    with pytest.raises(ConfigError, match="not between"):
        replace(STEP, low=3.0)
    with pytest.raises(ConfigError, match="one that does not has none"):
        replace(REPORT, step=None)


def test_what_computes_moves_nothing_and_a_lane_that_is_half_idle_is_not_all() -> None:
    """Bytes that ops touch on the device are no traffic; and a lane that binds may still be idle most of the time."""
    touched = {Lane.COMPUTE: 6 * GiB, Lane.DISK_WRITE: 400 * 10**6}
    shown = show(replace(REPORT, step=replace(STEP, moved=touched, busy={Lane.COMPUTE: 0.5, Lane.DISK_WRITE: 0.8})))
    assert row(shown, "compute") == "compute 500 ms 25 % 400 ms - -"
    assert row(shown, "binding") == "binding disk_write (40 % busy); no lane is full, they take turns"


def test_words_of_the_tables_are_explained() -> None:
    assert "update: on the host; at least: at full rate" in show(REPORT)
    assert "page-locked" not in show(REPORT)
    pinned = TierUsage(Tier.PINNED, None, 0, MiB, {Kind.GRADIENT: MiB})
    assert "pinned: the page-locked part of host" in show(replace(REPORT, tiers=(*REPORT.tiers[:2], pinned)))


def test_second_copies_are_a_part_of_the_peak() -> None:
    assert "second copies" not in show(REPORT)
    shown = show(replace(REPORT, second_copies={Tier.HOST: 50 * MiB, Tier.PINNED: 0, Tier.DISK: 100 * MiB}))
    assert row(shown, "second copies") == "second copies - 50.0 MiB 100.0 MiB"
    assert row(shown, "peak") == "peak 60.0 MiB 300.0 MiB 400.0 MiB"
    assert "second copies: that part of the peak which updates under backward take" in " ".join(shown.split())
    assert all(len(line) <= 80 for line in shown.splitlines())


def test_what_a_loop_holds_by_naming_the_output_is_said_where_it_counts() -> None:
    trace = chain(3)
    peak = assess("chain", trace, machine(), Budget(ENOUGH), "stream").peak(Tier.DEVICE)

    def said(held: int) -> list[str]:
        notes = assess("chain", replace(trace, held_nbytes=held), machine(), Budget(ENOUGH), "stream").notes
        return [note for note in notes if "names a step's output" in note]

    assert said(peak // 1000) == []
    (note,) = said(peak // 10)
    assert note.startswith(format_bytes(peak // 10)) and note.endswith("forebay train lets go of it before")
