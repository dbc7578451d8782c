"""The benchmark of activations: what it computes from scripted contenders, what it refuses, what its table says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import pytest

from benchmarks.activations.models import chosen
from benchmarks.activations.planned import AUTO, COMPILED_AUTO, Candidate, fastest, never_slower, shares_beside
from benchmarks.activations.race import Entry, Pace, count, heats, merged, race, set_up
from benchmarks.activations.record import ARCHIVE, Comparison, Field, Row, State
from benchmarks.activations.run import follow, footprint, paired, rows_of
from benchmarks.activations.table import held_against, render, write
from benchmarks.case import Account, BenchmarkError, Contender, Job, OutOfMemory, Running
from benchmarks.host import Code, Hardware
from benchmarks.measure import Runner, Turn
from benchmarks.prediction.record import Figures
from forebay.budgets import Budget
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Streaming

MIB = 1 << 20


@final
@dataclass(frozen=True)
class Script(Contender):
    """Takes ``seconds`` a step; its first loss is ``loss``; has no room in turn ``fails_in`` (-1: at the start)."""

    name: str
    what: str = "a script"
    seconds: float = 1.0
    loss: float = 4.0
    fails_in: int | None = None

    @property
    def budgets(self) -> Mapping[str, str]:
        return {}

    def start(self, job: Job) -> Running:
        raise NotImplementedError


@final
class ScriptRunner(Runner):
    def __init__(self, script: Script) -> None:
        if script.fails_in == -1:
            raise OutOfMemory("no room for the model")
        self._script = script
        self.open = True

    def turn(self, index: int) -> Turn:
        if index == self._script.fails_in:
            raise OutOfMemory("no room for an activation")
        # A host that is slower in every round: only ratios within a round mean anything.
        return Turn((index + 1) * 2 * self._script.seconds, (self._script.loss + index, 3.0))

    def account(self) -> Account:
        return Account(peaks={"device": 5 * MIB, "host": MIB}, counters={"activations_kept": 2})

    def close(self) -> None:
        self.open = False


def entry(script: Script, **row: Any) -> Entry:
    return Entry(script, replace(Row(script.name, script.name, script.what, "", None, State.MEASURED), **row))


def run(*entries: Entry) -> dict[str, Row]:
    runners: list[ScriptRunner] = []

    def start(contender: Contender) -> Runner:
        assert isinstance(contender, Script)
        runners.append(ScriptRunner(contender))
        return runners[-1]

    with set_up(entries, start):
        rows = race(entries, "plain", Pace(3, 3), say=lambda line: None)
    assert not any(runner.open for runner in runners)
    return {row.name: row for row in rows}


def test_ratios_are_taken_within_a_round_and_the_warm_up_does_not_count() -> None:
    rows = run(entry(Script("plain")), entry(Script("slow", seconds=1.5)))
    assert rows["plain"].seconds == (2.0, 3.0, 4.0)
    assert rows["slow"].ratios == (1.5, 1.5, 1.5)
    assert rows["slow"].ratio == 1.5
    assert rows["slow"].device == 5 * MIB
    assert rows["slow"].detail == "2 activations stayed for want of room on the host"


def test_who_was_counted_before_is_not_asked_again() -> None:
    rows = run(entry(Script("plain"), device=7, host=0))
    assert (rows["plain"].device, rows["plain"].detail) == (7, "")


def test_a_peak_is_counted_in_a_process_that_is_closed_again() -> None:
    entries = [entry(Script("plain")), entry(Script("full", fails_in=0))]
    count(entries, lambda contender: ScriptRunner(contender))  # type: ignore[arg-type]
    assert [e.row.device for e in entries] == [5 * MIB, None]
    assert entries[1].row.state is State.OUT_OF_MEMORY
    assert all(e.runner is None for e in entries)


def test_a_contender_without_room_keeps_its_row_and_its_rounds() -> None:
    rows = run(entry(Script("plain")), entry(Script("late", fails_in=3)), entry(Script("never", fails_in=-1)))
    assert rows["late"].state is rows["never"].state is State.OUT_OF_MEMORY
    assert rows["late"].detail == "no room for an activation"
    assert (len(rows["late"].seconds), len(rows["never"].seconds)) == (2, 0)


def test_another_loss_is_refused_to_the_last_bit_unless_rounding_is_allowed() -> None:
    near = Script("near", loss=4.0 * (1 + 1e-6))
    with pytest.raises(BenchmarkError, match="near has losses"):
        run(entry(Script("plain")), entry(near))
    assert run(entry(Script("plain")), entry(near, exact=False))["near"].ratio == 1.0


def test_a_rival_that_computes_something_else_is_out_and_says_so() -> None:
    rows = run(entry(Script("plain")), entry(Script("other", loss=4.1), exact=False), entry(Script("third")))
    assert (rows["other"].state, rows["other"].seconds) == (State.FAILED, ())
    assert "equal within" in rows["other"].detail
    assert rows["third"].ratio == 1.0


def test_rounds_go_on_for_as_long_as_was_allowed() -> None:
    pace = Pace(least=3, most=9, seconds=100.0)
    # Of 100 s 80 are left after a warm-up of 20: four rounds. After one of 3 s nine, after one of 60 s the least.
    assert [pace.rounds(taken) for taken in (20.0, 3.0, 60.0)] == [4, 9, 3]
    times = iter([0.0, 20.0])
    entries = [entry(Script("plain")), entry(Script("slow", seconds=1.5))]
    with set_up(entries, lambda contender: ScriptRunner(contender)):  # type: ignore[arg-type]
        rows = race(entries, "plain", pace, lambda line: None, clock=lambda: next(times))
    assert [len(row.seconds) for row in rows] == [4, 4]
    assert [row.rounds for row in rows] == [(1, 2, 3, 4)] * 2


def test_the_rounds_of_a_later_heat_have_other_numbers() -> None:
    entries = [entry(Script("plain"))]
    with set_up(entries, lambda contender: ScriptRunner(contender)):  # type: ignore[arg-type]
        (row,) = race(entries, "plain", Pace(3, 3), lambda line: None, first=5)
    assert row.rounds == (6, 7, 8)


def test_a_heat_has_plain_and_what_fits_beside_it() -> None:
    entries = [[entry(Script(name))] for name in ("a", "plain", "b", "c", "d")]
    sizes = {"a": 3, "plain": 2, "b": 4, "c": 9, "d": 1}
    groups = heats(entries, "plain", room=9, footprint=lambda row: sizes[row.name])
    # 2 + 3 + 4 are 9; c alone beside plain is too much and comes all the same; d would be more still.
    assert [[e.row.name for e in group] for group in groups] == [["plain", "a", "b"], ["plain", "c"], ["plain", "d"]]
    assert len({id(group[0]) for group in groups}) == 3, "an entry has the rounds of one heat"
    assert heats(entries[1:2], "plain", room=0, footprint=lambda row: 1) == [entries[1]]


def test_a_company_comes_into_one_heat_where_one_has_the_room() -> None:
    names = (("plain",), ("a", "b"), ("c", "d"), ("e", "f", "g", "h"))
    groups = heats([[entry(Script(name)) for name in company] for company in names], "plain", 4, lambda row: 1)
    # c and d would be parted; e to h are more than any heat holds, and begin where there is room.
    assert [[e.row.name for e in group] for group in groups] == [
        ["plain", "a", "b"],
        ["plain", "c", "d", "e"],
        ["plain", "f", "g", "h"],
    ]


def test_who_was_in_two_heats_has_the_rounds_of_both() -> None:
    rows = merged([row("plain", 1, 1.0), row("a", 1, 2.0), replace(row("plain", 1, 1.5), rounds=(4,))])
    assert rows["plain"].ratios == (1.0, 1.5) and rows["a"].ratios == (2.0,)
    assert rows["plain"].rounds == (0, 4)


def test_only_rounds_that_both_took_part_in_are_compared() -> None:
    one = replace(row("a", 1, 1.0), seconds=(2.0, 3.0, 5.0), rounds=(1, 2, 3))
    other = replace(row("b", 1, 1.0), seconds=(4.0, 10.0), rounds=(1, 3))
    assert one.beside(other) == (0.5, 0.5)
    assert one.beside(replace(other, rounds=(8, 9))) == ()


def test_a_rival_is_followed_by_what_has_its_peak_for_a_budget() -> None:
    def labelled(series: str, label: str) -> Entry:
        name = f"{series} {label}".strip()
        return Entry(Script(name), replace(row(name, 1, 1.0), label=label))

    rivals = [labelled("plain", ""), labelled("checkpoint", ""), labelled("save_on_cpu", "")]
    own = [labelled("auto", label) for label in ("50 %", "as save_on_cpu", "as checkpoint")]
    assert [[entry.row.name for entry in company] for company in paired(rivals, own)] == [
        ["plain"],
        ["checkpoint", "auto as checkpoint"],
        ["save_on_cpu", "auto as save_on_cpu"],
        ["auto 50 %"],
    ]


def test_a_process_takes_its_tiers_and_a_share_for_python() -> None:
    counted, foretold = row("a", 100 * MIB, 1.0), row("b", None, None, predicted=Figures(60 * MIB, 50 * MIB, 1.0))
    assert footprint(counted) == 640 * MIB + 120 * MIB
    assert footprint(replace(foretold, host=None)) == 640 * MIB + 132 * MIB


def test_without_plain_there_is_no_result() -> None:
    with pytest.raises(BenchmarkError, match="plain did not run: no room for the model"):
        run(entry(Script("plain", fails_in=-1)), entry(Script("other")))


# Plans and their rows


def plan(nbytes: int, recompute: tuple[str, ...] = ()) -> Plan:
    homes = tuple(Placement(name, Tier.DEVICE, Tier.DEVICE, Tier.DEVICE) for name in ("a", "b"))
    return Plan("auto", Budget(nbytes), homes, Streaming(), device=10, host=0, disk=0, recompute=recompute)


FORETOLD = Figures(5 * MIB, 0, 1.0)


def test_plans_that_agree_are_measured_once_and_every_budget_keeps_its_row() -> None:
    found = [
        Candidate("auto", "80 %", 80, plan(80), FORETOLD),
        Candidate("auto", "90 %", 90, plan(90), FORETOLD),
        Candidate("auto", "50 %", 50, plan(50, ("a",)), FORETOLD),
        Candidate("auto", "20 %", 20, refusal="too small"),
    ]
    rows = rows_of(found)
    assert [row.measured_as for row in rows] == [None, "auto 80 %", None, None]
    assert [row.what for row in rows] == ["all is kept", "all is kept", "1 run again", "auto"]
    assert (rows[3].state, rows[3].detail) == (State.NO_PLAN, "too small")
    ran = replace(rows[0], device=4, host=0, seconds=(1.0,), ratios=(1.1,))
    assert [row.device for row in follow([ran, *rows[1:]])] == [4, 4, None, None]


def test_a_plan_that_is_held_against_two_rivals_runs_beside_both() -> None:
    found = [
        Candidate("auto", "as checkpoint", 60, plan(60), FORETOLD),
        Candidate("auto", "as save_on_cpu", 50, plan(50), FORETOLD),
        Candidate("auto-activations", "as save_on_cpu", 50, plan(50), FORETOLD),
        Candidate("auto", "50 %", 50, plan(50), FORETOLD),
    ]
    assert [row.measured_as for row in rows_of(found)] == [None, None, "auto as checkpoint", "auto as checkpoint"]


def test_a_turn_has_two_steps_and_a_model_a_name() -> None:
    with pytest.raises(BenchmarkError, match="2 steps"):
        Pace(steps=1)
    named = "no model gpt-9; there are gpt2-14m, gpt2-14m-no-dropout, llama-16m, vit-14m"
    with pytest.raises(BenchmarkError, match=named):
        chosen(["gpt-9"])


# The record and the table


def row(name: str, device: int | None, ratio: float | None, **more: Any) -> Row:
    rounds = () if ratio is None else (ratio,)
    made = Row(name, name.partition(" ")[0], name, name.partition(" ")[2], None, State.MEASURED, device=device)
    return replace(made, seconds=rounds, ratios=rounds, rounds=(0,) * len(rounds), host=0, **more)


FIELD = Field(
    "tiny",
    2,
    100 * MIB,
    (
        row("plain", 100 * MIB, 1.0),
        row("checkpoint", 60 * MIB, 1.3),
        row("save_on_cpu", 30 * MIB, 1.1),
        Row("rockmate", "rockmate", "Rockmate", "", None, State.LEFT_OUT, detail="not here"),
        row("auto 90 %", 90 * MIB, 1.0, budget=90 * MIB),
        row("auto 60 %", 55 * MIB, 1.17, budget=60 * MIB, predicted=Figures(56 * MIB, 0, 1.5)),
        row("auto 40 %", 40 * MIB, 1.1, budget=40 * MIB),
        replace(row("auto 20 %", 20 * MIB, 1.0), rounds=(7,)),
        row("auto-activations 50 %", 50 * MIB, 1.25),
        row("auto 10 %", None, None, detail="too small"),
    ),
)
RESULT = Comparison(
    date=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    command="scripts/bench activations",
    hardware=Hardware(cpu="Some CPU", cores=2, memory_bytes=2**34),
    versions={"torch": "2.13.0"},
    threads=2,
    other_cores=0.5,
    code=Code("0123456789abcdef", True, "fedc"),
    rounds=3,
    warmup=1,
    steps=2,
    fields=(FIELD,),
)


def test_auto_is_held_against_a_rival_within_the_rivals_peak() -> None:
    (held,) = held_against(FIELD, FIELD.row("checkpoint"))
    assert held.name == "auto 60 %"  # the one of 90 % takes more, the one of 40 % was given less
    assert held_against(FIELD, FIELD.row("save_on_cpu")) == ()  # the one of 20 % took no turns with it


def test_beside_a_compiled_rival_it_is_auto_with_compiled_blocks_too() -> None:
    rival = row("compile 0.5", 60 * MIB, 1.2)
    compiled = row("auto-compiled as compile 0.5", 58 * MIB, 1.1)
    field = replace(FIELD, rows=(*FIELD.rows, rival, compiled))
    assert held_against(field, rival) == (FIELD.row("auto 60 %"), compiled)
    assert held_against(field, field.row("checkpoint")) == (FIELD.row("auto 60 %"),)
    assert held_against(replace(FIELD, rows=(*FIELD.rows, rival)), rival) == (FIELD.row("auto 60 %"),)


def test_compiled_blocks_have_the_activation_memory_budget_that_is_foretold_to_be_the_fastest() -> None:
    assert shares_beside(["as compile 0.25", "as compile 0.75"]) == [1.0, 0.75, 0.25]
    assert shares_beside([]) == []
    tried = [
        Candidate(COMPILED_AUTO, label, 80, predicted=seconds and Figures(70, 0, seconds), share=share)
        for share, label, seconds in (
            (1.0, "as compile 0.25", None),  # no plan fits
            (1.0, "as compile 0.75", 2.0),
            (0.75, "as compile 0.25", 1.5),
            (0.75, "as compile 0.75", 2.0),
            (0.25, "as compile 0.25", 1.25),
            (0.25, "as compile 0.75", 3.0),
        )
    ]
    assert [(one.label, one.share) for one in fastest(tried)] == [("as compile 0.25", 0.25), ("as compile 0.75", 1.0)]


def test_a_part_is_a_subject_of_its_own() -> None:
    assert RESULT.subject == "tiny"
    assert replace(RESULT, beside="compile 0.5").subject == "tiny beside compile 0.5"


def test_the_table_says_peak_share_prediction_and_verdict() -> None:
    text = render([RESULT])
    # 1.17 s for 1.3 s in the one round that both took part in.
    assert (
        "Within the peak of checkpoint: auto 60 % takes 0.900 of its step (0.900 - 0.900; longer in 0 of 1 rounds), "
        "on or below it." in text
    )
    assert "Within the peak of save_on_cpu no run of auto was measured beside it." in text
    # 56 foretold for 55 measured: 1.82 % too much; 1.5 s for 1.17 s: 28.2 % too much.
    assert (
        "| auto | 60 % = 60 MiB | auto 60 % | 55.0 MiB | 55.0% | 56.0 MiB (+1.82%) | 0.0 MiB | 1.170 s "
        "| 1.170 (1.170 - 1.170) | 1.500 s (+28.2%) |" in text
    )
    assert "| rockmate | - | Rockmate; left out; not here | - | - | - | - | - | - | - |" in text
    assert "0.50 cores busy with others" in text and "commit 0123456789ab with changes" in text


def test_a_comparison_is_read_back_and_its_section_alone_is_replaced(tmp_path: Path) -> None:
    path = ARCHIVE.save(RESULT, tmp_path)
    assert path.name == "activations-20260102T030400Z-some-cpu-2-cores.jsonl"
    assert ARCHIVE.latest(tmp_path) == (RESULT,)
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- activations: begin -->\nold\n<!-- activations: end -->\nafter\n")
    write(page, [RESULT])
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "old" not in text


def test_with_more_memory_a_faster_plan_for_less_runs() -> None:
    asked = [
        Candidate(AUTO, "90 %", 900, predicted=Figures(880, 0, 2.0)),
        Candidate(AUTO, "20 %", 200, refusal="too small"),
        Candidate(AUTO, "50 %", 500, predicted=Figures(480, 7, 1.5)),
        Candidate(AUTO, "70 %", 700, refusal="nothing found"),
    ]
    found = list(never_slower(asked))
    assert [(one.label, one.nbytes) for one in found] == [(one.label, one.nbytes) for one in asked]
    assert [one.predicted for one in found] == [asked[2].predicted, None, asked[2].predicted, asked[2].predicted]
    assert [one.refusal for one in found] == ["", "too small", "", ""]
