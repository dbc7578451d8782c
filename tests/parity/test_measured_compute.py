"""Compute events of a run: one for each visit of a block, named as a program names them."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
import torch

import forebay
from forebay.memory import Kind, Tier
from forebay.runtime.measure import SHORTEST
from forebay.timeline import Event, Lane
from tests.parity.compare import adamw
from tests.parity.models import CASES
from tests.parity.recomputing import AMPLE, plan_for

LAYERS = [f"model.layers.{i}" for i in range(4)]


def compute_events(recompute: list[str], *, resident: bool, name: str = "llama") -> list[Event]:
    """Those of the last of two steps, in order: later ones are not all looked at where nothing streams."""
    case = CASES[name]
    model = case.model(torch.float32)
    plan = plan_for(case, torch.float32, recompute, resident=resident, slots=2)
    model, optimizer = forebay.prepare(
        model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu"
    )
    for step in range(2):
        if step == 1:
            before = len(forebay.report(model).timeline.events)
        model(**case.inputs(step, torch.float32))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    events = forebay.report(model).timeline.events[before:]
    forebay.close(model)
    return sorted((e for e in events if e.lane is Lane.COMPUTE), key=lambda e: e.start)


def visits(events: list[Event]) -> list[str]:
    """Names of the visits to layers, in order: a wait may cut one visit into several events."""
    names = [e.what for e in events if "layers" in e.what]
    return [name for name, _ in groupby(names)]


@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
@pytest.mark.parametrize("recompute", [[], LAYERS, LAYERS[1:3]], ids=["none", "all", "some"])
def test_each_block_is_told_apart(recompute: list[str], resident: bool) -> None:
    forward = [f"forward {name}" for name in LAYERS]
    backward = []
    for name in reversed(LAYERS):
        # Autograd reads what a layer has saved, which sets off the recomputation, and goes on with its backward.
        backward += [f"recompute {name}"] if name in recompute else []
        backward.append(f"backward {name}")
    seen = visits(compute_events(recompute, resident=resident))
    # The look at the input that comes before a recomputation is a visit of no length to speak of.
    folded = [w for w, n in zip(seen, [*seen[1:], ""], strict=True) if n != w.replace("backward", "recompute")]
    assert folded == forward + backward


@pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
def test_compute_does_one_thing_at_a_time(resident: bool) -> None:
    events = compute_events(LAYERS, resident=resident)
    for event, following in pairwise(events):
        assert event.start <= event.end <= following.start
    # What lies outside of all blocks is named by its phase alone.
    assert {e.what for e in events} - {f"{v} {b}" for v in VERBS for b in BLOCKS} <= {"forward", "backward"}
    assert all(e.end - e.start >= SHORTEST for e in events if e.what in ("forward", "backward"))


VERBS = ("forward", "backward", "recompute")
BLOCKS = ("model.embed_tokens", *LAYERS, "model.norm", "lm_head")


def test_a_block_that_the_model_checkpoints_itself_is_part_of_backward() -> None:
    """As in a trace, where what runs in backward is of that phase."""
    seen = visits(compute_events([], resident=False, name="checkpointed"))
    assert seen == [f"forward {n}" for n in LAYERS] + [f"backward {n}" for n in reversed(LAYERS)]


def test_the_bytes_of_every_tier_are_noted_as_compute_goes_on() -> None:
    case = CASES["llama"]
    model = case.model(torch.float32)
    plan = plan_for(case, torch.float32, LAYERS[1:3], resident=False, slots=2)
    model, optimizer = forebay.prepare(
        model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu"
    )
    for step in range(4):
        model(**case.inputs(step, torch.float32))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    timeline = forebay.report(model).timeline
    forebay.close(model)
    # Of four steps the first two are seen, and the second of these is kept.
    start, end = timeline.steps()[1]
    assert all(start <= level.time <= end for level in timeline.levels)
    assert len(timeline.step_starts) == len(timeline.step_seconds) == 4
    for usage in timeline.tiers:
        levels = [level for level in timeline.levels if level.tier is usage.tier]
        assert all(sum(level.live.values()) <= level.high <= usage.peak for level in levels)
        assert max(level.high for level in levels) == usage.peak, usage
    device = [level for level in timeline.levels if level.tier is Tier.DEVICE]
    assert len(device) > 2 * len(LAYERS)
    # It fills in forward and is empty again but for the slots in the end.
    assert sum(device[0].live.values()) <= plan.device
    assert device[-1].live.keys() <= {Kind.PARAMETER, Kind.BUFFER, Kind.INPUT, Kind.TEMPORARY}
    assert max(level.live.get(Kind.ACTIVATION, 0) for level in device) > 0
