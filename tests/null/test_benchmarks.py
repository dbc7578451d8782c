"""The benchmark harness with scripted contenders and clocks: what it computes, what it refuses, what it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

import pytest

from benchmarks.case import (
    Account,
    BenchmarkError,
    Case,
    Contender,
    DeviceKind,
    Facts,
    Job,
    LaneUse,
    Limit,
    OutOfMemory,
    Running,
)
from benchmarks.cases import CASES
from benchmarks.contenders import FUSED, Forebay, exhausted
from benchmarks.contenders import PLAIN as PLAIN_TORCH
from benchmarks.host import Code, CpuMeter, Hardware
from benchmarks.isolated import IsolatedRunner
from benchmarks.measure import LocalRunner, Outcome, Runner, Score, noticing_exhaustion, race
from benchmarks.models import LlamaShape
from benchmarks.result import Result, collect, load_all, save
from benchmarks.table import render, write
from forebay.errors import ConfigError
from forebay.records import dump, load

TINY = LlamaShape(name="tiny", vocab=32, hidden=16, intermediate=24, layers=2, heads=4, kv_heads=2)
WARMUP, ROUNDS, STEPS = 1, 3, 2


class Clock:
    """Stands still until someone works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@final
@dataclass(frozen=True)
class Scripted(Contender):
    """Takes ``costs[turn]`` seconds a step and ``tail`` seconds to finish; fails in turn ``fails_in``."""

    name: str = "plain"
    what: str = "a script"
    costs: tuple[float, ...] = (1.0,)
    tail: float = 0.0
    first_loss: float = 4.0
    loss_shift: float = 0.0
    fails_in: int | None = None
    fails_to_start: bool = False

    @property
    def budgets(self) -> Mapping[str, str]:
        return {"device": "1MiB"}

    def start(self, job: Job) -> Running:
        return self.on(Clock())

    def on(self, clock: Clock, log: list[str] | None = None) -> Running:
        if self.fails_to_start:
            raise MemoryError("no room for the model")
        return ScriptedRunning(self, clock, [] if log is None else log)


@final
class ScriptedRunning(Running):
    def __init__(self, script: Scripted, clock: Clock, log: list[str]) -> None:
        self._script, self._clock, self._log = script, clock, log
        self._turn = -1
        self._dirty = False
        self._seed = 0

    def reset(self, batches: int, first_seed: int) -> None:
        self._turn += 1
        self._seed = first_seed
        self._clock.now += 100.0  # never part of a turn
        self._log.append(self._script.name)

    def step(self, index: int) -> Any:
        if self._turn == self._script.fails_in:
            raise MemoryError("no room for an activation")
        costs = self._script.costs
        self._clock.now += costs[min(self._turn, len(costs) - 1)]
        self._dirty = True
        return self._script.first_loss + self._seed if index == 0 else 3.0 + self._script.loss_shift

    def finish(self) -> None:
        if self._dirty:
            self._clock.now += self._script.tail
        self._dirty = False

    def read(self, loss: Any) -> float:
        return float(loss)

    def account(self) -> Account:
        return Account(
            peaks={"device": 2**20}, lanes={"h2d": LaneUse(2_000_000_000, 0.5, 4e9)}, counters={"fetches": 7}
        )

    def close(self) -> None:
        self._log.append(f"close {self._script.name}")


def case_of(*contenders: Contender, **changes: Any) -> Case:
    settings: dict[str, Any] = {
        "control": "plain",
        "name": "fake",
        "question": "Is it quick?",
        "model": TINY,
        "batch": 2,
        "seq": 8,
        "device": DeviceKind.CPU,
        "contenders": contenders,
        "limit": Limit("half a second", lambda facts: 0.5),
        "target": 1.2,
        "rounds": ROUNDS,
        "warmup": WARMUP,
        "steps": STEPS,
    }
    return Case(**(settings | changes))


def out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError)


def run(case: Case, log: list[str] | None = None, alone: int = 1) -> tuple[Score, ...]:
    clock = Clock()

    def start(contender: Contender) -> Runner:
        assert isinstance(contender, Scripted)
        with noticing_exhaustion(out_of_memory):
            return LocalRunner(contender.on(clock, log), case.steps, clock, out_of_memory)

    return race(case, start, say=lambda line: None, alone_rounds=alone)


# The baseline takes WARMUP + 1 turns alone before it starts again with the others.
PLAIN = Scripted(costs=(9.0, 1.0, 2.0, 4.0))
FOREBAY = Scripted(name="forebay", costs=(9.0, 1.0, 3.0, 5.0), tail=1.0)


def test_medians_and_ratios_are_taken_round_by_round() -> None:
    plain, forebay = run(case_of(PLAIN, FOREBAY), alone=2)
    assert plain.alone == (1.0, 2.0)
    assert plain.seconds == (1.0, 2.0, 4.0)
    assert plain.median == 2.0
    assert plain.ratio == 1.0
    # One second of tail over two steps; warm-up and what happens between turns are not counted.
    assert forebay.seconds == (1.5, 3.5, 5.5)
    assert forebay.ratios == (1.5, 1.75, 1.375)
    assert forebay.median == 3.5
    # Not 3.5 / 2.0: the ratio of the medians would mix rounds.
    assert forebay.ratio == 1.5
    assert forebay.account.counters == {"fetches": 7}


def test_the_order_rotates_and_everyone_is_closed_once() -> None:
    log: list[str] = []
    run(case_of(PLAIN, FOREBAY), log)
    assert log == [
        *["plain", "plain", "close plain"],
        *["plain", "forebay", "forebay", "plain", "plain", "forebay", "forebay", "plain"],
        "close plain",
        "close forebay",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (replace(FOREBAY, first_loss=4.000000000000001), "do not compute the same"),
        (replace(FOREBAY, loss_shift=0.01), "losses after updates differ"),
        (replace(FOREBAY, loss_shift=float("nan")), "has losses"),
    ],
)
def test_unequal_losses_are_refused_and_everyone_is_closed(changed: Scripted, message: str) -> None:
    log: list[str] = []
    with pytest.raises(BenchmarkError, match=message):
        run(case_of(PLAIN, changed), log)
    assert sorted(log[-2:]) == ["close forebay", "close plain"]


def test_losses_after_an_update_may_differ_in_rounding() -> None:
    scores = run(case_of(PLAIN, replace(FOREBAY, loss_shift=1e-6)))
    assert [score.outcome for score in scores] == [Outcome.FINISHED] * 2


def test_a_contender_that_runs_out_of_memory_keeps_its_row() -> None:
    log: list[str] = []
    plain, forebay = run(case_of(PLAIN, replace(FOREBAY, fails_in=WARMUP + 1)), log)
    assert forebay.outcome is Outcome.OUT_OF_MEMORY
    assert forebay.detail == "MemoryError: no room for an activation"
    assert forebay.seconds == (1.5,)
    assert forebay.ratios == (1.5,)
    assert len(plain.seconds) == ROUNDS
    assert log.count("close forebay") == 1


def test_a_contender_that_cannot_start_keeps_its_row() -> None:
    plain, forebay = run(case_of(PLAIN, replace(FOREBAY, fails_to_start=True)))
    assert (forebay.outcome, forebay.median, forebay.ratio) == (Outcome.OUT_OF_MEMORY, None, None)
    assert len(plain.seconds) == ROUNDS


def test_without_a_baseline_there_is_no_ratio() -> None:
    plain, forebay = run(case_of(replace(PLAIN, fails_to_start=True), FOREBAY))
    assert plain.outcome is Outcome.OUT_OF_MEMORY
    assert forebay.seconds == (1.5, 3.5, 5.5)
    assert forebay.ratio is None


def test_other_errors_are_not_kept_as_a_row() -> None:
    def start(contender: Contender) -> Runner:
        with noticing_exhaustion(out_of_memory):
            raise ValueError("a fault of its own")

    with pytest.raises(ValueError, match="a fault of its own"):
        race(case_of(PLAIN, FOREBAY), start, say=lambda line: None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"contenders": (PLAIN, PLAIN, FOREBAY)}, "one name"),
        ({"baseline": "nobody"}, "the baseline is 'nobody'"),
        ({"subject": "nobody"}, "the subject is 'nobody'"),
        ({"control": "nobody"}, "the control is 'nobody'"),
        ({"rounds": 2}, "at least 3 rounds"),
        ({"steps": 1}, "at least 2 steps"),
    ],
)
def test_a_case_is_validated_at_birth(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BenchmarkError, match=message):
        case_of(*changes.pop("contenders", (PLAIN, FOREBAY)), **changes)


# A contender in a process of its own


def isolated(contender: Contender, folder: Path) -> IsolatedRunner:
    return IsolatedRunner(contender, Job(TINY, 2, 8, DeviceKind.CPU, folder), STEPS)


def test_a_process_of_its_own_answers_like_a_contender_here(tmp_path: Path) -> None:
    runner = isolated(replace(FOREBAY, fails_in=1), tmp_path)
    try:
        assert runner.turn(0).losses == (5.0, 3.0)
        account = runner.account()
        assert account.counters == {"fetches": 7}
        assert account.peaks["device"] == 2**20
        assert account.peaks["process"] > 2**20
        with pytest.raises(OutOfMemory, match="no room for an activation"):
            runner.turn(1)
    finally:
        runner.close()
        runner.close()


def test_a_process_that_cannot_start_its_contender_says_why(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match="no room for the model"):
        isolated(replace(FOREBAY, fails_to_start=True), tmp_path)


def test_real_contenders_compute_the_same_and_a_tight_budget_is_a_row(tmp_path: Path) -> None:
    tight = Forebay(name="tight", device_memory="4KiB", policy="stream")
    case = case_of(PLAIN_TORCH, FUSED, Forebay(device_memory="64MiB", policy="stream"), tight)

    def start(contender: Contender) -> Runner:
        job = Job(case.model, case.batch, case.seq, case.device, tmp_path / contender.name)
        with noticing_exhaustion(exhausted):
            return LocalRunner(contender.start(job), case.steps, time.perf_counter, exhausted)

    plain, fused, streamed, refused = race(case, start, say=lambda line: None, alone_rounds=1)
    assert [len(score.ratios) for score in (plain, fused, streamed)] == [ROUNDS] * 3
    assert streamed.account.lanes["h2d"].nbytes > 0
    assert streamed.account.peaks["host"] >= TINY.parameter_bytes
    assert refused.outcome is Outcome.OUT_OF_MEMORY
    assert refused.detail.startswith("DoesNotFit: device memory")
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


# Models and cases


def test_the_closed_form_of_the_parameters_is_the_models_own() -> None:
    model = TINY.build(seq=8, device="meta")
    assert sum(parameter.numel() for parameter in model.parameters()) == TINY.parameters


def test_flops_of_a_step_by_hand() -> None:
    # Per layer: q and o 16x16, k and v 16x8, three of 16x24; the head is 32x16.
    matrices = 2 * (2 * 256 + 2 * 128 + 3 * 384) + 512
    assert TINY.matrix_parameters == matrices
    # Causal attention: two products of seq x seq x hidden, half of each; backward costs twice the forward.
    attention = 2 * 2 * (2 * 8 * 8 * 16) / 2
    assert TINY.flops(batch=3, seq=8) == 3 * 3 * (2 * matrices * 8 + attention)


def test_a_model_is_the_same_for_everyone() -> None:
    first, second = (TINY.build(seq=8, device="cpu") for _ in range(2))
    for (name, a), (_, b) in zip(first.named_parameters(), second.named_parameters(), strict=True):
        assert a.equal(b), name
    batch = TINY.batch(2, 8, "cpu", seed=3)
    assert batch["input_ids"].equal(TINY.batch(2, 8, "cpu", seed=3)["input_ids"])
    assert not batch["input_ids"].equal(TINY.batch(2, 8, "cpu", seed=4)["input_ids"])


def test_every_case_has_plain_torch_a_control_forebay_and_a_limit() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        assert {"plain", "plain-fused", "plain-again", "forebay"} <= {contender.name for contender in case.contenders}
        assert case.limit.seconds is not None
        assert case.limit.seconds(FACTS) > 0


def test_cases_are_listed_without_torch() -> None:
    program = "import sys, benchmarks.gpu, benchmarks.cases; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0


# Results and the table

FACTS = Facts(
    parameters=1000,
    parameter_bytes=4000,
    flops=1e9,
    flops_per_second=1e10,
    update_bytes_per_second=1e10,
    h2d_bytes_per_second=1e10,
    d2h_bytes_per_second=1e10,
)
MACHINE = Hardware(cpu="Some CPU @ 2 GHz", cores=2, memory_bytes=2**34)


def result_of(scores: tuple[Score, ...], day: int = 1, case: Case | None = None) -> Result:
    return collect(
        case or case_of(PLAIN, FOREBAY),
        scores,
        facts=FACTS,
        hardware=MACHINE,
        versions={"python": "3.11.7", "torch": "2.13.0"},
        threads=2,
        other_cores=0.01,
        code=Code("0123456789abcdef", True, "fedcba9876543210"),
        date=datetime(2026, 1, day, 12, 30, tzinfo=UTC),
        command="scripts/bench run fake",
    )


@pytest.fixture
def result() -> Result:
    return result_of(run(case_of(PLAIN, FOREBAY)))


def test_a_result_keeps_what_a_reader_needs_to_repeat_it(result: Result) -> None:
    kept = json.loads(dump(result))
    assert set(kept) == {
        "baseline", "case", "code", "command", "control", "date", "device", "facts", "hardware", "limit",
        "limit_seconds", "metric", "other_cores", "question", "rows", "schema", "shape", "subject", "target",
        "threads", "versions",
    }  # fmt: skip
    assert set(kept["hardware"]) == {"cpu", "cores", "memory_bytes", "gpu", "gpu_memory_bytes", "driver"}
    assert set(kept["code"]) == {"revision", "dirty", "sha256"}
    row = kept["rows"][1]
    assert set(row) == {
        "account", "alone", "budgets", "detail", "median_ratio", "median_seconds", "name", "outcome", "ratios",
        "seconds", "tokens_per_second", "what",
    }  # fmt: skip
    assert row["seconds"] == [1.5, 3.5, 5.5]
    assert row["tokens_per_second"] == 16 / 3.5
    assert row["account"]["lanes"]["h2d"] == {"nbytes": 2_000_000_000, "busy_seconds": 0.5, "bytes_per_second": 4e9}
    assert kept["limit_seconds"] == 0.5


def test_a_result_is_read_back_as_it_was(result: Result, tmp_path: Path) -> None:
    path = save(result, tmp_path)
    assert path.name == "fake-20260101T123000Z-some-cpu-2-ghz-2-cores.json"
    assert load_all(tmp_path) == [result]


def test_a_result_of_another_schema_is_refused(result: Result) -> None:
    with pytest.raises(ConfigError, match="schema 99"):
        load(Result, json.dumps(json.loads(dump(result)) | {"schema": 99}))


def test_the_table_shows_the_latest_and_forebays_result_before_it(result: Result) -> None:
    later = result_of(run(case_of(PLAIN, replace(FOREBAY, tail=0.0))), day=2)
    text = render([result, later])
    rows = [line for line in text.splitlines() if line.startswith(("| plain", "| forebay"))]
    assert rows == [
        "| plain: a script | 2.0000 | 1.000 | 1.000 - 1.000 | - | 8 | device 1 MiB | h2d 4.00 GB/s |",
        "| forebay: a script | 3.0000 | 1.250 | 1.000 - 1.500 | 1.500 | 5 | device 1 MiB | h2d 4.00 GB/s |",
    ]
    assert "Target 1.20 or less; measured 1.250: missed (plain: 1.000)." in text
    assert "plain alone, before the others were set up: 1.0000 s" in text
    assert "commit 0123456789ab with changes" in text
    assert "2026-01-02 12:30 UTC. `scripts/bench run fake`" in text


def test_a_run_on_a_crowded_host_is_not_judged(result: Result) -> None:
    text = render([replace(result, other_cores=0.7)])
    assert "measured 1.500: not judged, other processes kept 0.7 cores busy" in text


def test_cores_of_others_are_what_the_machine_did_and_we_did_not() -> None:
    busy, own, clock = iter((100.0, 130.0)), iter((5.0, 20.0)), iter((0.0, 10.0))
    meter = CpuMeter(busy=lambda: next(busy), own=lambda: next(own), clock=lambda: next(clock))
    assert meter.others() == 1.5


def test_the_table_keeps_a_row_that_ran_out_of_memory() -> None:
    text = render([result_of(run(case_of(PLAIN, replace(FOREBAY, fails_to_start=True))))])
    assert "| forebay: a script | out of memory | - | - | - | - | not measured | - |" in text
    assert "no ratio was measured" in text


def test_the_table_replaces_the_generated_part_only(result: Result, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    page.write_text("before\n<!-- table: begin -->\nold\n<!-- table: end -->\nafter\n")
    write([result], page)
    once = page.read_text()
    assert once.startswith("before\n")
    assert once.endswith("\nafter\n")
    assert "old" not in once
    write([result], page)
    assert page.read_text() == once
    page.write_text("no markers")
    with pytest.raises(BenchmarkError, match="needs the lines"):
        write([result], page)
