"""Runs one case for real and puts its result together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.case import BenchmarkError, Case, Contender, DeviceKind, Job
from benchmarks.isolated import IsolatedRunner
from benchmarks.measure import Runner, race
from benchmarks.provenance import Timing
from benchmarks.rates import facts, fastest
from benchmarks.result import Result, collect

__all__ = ["run_case"]


def run_case(case: Case, *, say: Callable[[str], None], revision: str | None = None) -> Result:
    """Runs ``case`` on this machine.

    Raises ``BenchmarkError`` where it lacks the device, and when the code changes meanwhile.
    """
    import torch

    on_card = case.device is DeviceKind.CUDA
    if on_card and not torch.cuda.is_available():
        raise BenchmarkError(f"case {case.name} needs a CUDA device; torch {torch.__version__} finds none")
    timing = Timing(f"scripts/bench run {case.name}", with_gpu=on_card, revision=revision)
    with tempfile.TemporaryDirectory(prefix="forebay-benchmark-") as folder:
        job = Job(case.model, case.batch, case.seq, case.device, Path(folder))

        def start(contender: Contender) -> Runner:
            return IsolatedRunner(contender, replace(job, scratch=job.scratch / contender.name), case.steps)

        rates_before = facts(job)
        if on_card:
            torch.cuda.empty_cache()
        scores = race(case, start, say)
        measured = fastest(rates_before, facts(job))
        scores = tuple(replace(score, detail=score.detail.replace(folder, "SCRATCH")) for score in scores)
    return collect(case, scores, measured, timing.ended())
