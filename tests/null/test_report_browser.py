"""The page in a headless browser, where there is one: no complaint, no request, no sideways scrolling, keys that work,
and a step of 10,000 events of which a frame draws what can be seen. ``browsing`` takes pictures of a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from forebay.memory import Tier
from forebay.reporting.compare_page import render_comparison
from forebay.reporting.comparison import Candidate
from forebay.reporting.losses import StepLine
from forebay.reporting.run_page import render
from forebay.timeline import Event, Lane
from tests.null.browsing import Browser, chromium
from tests.null.reported import PAGE, REPORT, MiB

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium")

FRAME = 1000 / 60
"""Milliseconds of script that a frame may take, in the median, with 10,000 events."""

READ = "document.querySelector('#{} .readout').textContent"
LANES = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.UPDATE)
FOCUS = "document.querySelector('#{} canvas').focus()"


@pytest.fixture(params=[(1100, False), (390, True)], ids=["wide-light", "phone-dark"])
def browser(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Browser]:
    width, dark = request.param
    with Browser(tmp_path / "profile", width, dark=dark) as opened:
        yield opened


def shown(browser: Browser, folder: Path, source: str) -> None:
    (folder / "page.html").write_text(source, encoding="utf-8")
    browser.open(folder / "page.html")


def expect_at_peace(browser: Browser) -> None:
    assert browser.complaints == []
    assert [address for address in browser.requests if not address.startswith("file:")] == []
    assert len(browser.requests) == 1
    assert browser.ask("document.documentElement.scrollWidth <= innerWidth")


def test_the_page_of_a_run(browser: Browser, tmp_path: Path) -> None:
    shown(browser, tmp_path, render(PAGE))
    assert browser.ask("[...document.querySelectorAll('canvas')].every(c => c.width > 200 && c.height > 100)")
    assert browser.ask(READ.format("loss")) == "step 2: loss 5.250"
    assert browser.ask(READ.format("speed")) == "step 2: measured 160, predicted 160"
    browser.ask(FOCUS.format("loss"))
    browser.press("ArrowLeft")
    assert browser.ask(READ.format("loss")) == "step 1: loss 5.500"
    assert browser.ask(READ.format("lanes")).startswith(
        "predicted compute: forward embed, 500 ms from 500 ms to 1.00 s"
    )
    browser.ask(FOCUS.format("lanes"))
    browser.press("ArrowDown", "ArrowDown", "+", "+", "ArrowRight")
    said = browser.ask(READ.format("lanes"))
    assert said == "predicted h2d: fetch embed, 500 ms from 0 s to 500 ms, 2.0 MiB, 4.0 MiB/s (1 of 1)"
    browser.ask(FOCUS.format("memory"))
    assert "measured 5.0 MiB (parameter 2.0 MiB, activation 3.0 MiB)" in browser.ask(READ.format("memory"))
    # Tab leads from the chart's buttons to the chart: nothing keeps the focus.
    browser.ask("document.querySelector('#memory button').focus()")
    browser.press("Tab", "Tab")
    assert browser.ask("document.activeElement.tagName") == "CANVAS"
    browser.ask("document.querySelectorAll('#memory button')[1].click()")
    assert "state 24.0 MiB" in browser.ask(READ.format("memory"))
    expect_at_peace(browser)


BLUE = """(() => {
    const canvas = document.querySelector('#loss canvas');
    const [, r, g, b] = colour('c0').match(/#(..)(..)(..)/).map((hex) => parseInt(hex, 16));
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let found = 0;
    for (let at = 0; at < data.length; at += 4) found += data[at] === r && data[at + 1] === g && data[at + 2] === b;
    return found;
})()"""
"""Pixels of the chart of losses in the colour of its line."""


def test_losses_that_are_missing(tmp_path: Path) -> None:
    def losses(*values: float | None) -> str:
        lines = (StepLine(place, value, 1e-3, 2.0 if place > 1 else None) for place, value in enumerate(values, 1))
        return render(replace(PAGE, losses=tuple(lines)))

    with Browser(tmp_path / "profile") as browser:
        shown(browser, tmp_path, losses(None, None))
        assert browser.ask("document.querySelectorAll('#loss canvas').length") == 0
        assert "No step had a finite loss" in browser.ask("document.querySelector('#loss').textContent")
        # The seconds of the first step were not kept, which says nothing of its loss.
        browser.ask(FOCUS.format("speed"))
        browser.press("Home")
        assert browser.ask(READ.format("speed")) == "step 1: measured not kept, predicted 160"
        shown(browser, tmp_path, losses(None, 5.0, None))
        assert browser.ask(READ.format("loss")) == "step 3: loss not finite"
        assert browser.ask(BLUE) >= 4  # a dot, which the cursor is not at
        assert browser.complaints == []


def test_a_tier_that_is_chosen_again_is_not_made_again(tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        shown(browser, tmp_path, render(PAGE))
        assert browser.ask("document.querySelectorAll('#memory button').length") == 2
        listeners = browser.ask("""(() => {
            const add = scheme.addEventListener.bind(scheme);
            let found = 0;
            scheme.addEventListener = (...how) => { found += 1; add(...how); };
            for (let turn = 1; turn < 21; turn += 1) document.querySelectorAll('#memory button')[turn % 2].click();
            return found;
        })()""")
        assert listeners == 1  # of the second tier: the first is there from the beginning
        assert browser.ask("document.querySelectorAll('#memory canvas').length") == 1
        assert browser.ask("document.querySelector('#memory canvas').width > 200")
        assert "parameter 2.0 MiB" in browser.ask(READ.format("memory"))
        expect_at_peace(browser)


@dataclass(frozen=True)
class Frames:
    """Frames of the lanes of a step of 10,000 events, some of the whole step, some of a part of it: ``spent``
    milliseconds of script and ``filled`` rectangles of each, after so many ``keys``. The canvas is ``width`` pixels."""

    keys: int
    width: int
    spent: list[float]
    filled: list[int]


def frames_of(folder: Path) -> Frames:
    made = [
        Event(lane, 103.0 + place / 1250, 103.0 + (place + 0.7) / 1250, MiB, f"forward layers.{place % 40}")
        for place in range(2500)
        for lane in LANES
    ]
    report = replace(REPORT, timeline=replace(REPORT.timeline, events=tuple(made)))
    with Browser(folder / "profile") as browser:
        shown(browser, folder, render(replace(PAGE, report=report)))
        assert browser.ask("data.lanes.measured.events.length") == 10_000
        found = browser.ask("""(async () => {
            const canvas = document.querySelector('#lanes canvas');
            const spent = [], filled = [], paint = Lanes.prototype.paint;
            const fill = CanvasRenderingContext2D.prototype.fillRect;
            let count = 0;
            CanvasRenderingContext2D.prototype.fillRect = function (...place) {
                count += 1;
                fill.apply(this, place);
            };
            Lanes.prototype.paint = function () {
                const before = performance.now();
                count = 0;
                paint.call(this);
                spent.push(performance.now() - before);
                filled.push(count);
            };
            const keys = ['ArrowRight', '+', 'ArrowRight', '+', '-', '-', 'ArrowDown', 'ArrowLeft'];
            for (let turn = 0; turn < 40; turn += 1) {
                // The second key of a frame asks for no second drawing.
                for (const key of [keys[turn % keys.length], 'ArrowRight', 'ArrowLeft']) {
                    canvas.dispatchEvent(new KeyboardEvent('keydown', { key }));
                }
                await new Promise(requestAnimationFrame);
            }
            return { keys: 40, width: canvas.clientWidth, spent, filled };
        })()""")
        expect_at_peace(browser)
    return Frames(**found)


def test_of_ten_thousand_events_is_drawn_what_can_be_seen_once_a_frame(tmp_path: Path) -> None:
    frames = frames_of(tmp_path)
    assert 30 <= len(frames.filled) <= frames.keys
    # Of the whole step all events of a lane are one bar, on a ground of its own, beside what was predicted.
    assert len(LANES) < min(frames.filled) and sorted(frames.filled)[len(frames.filled) // 2] <= 4 * len(LANES)
    # Of a part of it no more bars than a lane has pixels.
    assert max(frames.filled) <= len(LANES) * frames.width


@pytest.mark.slow  # of a machine that does nothing else: milliseconds
def test_ten_thousand_events_are_smooth(tmp_path: Path) -> None:
    spent = frames_of(tmp_path).spent
    assert sorted(spent)[len(spent) // 2] < FRAME, sorted(spent)


def test_the_page_of_a_comparison(browser: Browser, tmp_path: Path) -> None:
    candidates = [
        Candidate(f"policy-{place}", 8 * MiB, 0.1, 1.0 + place, {Tier.DEVICE: (place + 1) * MiB}) for place in range(5)
    ]
    shown(browser, tmp_path, render_comparison("tiny on here", candidates))
    assert browser.ask(READ.format("policies")).startswith(
        "policy-0 with 8.0 MiB: 1.00 s a step, 1.0 MiB on the device"
    )
    browser.ask(FOCUS.format("policies"))
    browser.press("ArrowRight", "ArrowRight")
    assert browser.ask(READ.format("policies")).startswith("policy-2 ")
    expect_at_peace(browser)
