"""Plain lines: one after the first step and one for each tenth, whatever the number of steps."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from forebay.cli.progress import LiveProgress, PlainProgress, StepResult, choose_view


def result(number: int) -> StepResult:
    return StepResult(number, loss=5.0 / number, lr=0.1, tokens=100 * number, elapsed=2.0 * number)


@pytest.mark.parametrize(("steps", "lines"), [(1, 1), (3, 3), (10, 10), (100, 11), (95, 11), (1000, 11)])
def test_how_many_lines(steps: int, lines: int) -> None:
    text = io.StringIO()
    view = PlainProgress(Console(file=text, width=80))
    view.start(steps, lambda: 2**20)
    for number in range(1, steps + 1):
        view.step(result(number))
    view.stop()
    shown = text.getvalue().splitlines()
    assert len(shown) == lines
    assert shown[-1] == f"step {steps}/{steps}  loss {5.0 / steps:.4f}  50 tokens/s  device peak 1.0 MiB"


def test_a_bar_on_a_terminal_and_lines_in_a_file() -> None:
    assert isinstance(choose_view(Console(file=io.StringIO(), force_terminal=True)), LiveProgress)
    assert isinstance(choose_view(Console(file=io.StringIO(), force_terminal=False)), PlainProgress)


def test_the_bar_shows_the_last_loss() -> None:
    text = io.StringIO()
    view = LiveProgress(Console(file=text, force_terminal=True, width=100))
    view.start(2, lambda: None)
    view.step(result(1))
    view.step(result(2))
    view.stop()
    assert "2/2" in text.getvalue()
    assert "loss 2.5000" in text.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_sentences_of_a_list_are_wrapped_for_a_terminal(terminal: bool) -> None:
    text = io.StringIO()
    view = choose_view(Console(file=text, force_terminal=terminal, width=40, no_color=True))
    command = "go on with: forebay train --run /a/rather/long/path --resume"
    view.note(f"plan by auto\n  - {'many words ' * 8}\n{command}")
    lines = text.getvalue().splitlines()
    assert lines[0] == "plan by auto" and lines[-1] == command
    if terminal:
        assert len(lines) == 5 and all(len(line) <= 40 for line in lines[:-1])
        assert lines[2].startswith("    many") or lines[2].startswith("    words")
    else:
        assert len(lines) == 3


def test_the_bar_fits_80_columns_when_figures_are_long() -> None:
    text = io.StringIO()
    view = LiveProgress(Console(file=text, force_terminal=True, width=80, no_color=True))
    view.start(100_000, lambda: 123 * 2**30)
    view.step(StepResult(99_999, 12.3456, 0.1, 123_456_789, 1000.0))
    view.stop()
    drawn = [line for line in re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", text.getvalue()) if "99999" in line]
    assert drawn and max(map(len, drawn)) <= 80
    for said in ("99999/100000", "loss 12.3456", "123.5 k tokens/s", "device 123.0 GiB"):
        assert said in drawn[-1], drawn[-1]
