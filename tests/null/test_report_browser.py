"""The page in a headless browser, where there is one: no complaint, no request, no sideways scrolling, keys that work,
and a step of 10,000 events that moves smoothly. ``browsing`` takes pictures of a page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from forebay.memory import Tier
from forebay.reporting.compare_page import render_comparison
from forebay.reporting.comparison import Candidate
from forebay.reporting.run_page import render
from forebay.timeline import Event, Lane
from tests.null.browsing import Browser, chromium
from tests.null.reported import PAGE, REPORT, MiB

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium: apt-get install chromium")

FRAME = 1000 / 60
"""Milliseconds of script that a frame may take, in the median, with 10,000 events."""

READ = "document.querySelector('#{} .readout').textContent"
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


def test_ten_thousand_events_are_smooth(tmp_path: Path) -> None:
    lanes = (Lane.COMPUTE, Lane.H2D, Lane.D2H, Lane.UPDATE)
    made = [
        Event(lane, 103.0 + place / 1250, 103.0 + (place + 0.7) / 1250, MiB, f"forward layers.{place % 40}")
        for place in range(2500)
        for lane in lanes
    ]
    report = replace(REPORT, timeline=replace(REPORT.timeline, events=tuple(made)))
    with Browser(tmp_path / "profile") as browser:
        shown(browser, tmp_path, render(replace(PAGE, report=report)))
        assert browser.ask("data.lanes.measured.events.length") == 10_000
        # Every frame draws all of it: some of the whole step, some of a part of it.
        frames = browser.ask("""(async () => {
            const canvas = document.querySelector('#lanes canvas');
            const spent = [], paint = Lanes.prototype.paint;
            Lanes.prototype.paint = function () {
                const before = performance.now();
                paint.call(this);
                spent.push(performance.now() - before);
            };
            const keys = ['ArrowRight', '+', 'ArrowRight', '+', '-', '-', 'ArrowDown', 'ArrowLeft'];
            for (let turn = 0; turn < 40; turn += 1) {
                canvas.dispatchEvent(new KeyboardEvent('keydown', { key: keys[turn % keys.length] }));
                await new Promise(requestAnimationFrame);
            }
            return spent;
        })()""")
        assert len(frames) >= 30
        assert sorted(frames)[len(frames) // 2] < FRAME, sorted(frames)
        expect_at_peace(browser)


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
