"""What a benchmark case says. Data only: nothing here imports torch, so that listing cases is quick.

Vocabulary
    *contender*  one way to run the user's training step: forebay, plain PyTorch, a rival. A recipe.
    *running*    a contender that is set up: model and optimizer exist.
    *baseline*   the contender that ratios are taken to.
    *turn*       one contender's steps inside a round.
    *round*      one turn of every contender, in an order that rotates.
    *limit*      the seconds that a step must take on this machine, whoever runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any

from benchmarks.models import LlamaShape

__all__ = [
    "Account",
    "BenchmarkError",
    "Case",
    "Contender",
    "DeviceKind",
    "Facts",
    "Job",
    "LaneUse",
    "Limit",
    "OutOfMemory",
    "Running",
    "among",
]


class BenchmarkError(Exception):
    """A benchmark that cannot be run, or whose result must not be kept."""


def among(what: str, wanted: Sequence[str], there: Sequence[str]) -> Sequence[str]:
    """``wanted``, or all that are ``there`` where none is. Raises ``BenchmarkError`` for a name that is not."""
    for name in wanted:
        if name not in there:
            near = get_close_matches(name, there, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            raise BenchmarkError(f"there is no {what} {name} here; {meant}there are {', '.join(there)}")
    return wanted or there


class OutOfMemory(BenchmarkError):
    """A contender did not fit. That is a result: the row is kept and says so."""


class DeviceKind(StrEnum):
    """The device that a case needs; the value is what torch calls it."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True)
class Job:
    """What a contender is given: the model's shape, the batch, the device, a folder of its own for files."""

    model: LlamaShape
    batch: int
    seq: int
    device: DeviceKind
    scratch: Path


@dataclass(frozen=True)
class LaneUse:
    """What one lane did: bytes moved, seconds during which it was busy, and the rate while busy in bytes/s."""

    nbytes: int
    busy_seconds: float
    bytes_per_second: float | None


@dataclass(frozen=True)
class Account:
    """What a contender says about itself: peaks in bytes by tier, lanes, counters, and what is worth a note."""

    peaks: Mapping[str, int] = field(default_factory=dict)
    lanes: Mapping[str, LaneUse] = field(default_factory=dict)
    counters: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


class Running(ABC):
    """A contender that is set up. Only ``step`` and ``finish`` are timed."""

    @abstractmethod
    def reset(self, batches: int, first_seed: int) -> None:
        """Puts the parameters back to the seeded ones and makes ``batches`` batches from ``first_seed`` on."""

    @abstractmethod
    def step(self, index: int) -> Any:
        """Runs one training step on batch ``index``; returns the loss in a form that ``read`` takes."""

    @abstractmethod
    def finish(self) -> None:
        """Waits for whatever the steps left under way."""

    @abstractmethod
    def read(self, loss: Any) -> float:
        """The loss as a number, exactly."""

    @abstractmethod
    def account(self) -> Account:
        """What was used so far."""

    @abstractmethod
    def close(self) -> None:
        """Gives everything back."""


@dataclass(frozen=True)
class Contender(ABC):
    """A recipe for a ``Running``. ``name`` is unique within a case, ``what`` says in words what it is."""

    name: str
    what: str

    @property
    @abstractmethod
    def budgets(self) -> Mapping[str, str]:
        """Allowed bytes by tier, as written; empty for a contender without budgets."""

    @abstractmethod
    def start(self, job: Job) -> Running:
        """Sets the contender up. Raises what its libraries raise, out-of-memory errors included."""


@dataclass(frozen=True)
class Facts:
    """What a limit is computed from: the step's size, and rates measured on this machine in the same run.

    ``flops`` of one step, ``parameter_bytes`` in the model's dtype, ``flops_per_second`` of a large matrix product
    in that dtype, ``update_bytes_per_second`` of an in-place update in host memory (bytes read and written),
    ``h2d_bytes_per_second`` and ``d2h_bytes_per_second`` between host and device (bytes copied).
    """

    parameters: int
    parameter_bytes: int
    flops: float
    flops_per_second: float
    update_bytes_per_second: float
    h2d_bytes_per_second: float
    d2h_bytes_per_second: float


@dataclass(frozen=True)
class Limit:
    """The physical limit of a step: the formula in words, and the same as a function of facts (seconds)."""

    words: str
    seconds: Callable[[Facts], float] | None = None


@dataclass(frozen=True)
class Case:
    """One question, put to several contenders.

    ``target`` is the largest ratio of ``subject`` to ``baseline`` that is acceptable; ``control`` is the baseline once
    more, whose ratio says what the run can tell apart. Each of ``rounds`` gives every
    contender ``steps`` steps; ``warmup`` rounds before them are compared and not counted. The first loss of each
    turn must be equal to the last bit; the later ones follow an update, which may differ in rounding, and must agree
    within ``tolerance`` (relative). ``limit_seconds`` of one run of the case is what ``gpu`` allows it.
    """

    name: str
    question: str
    model: LlamaShape
    batch: int
    seq: int
    device: DeviceKind
    contenders: tuple[Contender, ...]
    limit: Limit
    target: float | None = None
    baseline: str = "plain"
    subject: str = "forebay"
    control: str = "plain-again"
    metric: str = "seconds per step"
    rounds: int = 9
    warmup: int = 2
    steps: int = 3
    tolerance: float = 1e-4
    limit_seconds: int = 300

    def __post_init__(self) -> None:
        names = [c.name for c in self.contenders]
        if len(set(names)) != len(names):
            raise BenchmarkError(f"case {self.name}: two contenders have one name: {', '.join(names)}")
        for role, name in (("baseline", self.baseline), ("subject", self.subject), ("control", self.control)):
            if name not in names:
                raise BenchmarkError(f"case {self.name}: the {role} is {name!r}, the contenders are {', '.join(names)}")
        if self.rounds < 3 or self.warmup < 1:
            raise BenchmarkError(f"case {self.name}: needs at least 3 rounds and 1 of warm-up")
        if self.steps < 2:
            raise BenchmarkError(f"case {self.name}: needs at least 2 steps a turn: the second loss shows the update")

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.batch * self.seq
