"""The record of a run and its closing table."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from types import MappingProxyType

import pytest
from rich.console import Console

from forebay.budgets import Budget, DiskBudget
from forebay.errors import ConfigError
from forebay.memory import ArenaUsage, Kind, Tier, TierUsage
from forebay.plans import Accumulation, Placement, Plan, Streaming
from forebay.reporting.run import RunReport
from forebay.reporting.table import closing_table
from forebay.timeline import Event, Lane, Timeline

MiB = 2**20

PLAN = Plan(
    planner="auto",
    budget=Budget(64 * MiB, 512 * MiB, None, DiskBudget("/scratch", 2**30)),
    placements=(Placement("layers.0", Tier.HOST, Tier.HOST, Tier.DISK),),
    streaming=Streaming(slots=(8 * MiB, 8 * MiB)),
    device=60 * MiB,
    host=300 * MiB,
    disk=400 * MiB,
    pinned=8 * MiB,
    step_seconds=1.6,
    micro_batch_seconds=1.2,
    notes=("predicted seconds follow from the measured rates of a machine with a name that is rather long, 2 cores",),
    reasons=("of 10 blocks 2 stay on the device and 8 stream, because " + "their states need more room " * 4,),
)

EVENTS = (
    Event(Lane.COMPUTE, 0.0, 4.0),
    Event(Lane.H2D, 1.0, 2.0, nbytes=3 * MiB),
    Event(Lane.H2D, 1.5, 3.0, nbytes=3 * MiB),  # overlaps: busy for 2 seconds in all
    Event(Lane.DISK_READ, 0.0, 0.5, nbytes=MiB),
)

TIERS = (
    TierUsage(
        Tier.DEVICE,
        64 * MiB,
        0,
        48 * MiB,
        MappingProxyType({Kind.PARAMETER: 16 * MiB, Kind.ACTIVATION: 32 * MiB, Kind.STATE: 0}),
    ),
    TierUsage(Tier.HOST, 512 * MiB, 0, 200 * MiB, MappingProxyType({Kind.STATE: 200 * MiB})),
    TierUsage(Tier.PINNED, None, 0, 10 * MiB, MappingProxyType({Kind.STAGING: 10 * MiB})),
    TierUsage(Tier.DISK, 2**30, 0, 390 * MiB, MappingProxyType({Kind.STATE: 390 * MiB})),
)

REPORT = RunReport(PLAN, Timeline(EVENTS, TIERS, (4.0, 1.0, 2.0), {"deviations": 0}), elapsed=8.0, steps=3, tokens=1200)


def show(report: RunReport, losses: tuple[float, ...] = ()) -> str:
    text = io.StringIO()
    Console(file=text, width=80, no_color=True, force_terminal=False).print(closing_table(report, losses))
    return text.getvalue()


def row(shown: str, name: str) -> str:
    return next(" ".join(line.split()) for line in shown.splitlines() if line.strip().startswith(name))


def test_figures() -> None:
    assert REPORT.tokens_per_second == 150.0
    assert REPORT.step_seconds == 2.0  # the median, not the mean that the first step spoils
    shares = REPORT.busy_shares()
    assert (shares[Lane.COMPUTE], shares[Lane.H2D], shares[Lane.D2H]) == (0.5, 0.25, 0.0)


def test_before_the_first_step_there_are_no_figures() -> None:
    report = RunReport(PLAN, Timeline((), ()), elapsed=0.0, steps=0)
    assert report.tokens_per_second is None
    assert report.step_seconds is None
    assert set(report.busy_shares().values()) == {0.0}
    assert report.measured_peaks() == dict.fromkeys(Tier, 0)
    assert "0 steps" in show(report)


def test_json_dict_has_the_fixed_keys() -> None:
    assert json.loads(json.dumps(REPORT.to_json_dict())) == {
        "steps": 3,
        "tokens_per_second": 150.0,
        "predicted": {
            "step_seconds": 1.6,
            "peaks": {"device": 60 * MiB, "host": 300 * MiB, "pinned": 8 * MiB, "disk": 400 * MiB},
        },
        "measured": {
            "step_seconds": 2.0,
            "peaks": {"device": 48 * MiB, "host": 200 * MiB, "pinned": 10 * MiB, "disk": 390 * MiB},
            "reserved": {"device": 48 * MiB, "host": 200 * MiB, "pinned": 10 * MiB, "disk": 390 * MiB},
            "in_use": {"device": 48 * MiB, "host": 200 * MiB, "pinned": 10 * MiB, "disk": 390 * MiB},
        },
    }


def test_the_record_comes_back_from_json() -> None:
    assert RunReport.from_json(REPORT.to_json()) == REPORT


@pytest.mark.parametrize("wrong", [{"elapsed": -1.0}, {"steps": -1}, {"micro_batches": 0}, {"schema": 2}])
def test_a_wrong_record_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RunReport(PLAN, REPORT.timeline, **({"elapsed": 1.0, "steps": 1} | wrong))  # type: ignore[arg-type]


def test_table_fits_80_columns_without_colour() -> None:
    shown = show(REPORT, (5.5, 2.25))
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "\x1b" not in shown
    assert "\u2026" not in shown  # nothing was cut off


def test_table_says_bytes_per_tier_and_kind() -> None:
    shown = show(REPORT)
    assert row(shown, "kind") == "kind device host pinned disk"
    assert row(shown, "parameter") == "parameter 16.0 MiB - - -"
    assert row(shown, "state") == "state - 200.0 MiB - 390.0 MiB"
    assert row(shown, "peak") == "peak 48.0 MiB 200.0 MiB 10.0 MiB 390.0 MiB"


def test_errors_are_measured_over_predicted() -> None:
    assert REPORT.step_ratio == 2.0 / 1.6
    assert REPORT.peak_ratios() == {
        Tier.DEVICE: 48 / 60,
        Tier.HOST: 200 / 300,
        Tier.PINNED: 10 / 8,
        Tier.DISK: 390 / 400,
    }
    # Nothing was predicted: there is nothing to be wrong about.
    silent = replace(REPORT, plan=replace(PLAN, step_seconds=None, disk=0))
    assert silent.step_ratio is None
    assert silent.peak_ratios()[Tier.DISK] is None
    assert replace(REPORT, timeline=Timeline((), ()), elapsed=0.0, steps=0).step_ratio is None


def test_the_predicted_step_is_scaled_to_the_micro_batches_of_a_step() -> None:
    four = replace(REPORT, micro_batches=4)
    assert four.predicted_step_seconds == pytest.approx(1.6 + 3 * 1.2)
    assert four.to_json_dict()["predicted"]["step_seconds"] == four.predicted_step_seconds
    assert "- a step is 4 micro-batches" in show(four)
    unknown = replace(four, plan=replace(PLAN, micro_batch_seconds=None))
    assert unknown.predicted_step_seconds is None
    assert row(show(unknown), "step") == "step - 2.00 s -"


def test_micro_batches_that_pass_together_are_predicted_together() -> None:
    needs = Accumulation(10, 5, 20, 1, 30, 2, micro_batches=4, step_seconds=2.5, pinned=7, pinned_further=3)
    four = replace(REPORT, plan=replace(PLAN, accumulation=needs), micro_batches=4, together=4)
    assert four.predicted_step_seconds == 2.5
    assert four.predicted_peaks() == {Tier.DEVICE: 25, Tier.HOST: 23, Tier.PINNED: 16, Tier.DISK: 36}
    assert "- a step is 4 micro-batches, 4 of which pass the model together" in show(four)
    assert replace(four, together=1).predicted_step_seconds == pytest.approx(1.6 + 3 * 1.2)
    assert replace(four, together=1).predicted_peaks()[Tier.DEVICE] == PLAN.device
    # Nobody has simulated a step of two times two.
    assert replace(four, together=2).predicted_step_seconds is None
    assert RunReport.from_json(four.to_json()).together == 4
    for wrong in (0, 5):
        with pytest.raises(ConfigError, match="at most all of them at a time"):
            replace(four, together=wrong)


def test_table_sets_predicted_beside_measured() -> None:
    shown = show(REPORT)
    assert row(shown, "what") == "what allowed predicted measured difference"
    assert row(shown, "device") == "device 64.0 MiB 60.0 MiB 48.0 MiB -20 %"
    assert row(shown, "host") == "host 512.0 MiB 300.0 MiB 200.0 MiB -33 %"
    assert row(shown, "pinned") == "pinned no limit 8.0 MiB 10.0 MiB +25 %"
    assert row(shown, "disk") == "disk 1.0 GiB 400.0 MiB 390.0 MiB -2.5 %"
    assert row(shown, "step") == "step 1.60 s 2.00 s +25 %"
    assert "- predicted seconds follow from the measured rates" in shown


def test_a_difference_that_is_none_has_no_sign() -> None:
    for seconds, said in ((2.0, "0.0 %"), (2.0002, "0.0 %"), (1.9, "+5.3 %")):
        assert row(show(replace(REPORT, plan=replace(PLAN, step_seconds=seconds))), "step").endswith(f"2.00 s {said}")


def test_a_step_that_was_not_predicted_says_why() -> None:
    shown = show(replace(REPORT, plan=replace(PLAN, step_seconds=None)))
    assert row(shown, "step") == "step - 2.00 s -"
    assert "- no step was predicted: give prepare a batch" in shown
    silent = show(replace(REPORT, plan=replace(PLAN, notes=())))
    assert "the plan does not say where its step seconds come from" in silent


def test_a_tier_that_was_only_predicted_is_shown() -> None:
    device = next(usage for usage in TIERS if usage.tier is Tier.DEVICE)
    shown = show(replace(REPORT, timeline=Timeline(EVENTS, (device,))))
    assert row(shown, "disk") == "disk 1.0 GiB 400.0 MiB 0 B -100 %"


def test_table_says_how_busy_each_lane_was() -> None:
    shown = show(REPORT)
    assert row(shown, "compute") == "compute 50 % - -"
    assert row(shown, "h2d") == "h2d 25 % 6.0 MiB 3.0 MiB/s"
    assert row(shown, "disk_read") == "disk_read 6 % 1.0 MiB 2.0 MiB/s"
    assert "d2h" not in shown


def test_table_says_speed_loss_reasons_and_changes() -> None:
    shown = show(REPORT, (5.5, 2.25))
    assert "3 steps in 8.00 s, 2.00 s per step (median), 150 tokens/s" in shown
    assert "loss 5.5000 -> 2.2500" in shown
    assert "- of 10 blocks 2 stay on the device" in shown
    assert "- none: forward and backward are those of plain PyTorch" in shown


def test_table_leaves_out_a_tier_that_is_not_there() -> None:
    no_disk = tuple(usage for usage in TIERS if usage.tier is not Tier.DISK)
    absent = TierUsage(Tier.DISK, 0, 0, 0, {})
    shown = show(RunReport(replace(PLAN, disk=0), Timeline(EVENTS, (*no_disk, absent)), 1.0, 1))
    assert row(shown, "kind") == "kind device host pinned"
    assert "disk " not in shown


def test_what_was_taken_from_the_machine_and_what_was_in_use() -> None:
    assert "Taken from the machine" not in show(REPORT)  # nobody measured it
    arenas = (
        ArenaUsage(Tier.DEVICE, "slots", 16 * MiB, 16 * MiB, 16 * MiB),
        ArenaUsage(Tier.HOST, "activations", 40 * MiB, 40 * MiB, 20 * MiB),
        ArenaUsage(Tier.HOST, "gradients", 10 * MiB - 4, 10 * MiB, 10 * MiB - 4),
    )
    report = replace(REPORT, timeline=replace(REPORT.timeline, arenas=arenas))
    # What a page is longer than its arena was taken beside the peak; half of the activations' arena was nobody's.
    assert report.reserved()[Tier.HOST] == 200 * MiB + 4
    assert report.in_use()[Tier.HOST] == 180 * MiB
    assert report.gaps()[Tier.HOST] == pytest.approx((200 * MiB + 4) / (180 * MiB) - 1, rel=1e-12)
    assert report.gaps()[Tier.DEVICE] == 0
    shown = show(report)
    assert "device 48.0 MiB 48.0 MiB 0.00%" in " ".join(shown.split())
    assert "host 200.0 MiB 180.0 MiB 11.11%" in " ".join(shown.split())
    assert "activations (host): 40.0 MiB, of which 20.0 MiB were in use at most" in " ".join(shown.split())
    assert "gradients (host)" not in shown
    told = report.to_json_dict()["measured"]
    assert (told["reserved"]["host"], told["in_use"]["host"]) == (200 * MiB + 4, 180 * MiB)
    assert RunReport.from_json(report.to_json()) == report
