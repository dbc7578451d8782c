"""Contenders of the benchmarks: in a process of their own, the real ones beside each other, their models and cases."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.case import Contender, DeviceKind, Job, OutOfMemory
from benchmarks.cases import CASES
from benchmarks.contenders import FUSED, Forebay, exhausted
from benchmarks.contenders import PLAIN as PLAIN_TORCH
from benchmarks.isolated import IsolatedRunner
from benchmarks.measure import LocalRunner, Outcome, Runner, noticing_exhaustion, race
from tests.null.benching import FACTS, FOREBAY, ROUNDS, STEPS, TINY, case_of


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
        assert {"plain", "plain-again", "forebay"} <= {contender.name for contender in case.contenders}
        assert case.limit.seconds is not None
        assert case.limit.seconds(FACTS) > 0


def test_cases_are_listed_without_torch() -> None:
    program = "import sys, benchmarks.gpu, benchmarks.cases; sys.exit('torch' in sys.modules)"
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
