"""Plans: JSON in and out, and what is refused at birth."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.budgets import Budget, DiskBudget
from forebay.errors import ConfigError
from forebay.layout import PAGE
from forebay.memory import Tier
from forebay.plans import PLAN_SCHEMA, Accumulation, Placement, Plan, Streaming, Update, updated, used_up
from forebay.units import GiB, MiB

PLAN = Plan(
    planner="test",
    budget=Budget(device=2 * GiB, host=8 * GiB, pinned=4 * GiB, disk=DiskBudget("/nvme", 64 * GiB)),
    placements=(
        Placement("embed", Tier.DEVICE, Tier.DEVICE, Tier.DEVICE),
        Placement("layers.0", Tier.HOST, Tier.HOST, Tier.DISK),
        Placement("layers.1", Tier.DISK, Tier.HOST, Tier.DISK),
    ),
    streaming=Streaming(slots=(64 * MiB, 32 * MiB), host_slots=(64 * MiB,), prefetch_distance=2),
    device=2_000_000_000,
    host=4_000_000_000,
    disk=9_000_000_000,
    reasons=("layers stream: 5.0 GiB of parameters, 2.0 GiB allowed",),
)
WHOLE: dict[str, Any] = json.loads(PLAN.to_json())

HOMES = st.sampled_from([Tier.DEVICE, Tier.HOST, Tier.DISK])


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    block = draw(st.text(min_size=1, max_size=20))
    states = draw(HOMES)
    if states is Tier.DEVICE:
        return Placement(block, Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
    able = [how for how in Update if how is not Update.STORAGE or states is Tier.DISK]
    return Placement(block, draw(HOMES), Tier.HOST, states, draw(st.sampled_from(able)))


SIZES = st.lists(st.integers(1, 2**50), max_size=4).map(lambda n: tuple(sorted((PAGE * i for i in n), reverse=True)))
BYTES = st.integers(1, 2**60)
PLANS = st.builds(
    Plan,
    planner=st.text(max_size=20),
    budget=st.builds(
        Budget,
        device=BYTES,
        host=st.none() | BYTES,
        pinned=st.none() | BYTES,
        disk=st.none() | st.builds(DiskBudget, path=st.text(max_size=20), nbytes=st.none() | BYTES),
    ),
    placements=st.lists(placements(), max_size=4).map(tuple),
    streaming=st.builds(
        Streaming,
        slots=SIZES,
        host_slots=SIZES,
        gradient_slots=SIZES.filter(bool),
        prefetch_distance=st.integers(0, 9),
        gradient_window=BYTES,
        update_chunk=st.integers(1024, 2**30),
        update_window=BYTES,
        overlap_update=st.booleans(),
        checksums=st.booleans(),
        poison=st.booleans(),
    ),
    device=BYTES,
    host=BYTES,
    disk=BYTES,
    reasons=st.lists(st.text(max_size=30), max_size=3).map(tuple),
    changes_numbers=st.lists(st.text(max_size=30), max_size=3).map(tuple),
)


@given(PLANS)
def test_a_plan_survives_json(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_json_is_plain_words_and_bytes() -> None:
    assert WHOLE["schema"] == PLAN_SCHEMA
    homes = {"parameters": "host", "gradients": "host", "states": "disk"}
    assert WHOLE["placements"][1] == {"block": "layers.0", **homes, "update": "step"}
    assert WHOLE["budget"]["disk"] == {"path": "/nvme", "nbytes": 64 * GiB, "beside": []}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_a_truncated_plan_is_refused(share: float) -> None:
    text = PLAN.to_json()
    with pytest.raises(ConfigError, match="cannot read a Plan"):
        Plan.from_json(text[: int(len(text) * share)])


def test_a_newer_schema_is_refused_with_both_versions() -> None:
    with pytest.raises(ConfigError, match=rf"schema {PLAN_SCHEMA + 1}.*reads schema {PLAN_SCHEMA}"):
        Plan.from_json(json.dumps(WHOLE | {"schema": PLAN_SCHEMA + 1}))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (("recompte",), "recompte: there is no such key; did you mean recompute?"),
        (("streaming", "slot"), "streaming.slot: there is no such key; did you mean slots?"),
        (("placements", 1, "x"), "placements.1.x: there is no such key; leave it out"),
    ],
)
def test_a_key_that_there_is_not_is_refused(path: tuple[str | int, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"cannot read a Plan: {says}")):
        Plan.from_json(changed(path, 1))


def changed(path: tuple[str | int, ...], value: object) -> str:
    """PLAN's JSON with the field at ``path`` set to ``value``."""
    whole = json.loads(PLAN.to_json())
    place = whole
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("device",), "much", "device"),
        (("budget", "device"), None, "budget.device"),
        (("budget", "disk"), 7, "budget.disk"),
        (("placements",), {}, "placements"),
        (("placements", 1, "states"), "tape", "placements.1.states"),
        (("placements", 1, "update"), "later", "placements.1.update"),
        (("streaming", "slots"), ["wide"], "streaming.slots.0"),
        (("streaming", "prefetch_distance"), 1.5, "streaming.prefetch_distance"),
        (("reasons", 0), 5, "reasons.0"),
    ],
)
def test_a_wrong_field_is_refused_by_its_name(path: tuple[str | int, ...], value: object, named: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot read a Plan: {named}: "):
        Plan.from_json(changed(path, value))


@pytest.mark.parametrize("text", ["", "null", "[]", "7", b"\xff\xfe", "{}"])
def test_what_is_no_plan_is_refused(text: str | bytes) -> None:
    with pytest.raises(ConfigError, match="cannot read a Plan"):
        Plan.from_json(text)


def test_a_rule_broken_in_a_file_is_refused_like_one_broken_in_code() -> None:
    with pytest.raises(ConfigError, match="on the device together"):
        Plan.from_json(changed(("placements", 1, "gradients"), "device"))


@pytest.mark.parametrize("name", ["device", "host", "pinned"])
@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_budget_of_nothing_is_refused(name: str, nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"the {name} budget must be more than 0 bytes, got {nbytes}"):
        replace(Budget(device=1, host=1, pinned=1), **{name: nbytes})


@pytest.mark.parametrize(
    ("parameters", "gradients", "states", "why"),
    [
        (Tier.DEVICE, Tier.DEVICE, Tier.HOST, "together"),
        (Tier.DEVICE, Tier.HOST, Tier.DEVICE, "together"),
        (Tier.HOST, Tier.DEVICE, Tier.DEVICE, "need the parameters there"),
        (Tier.HOST, Tier.DISK, Tier.HOST, "not on disk"),
        (Tier.PINNED, Tier.HOST, Tier.HOST, "decided by the arena"),
        (Tier.HOST, Tier.HOST, Tier.PINNED, "decided by the arena"),
    ],
)
def test_an_impossible_placement_is_refused(parameters: Tier, gradients: Tier, states: Tier, why: str) -> None:
    with pytest.raises(ConfigError, match=f"block head: .*{why}"):
        Placement("head", parameters, gradients, states)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"prefetch_distance": -1}, "prefetch_distance"),
        ({"update_chunk": 1023}, "update_chunk"),
        ({"slots": (1, 2)}, "slots must be positive sizes"),
        ({"slots": (2, 0)}, "slots must be positive sizes"),
        ({"host_slots": (1, 2)}, "host_slots must be positive sizes"),
        ({"slots": (128, 65)}, r"^slots must be multiples of 64 bytes, got \(128, 65\)"),
        ({"gradient_slots": (63,)}, r"gradient_slots must be multiples of 64 bytes, got \(63,\)"),
        ({"host_slots": (8192, 64)}, r"host_slots must be multiples of 4096 bytes, got \(8192, 64\)"),
    ],
)
def test_impossible_streaming_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Streaming(**wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"pinned": -5}, "^pinned must be 0 bytes or more, got -5"),
        ({"step_seconds": -1.0}, "step_seconds must be 0 or more .* got -1.0"),
        ({"step_seconds": math.inf}, "step_seconds .* got inf"),
        ({"micro_batch_seconds": math.nan}, "micro_batch_seconds .* got nan"),
    ],
)
def test_impossible_figures_are_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replace(PLAN, **wrong)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"micro_batches": 0}, "micro_batches of an accumulation must be 1 or more, got 0"),
        ({"host_further": -1}, r"host and host_further of an accumulation must be 0 bytes or more, got \(1, -1\)"),
        ({"pinned": -1}, "pinned and pinned_further"),
        ({"step_seconds": math.nan}, "step_seconds of an accumulation .* got nan"),
    ],
)
def test_impossible_accumulation_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        replace(Accumulation(1, 1, 1, 1, 1, 1), **wrong)


def test_a_placement_is_resident_only_with_its_states() -> None:
    assert Placement("a", Tier.DEVICE, Tier.DEVICE, Tier.DEVICE).resident
    assert not Placement("a", Tier.DEVICE, Tier.HOST, Tier.HOST).resident


@pytest.mark.parametrize("how", [Update.AHEAD, Update.DEVICE, Update.STORAGE])
def test_a_resident_block_is_updated_when_its_step_asks_or_in_backward(how: Update) -> None:
    assert Placement("a", Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Update.BACKWARD).resident
    with pytest.raises(ConfigError, match=f"block a is resident.*set its update to step or backward, got {how}"):
        Placement("a", Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, how)
    with pytest.raises(ConfigError, match="block embed is resident"):
        Plan.from_json(changed(("placements", 0, "update"), how))


@pytest.mark.parametrize("parameters", [Tier.DEVICE, Tier.HOST, Tier.DISK])
def test_what_is_updated_beside_the_storage_has_its_states_there(parameters: Tier) -> None:
    Placement("a", parameters, Tier.HOST, Tier.DISK, Update.STORAGE)
    with pytest.raises(ConfigError, match=r"block a .*states are not on disk; put them there, or set its update to"):
        Placement("a", parameters, Tier.HOST, Tier.HOST, Update.STORAGE)


@pytest.mark.parametrize(("how", "needed"), [(Update.DEVICE, "update_window"), (Update.BACKWARD, "gradient_slots")])
def test_what_an_update_passes_through_has_to_be_there(how: Update, needed: str) -> None:
    placements = tuple(p if p.resident else p.updating(how) for p in PLAN.placements)
    with pytest.raises(ConfigError, match=f"has no {needed} for them; give it one"):
        replace(PLAN, placements=placements)
    room: dict[str, Any] = {"update_window": 1, "gradient_slots": (64,)}
    plan = replace(PLAN, placements=placements, streaming=replace(PLAN.streaming, **{needed: room[needed]}))
    assert plan.updated(how) == updated(placements, how) == ("layers.0", "layers.1")
    assert plan.updated(Update.STEP) == ("embed",)
    if how is Update.BACKWARD:  # through which gradients of what stays on the device do not pass
        staying = replace(PLAN, placements=tuple(p.updating(how) if p.resident else p for p in PLAN.placements))
        assert used_up(staying.placements, resident=True) == ("embed",)
        assert used_up(plan.placements, resident=False) == ("layers.0", "layers.1")
