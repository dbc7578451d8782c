"""The plot of ``forebay compare``: what it shows, and what it refuses."""

from __future__ import annotations

import sys
from math import isnan
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forebay.cli.compare import draw, expect_picture
from forebay.cli.main import app
from forebay.errors import ConfigError, StorageError
from forebay.reporting.comparison import Candidate, Measured
from forebay.reporting.plot import expect_plottable, figure_of, plot
from forebay.reporting.side_by_side import Comparison
from forebay.units import GiB, MiB

FOUND = (
    Candidate("auto", 8 * GiB, 0.1, 1.5, measured=Measured(step_seconds=1.6)),
    Candidate("l2l", 8 * GiB, 0.1, 2.0, measured=Measured(reason="it broke")),
    Candidate("zero-offload", 8 * GiB, 0.1, reason="too large"),
    Candidate("never", 8 * GiB, 0.1, reason="too large"),
    Candidate("auto", 16 * GiB, 0.1, 1.0),
    Candidate("l2l", 16 * GiB, 0.1, 1.9),
    Candidate("zero-offload", 16 * GiB, 0.1, 2.5),
    Candidate("never", 16 * GiB, 0.1, reason="too large"),
)


def test_one_line_a_policy_with_labels_and_units() -> None:
    pytest.importorskip("matplotlib")
    (axes,) = figure_of("a model here", FOUND).axes
    lines = {line.get_label(): line for line in axes.get_lines() if not line.get_label().startswith("_")}
    # The legend is in the order in which the lines end at the right; what never fits has none.
    assert list(lines) == ["zero-offload", "l2l", "auto"]
    assert list(lines["auto"].get_xdata()) == [8, 16] and list(lines["auto"].get_ydata()) == [1.5, 1.0]
    gap, there = lines["zero-offload"].get_ydata()
    assert isnan(gap) and there == 2.5
    assert axes.get_xlabel() == "device budget (GiB)" and axes.get_ylabel() == "step (seconds)"
    assert axes.get_title() == "a model here" and axes.get_ylim()[0] == 0.0 and axes.get_yscale() == "linear"
    # Measured: one line, in dashes; a run that failed has no point.
    dashed = [line for line in axes.get_lines() if line.get_linestyle() == "--"]
    assert [next(iter(line.get_ydata())) for line in dashed] == [1.6]


def test_small_budgets_and_far_apart_steps() -> None:
    pytest.importorskip("matplotlib")
    far = (Candidate("auto", 8 * MiB, 0.1, 0.1), Candidate("l2l", 8 * MiB, 0.1, 5.0))
    (axes,) = figure_of("a model here", far).axes
    assert axes.get_xlabel() == "device budget (MiB)" and axes.get_yscale() == "log"
    (empty,) = figure_of("nothing fits", [FOUND[2]]).axes
    assert not empty.get_lines()


@pytest.mark.parametrize("name", ["plot.png", "plot.SVG"])
def test_the_file_is_written(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    plot("a model here", FOUND, tmp_path / name)
    start = (tmp_path / name).read_bytes()[:8]
    assert start.startswith(b"\x89PNG") or start.startswith(b"<?xml")


def test_what_cannot_be_drawn_is_misuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"a plot is a \.png or \.svg file"):
        expect_plottable(tmp_path / "plot.pdf")
    with pytest.raises(ConfigError, match="there is no folder"):
        expect_plottable(tmp_path / "missing" / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'forebay\[report\]'"):
        expect_plottable(tmp_path / "plot.png")


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "plot.png").mkdir()
    with pytest.raises(StorageError, match="cannot write the plot"):
        plot("a model here", FOUND, tmp_path / "plot.png")


def test_a_page_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = Comparison("a model here", FOUND, ("rates are typical",))
    expect_picture(tmp_path / "plot.html")
    draw(found, tmp_path / "plot.html")
    page = (tmp_path / "plot.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "rates are typical" in page
    with pytest.raises(ConfigError, match=r"a plot is a \.png or \.svg or \.html file"):
        expect_picture(tmp_path / "plot.pdf")
    with pytest.raises(ConfigError, match="there is no folder"):
        expect_picture(tmp_path / "missing" / "plot.html")
    (tmp_path / "taken.html").mkdir()
    with pytest.raises(StorageError, match="cannot write the plot"):
        draw(found, tmp_path / "taken.html")


def test_the_command_refuses_before_it_plans(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", "no-such-model", "--plot", str(tmp_path / "plot.gif")])
    assert done.exit_code == 2 and done.stderr.startswith("forebay: --plot") and "Traceback" not in done.output
