"""The benchmarks of policies for states: which runs are as foretold, which promises are kept, what the tables say."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.case import BenchmarkError
from benchmarks.host import Code, Hardware
from benchmarks.losses import record as losses
from benchmarks.losses.run import SENT, TASKS, WAYS
from benchmarks.losses.table import render as render_losses
from benchmarks.prediction.zoo import ZOO
from benchmarks.states.record import ARCHIVE, LEVELS, Comparison, Figures, Refused, Run, Same, latest
from benchmarks.states.run import GROUPED, MODELS, POLICIES, compare
from benchmarks.states.table import render, write
from forebay.planners import PLANNERS, STATES

MiB = 1 << 20


def run(
    policy: str, *ratios: float, level: str = "host", device: int = 2, exact: bool = True, as_plain: bool = True
) -> Run:
    return Run(
        level=level,
        policy=policy,
        device=4 * MiB,
        host=8 * MiB,
        micro_batches=GROUPED.get(policy, 1),
        promised=(2 * MiB, 3 * MiB, 0),
        predicted=Figures(1.0, 2 * MiB, 3 * MiB, 0),
        measured=Figures(ratios[0], device * MiB, 3 * MiB, 0),
        seconds=ratios,
        ratios=ratios,
        busy={"compute": (0.5, 0.6)},
        exact=exact,
        as_plain=as_plain,
    )


def comparison(*runs: Run, day: int = 21, model: str = "llama-16m", same: tuple[Same, ...] = ()) -> Comparison:
    return Comparison(
        date=datetime(2026, 11, day, tzinfo=UTC),
        command=f"scripts/bench states --models {model}",
        hardware=Hardware("a processor", 2, 1 << 34),
        versions={"torch": "2.13"},
        code=Code("abcdef0123456789", False, "fedcba9876543210"),
        model=model,
        kind="dense",
        threads=2,
        other_cores=0.0,
        runs=runs,
        refused=(Refused("host", "moesys", "policy moesys is for models with experts"),),
        same=same,
    )


def test_a_run_is_as_foretold_within_fifteen_percent_to_either_side_in_the_median_of_rounds() -> None:
    assert run("l2l", 1.149).near and run("l2l", 0.851).near and run("l2l", 0.9, 1.3, 1.1).near
    assert (
        not run("l2l", 1.151).near and not run("l2l", 0.849).near and run("l2l", 1.2, 1.4).error == pytest.approx(0.3)
    )


def test_a_promise_is_kept_where_no_tier_held_more() -> None:
    assert run("l2l", 1.0).kept and not run("l2l", 1.0, device=3).kept
    more = run("l2l", 1.0)
    assert not replace(more, measured=replace(more.measured, disk=1)).kept


def test_the_same_plan_in_its_slowest_round_beside_its_fastest() -> None:
    """Two steps a round: 1.1 and 1.3 are 1.2 in the median, 0.9 and 1.1 are 1.0."""
    twice = replace(run("l2l", 1.2, 1.0), seconds=(1.1, 1.3, 0.9, 1.1))
    assert twice.noise == pytest.approx(0.2) and run("l2l", 1.2).noise is None


def test_all_policies_for_states_and_shapes_of_three_kinds() -> None:
    kinds = {entry.kind for entry in ZOO if entry.name in MODELS}
    assert kinds == {"dense", "encoder-decoder", "mixture of experts"} and len(MODELS) == 3
    assert {"auto", *STATES} <= set(POLICIES) <= set(PLANNERS) and set(GROUPED) <= set(STATES)


def test_parts_are_joined_by_the_newest_row_of_every_memory_and_policy() -> None:
    whole = comparison(run("l2l", 2.0), run("elixir", 1.1), run("lohan", 3.0, level="disk"))
    part = comparison(run("lohan", 1.0, level="disk"), day=22, same=(Same("host", "elixir", ("host", "l2l")),))
    elsewhere = replace(comparison(run("l2l", 1.5), day=23), hardware=Hardware("another", 8, 1 << 34))
    here, there = latest([whole, part, elsewhere]).values()
    assert [(row.found.level, row.found.policy) for row in here] == [
        ("host", "l2l"),
        ("host", "elixir"),
        ("host", "moesys"),
        ("disk", "lohan"),
    ]
    assert [row.source is part for row in here] == [False, True, True, True]
    assert here[1].found == Same("host", "elixir", ("host", "l2l")) and here[3].found == part.runs[0]
    assert [row.source for row in there] == [elsewhere, elsewhere] and LEVELS == ("host", "disk")


def test_the_newest_of_every_policy_is_tabled(tmp_path: Path) -> None:
    old, new = comparison(run("l2l", 2.0)), comparison(run("l2l", 1.0), day=22)
    late = run("lohan", 1.1, 1.32, level="disk", exact=False, as_plain=False)
    other = comparison(run("mobius", 1.2), late, model="t5-18m", same=(Same("disk", "harmony", ("host", "mobius")),))
    for one in (old, new, other):
        ARCHIVE.save(one, tmp_path)
    text = render(ARCHIVE.every(tmp_path))
    assert "Of 3 plans 1 took what was foretold within 15 % (33 %), 3 held no more" in text
    assert "of 2 that promise plain PyTorch's numbers 2 had its losses" in text
    assert "in its slowest round 20 % more than in its fastest (median; 20 % at most)" in text
    assert "| `l2l` | host | 4.0 MiB, 8.0 MiB | 1.000 s | 1.000 s | +0.0% | +0% |" in text
    assert "| `mobius`, 2 micro-batches | host |" in text and "**+20.0%**" in text and "+100%" not in text
    assert "host: 0 of 1 within 15 %, disk: 0 of 1 within 15 %." in text
    assert "- `moesys` (host): policy moesys is for models with experts" in text
    assert "- `harmony` (disk): the plan of `mobius` (host)" in text
    assert "2 of them: a processor, 2 cores" in text and "2026-11-22" in text and text.count("of them: ") == 2
    file = tmp_path / "README.md"
    file.write_text("<!-- states: begin -->\nold\n<!-- states: end -->\n")
    write(file)
    assert "\nold\n" not in file.read_text()


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(BenchmarkError, match="no model llama-17m here; did you mean llama-16m"):
        compare("llama-17m", (), (), Path("/tmp"), "", 1, print)
    with pytest.raises(BenchmarkError, match="no policy l3l here; did you mean l2l"):
        compare("llama-16m", ["l3l"], (), Path("/tmp"), "", 1, print)
    with pytest.raises(BenchmarkError, match="no memory disc here; did you mean disk"):
        compare("llama-16m", (), ["disc"], Path("/tmp"), "", 1, print)
    with pytest.raises(BenchmarkError, match="1 round or more, got 0"):
        compare("llama-16m", (), (), Path("/tmp"), "", 0, print)


# Curves of losses.


def course(way: str, last: float, guessed: float, seed: int = 0) -> losses.Course:
    return losses.Course("fine-tuned", way, seed, 120, 20, (3.0, 2.5, 2.4, 2.3, 2.2, last), last + 0.1, guessed)


def courses(*found: losses.Course, day: int = 22) -> losses.Comparison:
    return losses.Comparison(
        date=datetime(2026, 11, day, tzinfo=UTC),
        command=f"scripts/bench losses on the {day}th",
        hardware=Hardware("a processor", 2, 1 << 34),
        versions={"torch": "2.13"},
        code=Code("abcdef0123456789", True, "fedcba9876543210"),
        courses=found,
        before={f"fine-tuned {one.seed}": (3.0 + one.seed / 5, 0.25 + one.seed / 10) for one in found},
    )


def test_curves_are_held_against_the_exact_one_of_the_same_seed() -> None:
    sent = SENT[-1].name
    found = courses(
        course(losses.EXACT, 2.0, 0.5),
        course(sent, 2.02, 0.495),
        course(losses.EXACT, 1.0, 0.6, seed=1),
        course(sent, 1.03, 0.605, seed=1),
    )
    text = render_losses([found])
    assert "| before |" in text and " 3.1000 | | 30.00% |" in text
    assert f"| `{sent}` | 3.000 | 2.500 |" in text and "1.525 | +2.0% (+1.0%, +3.0%) |" in text
    assert "49.50%" not in text and "+0.00 points (-0.50 points, +0.50 points)" in text


def test_curves_of_several_runs_are_one_table_of_the_newest() -> None:
    """A way that was run later joins those that were there; a seed whose exact course is missing waits for it."""
    first, second, third = (way.name for way in SENT[:3])
    old = courses(course(losses.EXACT, 2.0, 0.5), course(first, 2.5, 0.5), course(second, 2.1, 0.5), day=20)
    new = courses(course(first, 2.02, 0.5), day=21)
    lone = courses(course(third, 2.04, 0.5, seed=1), day=22)
    text = render_losses([old, new, lone])
    assert "+1.0% (+1.0%)" in text and "+5.0% (+5.0%)" in text and "+25.0%" not in text and third not in text
    assert "on the 20th" in text and "on the 21th" in text and "on the 22th" not in text


def test_courses_of_other_lengths_are_not_held_against_each_other() -> None:
    long = courses(course(losses.EXACT, 2.0, 0.5), course(SENT[0].name, 2.02, 0.5), day=20)
    short = courses(replace(course(losses.EXACT, 9.0, 0.1), steps=40), day=21)
    (found,) = losses.joined([long, short])
    assert len(found.courses) == 3 and found.exact(long.courses[1]) is long.courses[0]
    alone = courses(replace(course(SENT[0].name, 9.0, 0.1), steps=40), day=21)
    (found,) = losses.joined([long, alone])
    assert found.courses == long.courses and found.runs == (long,)


def test_what_is_sent_goes_down_to_the_hundredth_that_the_policy_sends() -> None:
    assert [way.density for way in SENT] == [0.1, 0.05, 0.02, 0.01]
    tuned = next(task for task in TASKS if task.first)
    assert len(WAYS) == len({way.name for task in TASKS for way in task.ways}) + 1
    assert set(SENT) < set(tuned.ways) and all(way.policy in PLANNERS for task in TASKS for way in task.ways)
