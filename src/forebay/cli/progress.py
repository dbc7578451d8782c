"""How far a run is: a live bar on a terminal, a plain line every tenth of the way elsewhere. Both on stderr."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from textwrap import fill
from typing import final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from forebay.units import format_bytes, format_count, format_seconds

__all__ = ["LiveProgress", "PlainProgress", "StepResult", "View", "choose_view"]

BULLET = "  - "
"""Begins a sentence of a list."""


@dataclass(frozen=True)
class StepResult:
    """One step that is done: ``number`` counts from 1. ``taken`` steps were taken before this process began; ``tokens``
    and ``elapsed`` (seconds) are since then. ``skipped`` says why there was no update; empty: there was one."""

    number: int
    loss: float
    lr: float
    tokens: int
    elapsed: float
    taken: int = 0
    skipped: str = ""

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second so far."""
        return self.tokens / self.elapsed if self.elapsed > 0 else 0.0


class View(ABC):
    """Shows a run while it lasts. ``device_peak`` gives the peak of the device tier in bytes, None if unknown."""

    def __init__(self, console: Console) -> None:
        self.console = console

    @final
    def note(self, text: str) -> None:
        """A line that stays. A terminal has the sentences of a list wrapped at words; all else, commands above all, is
        left whole, so that it can be copied."""
        lines = text.splitlines()
        if self.console.is_terminal:
            lines = [_wrapped(line, self.console.width) if line.startswith(BULLET) else line for line in lines]
        # Where stderr takes nothing, as a log on a full disk, the run is worth more than the line.
        with suppress(OSError):
            self.console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)

    @abstractmethod
    def start(self, steps: int, device_peak: Callable[[], int | None]) -> None:
        """The first of ``steps`` steps is about to begin."""

    @abstractmethod
    def step(self, result: StepResult) -> None:
        """A step is done."""

    @abstractmethod
    def stop(self) -> None:
        """The loop is over, for whatever reason. A call without ``start`` does nothing."""


@final
class PlainProgress(View):
    """A line after the first step, and one for each tenth of the steps."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._steps = 0
        self._device_peak: Callable[[], int | None] = _nobody_knows

    def start(self, steps: int, device_peak: Callable[[], int | None]) -> None:
        self._steps, self._device_peak = steps, device_peak

    def step(self, result: StepResult) -> None:
        mine = result.number - result.taken
        tenth = 10 * result.number // self._steps > 10 * (result.number - 1) // self._steps
        if not tenth and mine > 1:
            return
        steps_left = self._steps - result.number
        left = f"{format_seconds(result.elapsed / mine * steps_left)} left  " if steps_left else ""
        self.note(
            f"step {result.number}/{self._steps}  loss {result.loss:.4f}  "
            f"{format_count(result.tokens_per_second)} tokens/s  {left}"
            f"device peak {_peak(self._device_peak())}"
        )

    def stop(self) -> None:
        self._device_peak = _nobody_knows  # it holds the model, whose bytes the next plan may need


@final
class LiveProgress(View):
    """A bar that is drawn over and over."""

    REFRESH_SECONDS = 1.0
    """How old the peak on display may be: asking for it costs an account of the whole run."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.completed}/{task.total}"),  # a MofNCompleteColumn is cut short where the line is full
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]} tokens/s"),
            TextColumn("device {task.fields[peak]}"),
            TimeRemainingColumn(),
            console=console,
        )
        self._device_peak: Callable[[], int | None] = _nobody_knows
        self._peak = "-"
        self._asked = float("-inf")

    def start(self, steps: int, device_peak: Callable[[], int | None]) -> None:
        self._device_peak = device_peak
        self._task = self._progress.add_task("", total=steps, loss="-", speed="-", peak="-")
        self._progress.start()

    def step(self, result: StepResult) -> None:
        now = time.monotonic()
        if now - self._asked >= self.REFRESH_SECONDS:
            self._peak, self._asked = _peak(self._device_peak()), now
        self._progress.update(
            self._task,
            completed=result.number,
            loss=f"{result.loss:.4f}",
            speed=format_count(result.tokens_per_second),
            peak=self._peak,
        )

    def stop(self) -> None:
        self._progress.stop()
        self._device_peak = _nobody_knows  # as above


def choose_view(console: Console) -> View:
    """A bar for a terminal, lines for a file or a pipe."""
    return LiveProgress(console) if console.is_terminal else PlainProgress(console)


def _wrapped(line: str, width: int) -> str:
    indent = " " * len(BULLET)
    return fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _nobody_knows() -> int | None:
    return None


def _peak(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_bytes(nbytes)
