"""The page of a run as HTML: it holds all that it needs, escapes what it quotes, and shows what the records say."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from forebay.memory import ArenaUsage, Kind, Tier, TierUsage
from forebay.plans import Placement, Update
from forebay.reporting.compare_page import render_comparison
from forebay.reporting.comparison import Candidate, Measured
from forebay.reporting.losses import StepLine
from forebay.reporting.plan_rows import plan_rows
from forebay.reporting.rows import ARENA_HEADER, BUDGET_HEADER, arena_rows, budget_rows, loose_arenas
from forebay.reporting.run_page import RunPage, render
from forebay.reporting.table import closing_table
from forebay.treatments import Fate, Selection, Treatment
from tests.null.page_reader import Page
from tests.null.reported import LOSSES, PAGE, PLAN, REPORT, MiB


def test_the_page_holds_all_that_it_needs() -> None:
    source = render(PAGE)
    page = Page(source)
    assert not any(name in ("src", "href", "srcset", "data", "action") for _, name, _ in page.attributes)
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|\bfetch\(|XMLHttpRequest|import\(", source)
    policy = next(
        value for tag, name, value in page.attributes if (tag, name) == ("meta", "content") and "src" in value
    )
    assert policy.startswith("default-src 'none';")
    assert "innerHTML" not in source and "eval(" not in source
    assert source.count("<script") == 2


def test_the_page_shows_what_the_records_say() -> None:
    page = Page(render(PAGE))
    assert page.data == PAGE.data()
    assert page.headings == [
        "a model: run",
        "Loss and speed",
        "Memory over a step",
        "Lanes over a step",
        "Budget",
        "Plan",
        "About this run",
    ]
    assert page.row("device") == ["device", "8.0 MiB", "7.0 MiB", "6.0 MiB", "-14 %"]
    assert page.row("activation") == ["activation", "4.0 MiB", "4.0 MiB", "-", "-"]
    assert page.row("h2d")[1:5] == ["500 ms", "25 %", "2.0 MiB", "4.0 MiB/s"]
    assert page.row("compute")[3] == "-"  # what it touches is no traffic
    assert page.row("embed")[:6] == ["embed", "1", "2.0 MiB", "host", "host", "host"]
    assert page.row("layers.0 … layers.1")[:3] == ["layers.0 … layers.1", "2", "2.0 MiB"]
    for said in ("5.2500", "from 5.5000 in 2 steps", "2.00 s predicted (0.0 %)", "compute50 % of a step, measured"):
        assert said in page.text, said
    assert "of 3 blocks all stream" in page.text
    assert "To know" not in page.text


def test_the_page_and_the_closing_table_say_the_same() -> None:
    arenas = (ArenaUsage(Tier.HOST, "activations", 8 * MiB, 8 * MiB, 4 * MiB),)
    timeline = replace(REPORT.timeline, arenas=arenas, counters={"disk_written": 10**9})
    report = replace(REPORT, timeline=timeline)
    page = Page(render(replace(PAGE, plan=PLAN, report=report)))
    text = io.StringIO()
    Console(file=text, width=80, no_color=True).print(closing_table(report))
    printed = [" ".join(line.split()) for line in text.getvalue().splitlines()]
    headers = BUDGET_HEADER, ARENA_HEADER
    assert len(budget_rows(PLAN, report)) == 3 and len(arena_rows(report)) == 1
    for row in (*headers, *budget_rows(PLAN, report), *arena_rows(report)):
        assert list(row) in page.rows, row
        assert " ".join(" ".join(row).split()) in printed, row
    for said in (*loose_arenas(report), "0.5 TB in 1,000 steps"):
        assert said in page.text and said in " ".join(printed)


def test_what_is_quoted_is_escaped() -> None:
    evil = '</script><img src=x onerror="alert(1)">&amp;'
    settings = {"model": evil, "data": [evil, "two"]}
    plan = replace(PLAN, reasons=(evil,), placements=(Placement(evil, Tier.HOST, Tier.HOST, Tier.HOST),))
    events = tuple(replace(event, what=evil) for event in REPORT.timeline.events)
    report = replace(REPORT, plan=plan, timeline=replace(REPORT.timeline, events=events))
    shown = replace(PAGE, title=evil, plan=plan, report=report, settings=settings, notes=(evil,), blocks={evil: 1})
    page = Page(render(shown))
    assert page.headings[0] == evil
    assert not any(tag == "img" for tag, _, _ in page.attributes)
    assert evil in page.data["lanes"]["words"]
    assert page.text.count(evil) >= 4
    assert page.row("data")[1] == f"{evil}, two"


def test_a_page_of_a_killed_run_says_so() -> None:
    killed = RunPage("killed", PLAN, losses=LOSSES[:1], steps=10, notes=("the model is gone",))
    page = Page(render(killed))
    assert page.headings == ["killed", "To know", "Loss and speed", "Budget", "Plan", "About this run"]
    assert "the run has taken 1 of 10 steps" in page.text
    assert "the run has left no report.json: it was killed, or trains still" in page.text
    assert page.row("device") == ["device", "8.0 MiB", "7.0 MiB", "-", "-"]
    assert "the model is gone" in page.text
    assert set(page.data) == {"losses"}
    assert Page(render(RunPage("begun", PLAN))).data == {}


@pytest.mark.parametrize(
    ("shown", "said"),
    [
        (replace(PAGE, report=replace(REPORT, plan=replace(PLAN, changes_numbers=("8 bits",)))), "PyTorch: 8 bits"),
        (replace(PAGE, report=replace(REPORT, plan=replace(PLAN, device=5 * MiB))), "device: the peak was 6.0 MiB"),
        (replace(PAGE, report=replace(REPORT, plan=replace(PLAN, step_seconds=1.0))), "a step took 2.00 s, and 1.00 s"),
        (replace(PAGE, losses=(*LOSSES, StepLine(3, None, 0.1, 1.0, skipped=True))), "step 3 had no update"),
        (
            replace(PAGE, losses=tuple(StepLine(i, None, 0.1) for i in range(1, 9))),
            "8 steps (1, 2, 3, 4, 5, ...) had a",
        ),
    ],
)
def test_what_is_to_be_known_comes_first(shown: RunPage, said: str) -> None:
    assert PAGE.cautions == ()
    assert any(said in caution for caution in shown.cautions), shown.cautions
    assert said in Page(render(shown)).text


def test_waiting_and_other_orders_are_said() -> None:
    from forebay.timeline import Event, Lane

    stalled = replace(REPORT.timeline, events=(*REPORT.timeline.events, Event(Lane.STALL, 102.0, 104.0)))
    counted = {"deviations from the recorded order": 1, "redone": 2}
    found = replace(PAGE, report=replace(REPORT, timeline=replace(stalled, counters=counted))).cautions
    assert [words.split(":")[0] for words in found] == [
        "compute waited for other lanes 40 % of the time",
        "blocks came in another order than in the first step, once",
        "updates ahead of their step were made again, 2 times",
    ]


def test_blocks_that_are_treated_alike_are_one_row() -> None:
    treated = (
        Treatment("aten.mm.default", 0, Fate.OFFLOAD),
        Treatment("aten.mm.default", 1, Fate.OFFLOAD),
        Treatment("aten.silu.default", 0, Fate.DISK, 8),
        Treatment("aten.relu.default", 0, Fate.KEEP, 1),
    )
    plan = replace(
        PLAN,
        recompute=("layers.0",),
        activations=(Selection(("layers.1",), treated),),
        changes_numbers=("8 bits",),
        placements=(
            Placement("embed", Tier.DEVICE, Tier.DEVICE, Tier.DEVICE),
            Placement("layers.0", Tier.HOST, Tier.HOST, Tier.DISK, Update.STORAGE),
            Placement("layers.1", Tier.DEVICE, Tier.HOST, Tier.HOST, Update.AHEAD),
        ),
    )
    assert plan_rows(plan, {}) == [
        ("embed", "1", "-", "device", "device", "device", "on the device", "kept"),
        ("layers.0", "1", "-", "host", "host", "disk", "beside the storage", "run again"),
        (
            "layers.1",
            "1",
            "-",
            "device",
            "host",
            "host",
            "under backward, ahead of the step",
            "2 to the host, 1 to disk as 8 bits, 1 kept as 1 bit; the rest kept",
        ),
    ]
    # Of another size: a row of its own.
    assert [row[0] for row in plan_rows(PLAN, {"embed": 1, "layers.0": 2, "layers.1": 2})] == [
        "embed",
        "layers.0 … layers.1",
    ]
    assert len(plan_rows(PLAN, {})) == 1


def test_a_tier_that_is_not_used_has_no_row() -> None:
    unused = (*REPORT.timeline.tiers, TierUsage(Tier.DISK, 0, 0, 0, {}))
    page = Page(render(replace(PAGE, report=replace(REPORT, timeline=replace(REPORT.timeline, tiers=unused)))))
    assert not any(row[0] in ("disk", "pinned") for row in page.rows)
    assert [tier["name"] for tier in page.data["memory"]["tiers"]] == ["device", "host"]
    assert Kind.STAGING.value not in page.data["memory"]["tiers"][0]["measured"]["kinds"]


def test_the_page_of_a_comparison() -> None:
    peaks = {Tier.DEVICE: 6 * MiB, Tier.HOST: 20 * MiB}
    ran = Measured(3, 1.5, peaks, {}, (5.0,), True)
    candidates = (
        Candidate("auto", 8 * MiB, 0.1, 1.0, peaks, measured=ran),
        Candidate("zero<offload>", 8 * MiB, 0.1, 2.0, {Tier.DEVICE: 7 * MiB}, exact=False),
        Candidate("resident", 8 * MiB, 0.1, reason="12.0 MiB are needed"),
    )
    source = render_comparison("tiny on here", candidates, ("rates are typical",))
    page = Page(source)
    assert not re.search(r"https?:|url\(|innerHTML", source)
    found = [(one["policy"], one["seconds"], one["peak"], one["measured"]) for one in page.data["points"]]
    assert found == [
        ("auto", 1.0, 6 * MiB, False),
        ("auto", 1.5, 6 * MiB, True),
        ("zero<offload>", 2.0, 7 * MiB, False),
    ]
    assert page.row("zero<offload>")[6:] == ["others", "predicted"]
    assert "resident with 8.0 MiB: 12.0 MiB are needed" in page.text
    assert "rates are typical" in page.text


def test_the_pictures_in_the_docs_are_there_and_small() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    named = set(re.findall(r"images/[a-z-]+\.png", (docs / "reports.md").read_text(encoding="utf-8")))
    assert named == {f"images/{path.name}" for path in (docs / "images").iterdir()}
    assert len(named) == 5
    assert all((docs / name).stat().st_size < 150_000 for name in named)
