"""The benchmark of solve times: what is kept of a plan, what counts as slow, the table, what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from benchmarks.case import BenchmarkError
from benchmarks.host import Code, Hardware
from benchmarks.solving.record import ARCHIVE, TARGET, Comparison, Room, Solved, latest
from benchmarks.solving.run import EXACT, POLICIES, asked, compare, in_words, solved
from benchmarks.solving.table import render, write
from forebay.planners import LITERATURE, PLANNERS
from tests.null.planning import chain

GAP = "ops of 3 blocks run again: the optimum of the integer programme has at most 1.0% fewer seconds made again"


def row(
    policy: str = "rotor", layers: int = 12, cpu: float = 0.5, step: float | None = 1.25, proof: str = ""
) -> Solved:
    return Solved(policy, layers, Room.ALL, 1 << 30, cpu, cpu + 0.25, step, policy in EXACT, proof)


def comparison(*rows: Solved, day: int = 21) -> Comparison:
    return Comparison(
        date=datetime(2026, 11, day, tzinfo=UTC),
        command="scripts/bench solving",
        hardware=Hardware("a processor", 2, 1 << 34),
        versions={"forebay": "0.1.0"},
        code=Code("abcdef", False, "123"),
        rows=rows,
    )


def test_every_planner_for_activations_is_asked() -> None:
    assert set(LITERATURE) < set(POLICIES) <= set(PLANNERS) and len(set(POLICIES)) == len(POLICIES)


def test_a_plan_is_timed_and_an_exact_one_says_its_gap() -> None:
    trace = chain(4, activation=1 << 20)
    for room in Room:
        problem = asked(trace, room)
        one = solved("rotor", 4, room, problem)
        assert (one.policy, one.layers, one.room, one.device) == ("rotor", 4, room, problem.budget.device)
        assert one.cpu_seconds > 0 and one.seconds > 0 and one.step_seconds and not one.exact and not one.proof
        whole = solved("checkmate", 4, room, problem)
        assert whole.exact and whole.step_seconds and "optimum of the integer programme" in whole.proof
        keeps = solved("keep", 4, room, problem)
        # Half of what the layers hold has no room on the device, and with everything there none of it can stream.
        assert keeps.step_seconds is None or room is Room.ALL
    assert asked(trace, Room.SLOTS).budget.device < asked(trace, Room.ALL).budget.device


def test_what_counts_as_slow() -> None:
    assert row(cpu=TARGET + 0.1).slow and not row(cpu=TARGET).slow
    assert not row("checkmate", cpu=60.0).slow
    assert "TOO SLOW" in in_words(row(cpu=3.0)) and "nothing fits" in in_words(row(step=None))
    assert in_words(row("checkmate", proof=GAP)).endswith(GAP)


def test_table(tmp_path: Path) -> None:
    kept = (
        comparison(row(), row(layers=100, cpu=3.0), row("checkmate", 100, 9.0, proof=GAP), row("te", 100, step=None)),
        comparison(replace(row(), cpu_seconds=0.25), day=22),
    )
    for one in kept:
        ARCHIVE.save(one, tmp_path)
    assert tuple(ARCHIVE.every(tmp_path)) == kept
    assert len(latest(kept)) == 4
    text = render(kept)
    assert "| policy | 12 layers, all on the device (1.0 GiB) | 100 layers, all on the device (1.0 GiB) |" in text
    assert "| `rotor` | 0.25 (0.75) | **3.00** (3.25) |" in text
    assert (
        "| `checkmate` |  | 9.00 (9.25) |" in text and f"- `checkmate`, 100 layers, all on the device: {GAP}." in text
    )
    assert "| `te` |  | 0.50 (0.75), nothing fits |" in text
    assert "Of 3 plans by planners that are not exact 1 took more than 2 s." in text
    assert "commit abcdef; 2026-11-22" in text
    place = tmp_path / "policies.md"
    place.write_text("<!-- solving: begin -->\nto be replaced\n<!-- solving: end -->\nafter")
    write(place)
    assert "to be replaced" not in place.read_text() and place.read_text().endswith("after")
    assert render([]) == "No comparison is kept yet.\n"


def test_auto_is_held_against_the_fastest_of_the_others() -> None:
    others = row(step=1.25), row("te", step=None), row("chen", step=1.5)
    line = "- 12 layers, all on the device: a step of `auto` takes {}, the fastest of the others"
    text = render([comparison(row("auto", step=1.3), *others)])
    assert line.format("1.300 s, 1.040 of that of `rotor`") + " (**behind**).\n" in text
    text = render([comparison(row("auto", step=1.252), *others)])
    assert line.format("1.252 s, 1.002 of that of `rotor`") + ".\n" in text  # a tie


def test_unknown_names_and_depths_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="no policy rotr here; did you mean rotor"):
        compare([], ["rotr"], "", print)
    with pytest.raises(BenchmarkError, match="1 to 1000 layers, got 0"):
        compare([0], [], "", print)
