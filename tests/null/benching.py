"""Scripted contenders and clocks for the tests of the benchmark harness."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from benchmarks.case import Account, Case, Contender, DeviceKind, Facts, Job, LaneUse, Limit, Running
from benchmarks.measure import LocalRunner, Runner, Score, noticing_exhaustion, race
from benchmarks.models import LlamaShape

__all__ = [
    "FACTS",
    "FOREBAY",
    "PLAIN",
    "ROUNDS",
    "STEPS",
    "TINY",
    "WARMUP",
    "Clock",
    "Scripted",
    "ScriptedRunning",
    "case_of",
    "out_of_memory",
    "run",
]

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

FACTS = Facts(
    parameters=1000,
    parameter_bytes=4000,
    flops=1e9,
    flops_per_second=1e10,
    update_bytes_per_second=1e10,
    h2d_bytes_per_second=1e10,
    d2h_bytes_per_second=1e10,
)
