"""Plans that cannot be used: cut short, from another version, for another model, without a budget."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import ConfigError, DoesNotFit, PlanInvalid
from forebay.memory import Tier
from forebay.plans import PLAN_SCHEMA, Budget, DiskBudget, Placement, Plan
from tests.null.strategies import plan_for, roomy, roomy_machine
from tests.null.synthetic import block
from tests.null.tracing import chain_trace

MACHINE = roomy_machine()
TRACE = chain_trace([block(f"b{i}", ((32, 32), "float32", True)) for i in range(3)])
PLAN = roomy(TRACE)


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(PLAN.to_json()), **fields})


def test_a_truncated_plan_is_a_usage_error() -> None:
    text = PLAN.to_json()
    for length in range(0, len(text), 97):
        with pytest.raises(ConfigError, match="cannot read a Plan"):
            Plan.from_json(text[:length])


def test_a_newer_schema_says_which_and_what_to_do() -> None:
    with pytest.raises(
        ConfigError, match=f"schema {PLAN_SCHEMA + 1}, .* reads schema {PLAN_SCHEMA}; make the plan again"
    ):
        Plan.from_json(changed(schema=PLAN_SCHEMA + 1))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("placements", [{"block": "b0", "parameters": "attic", "gradients": "host", "states": "host"}]),
        ("placements", None),
        ("device", "much"),
        ("streaming", {"slots": [-1]}),
    ],
)
def test_a_field_that_cannot_be_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=field):
        Plan.from_json(changed(**{field: value}))


@pytest.mark.parametrize("tier", ["device", "host", "pinned"])
@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_budget_of_nothing_is_refused(tier: str, nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"the {tier} budget must be more than 0 bytes, got {nbytes}"):
        Budget(**{"device": 1, tier: nbytes})
    budget = {"device": 1, "host": None, "pinned": None, "disk": None, tier: nbytes}
    with pytest.raises(ConfigError, match=f"the {tier} budget"):
        Plan.from_json(changed(budget=budget))


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_disk_of_nothing_holds_nothing(nbytes: int) -> None:
    plan = roomy(TRACE, (Tier.HOST, Tier.HOST, Tier.DISK))
    with pytest.raises((ConfigError, DoesNotFit), match="disk"):
        check(TRACE, MACHINE, replace(plan, budget=replace(plan.budget, disk=DiskBudget("folder", nbytes))))


def test_a_plan_for_another_model_says_so() -> None:
    wider = chain_trace([block(f"b{i}", ((64, 32), "float32", True)) for i in range(3)])
    with pytest.raises(PlanInvalid, match="made for another model, batch shape or optimizer") as caught:
        check(wider, MACHINE, PLAN)
    assert PLAN.fingerprint in str(caught.value) and wider.fingerprint in str(caught.value)
    assert caught.value.subject == "plan"


def test_a_plan_for_another_batch_says_so() -> None:
    longer = chain_trace(TRACE.model.blocks, input_nbytes=512)
    with pytest.raises(PlanInvalid, match="batch shape"):
        check(longer, MACHINE, PLAN)


PLACED = [Placement(f"b{i}", Tier.HOST, Tier.HOST, Tier.HOST) for i in range(4)]


@pytest.mark.parametrize(
    ("placements", "subject", "words"),
    [
        (PLACED[:2], "b2", "does not place block b2"),
        (PLACED, "b3", "has no block b3"),
        ([*PLACED[:3], PLACED[1]], "b1", "places block b1 more than once"),
    ],
)
def test_every_block_has_one_place(placements: list[Placement], subject: str, words: str) -> None:
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(TRACE, MACHINE, replace(PLAN, placements=tuple(placements), fingerprint=""))
    assert caught.value.subject == subject


def test_recomputation_names_blocks_that_there_are() -> None:
    for recompute, words in ((("b9",), "b9, which the model does not have"), (("b1", "b1"), "names block b1 twice")):
        with pytest.raises(PlanInvalid, match=words):
            check(TRACE, MACHINE, replace(PLAN, recompute=recompute))


def test_a_slot_that_is_too_small_is_said() -> None:
    """A block has 32 * 32 * 4 bytes."""
    streaming = replace(PLAN.streaming, slots=(4095,))
    with pytest.raises(PlanInvalid, match="slot of 4096 bytes and the largest has 4095") as caught:
        check(TRACE, MACHINE, replace(PLAN, streaming=streaming))
    assert caught.value.subject == "b0"
    on_disk = roomy(TRACE, (Tier.DISK, Tier.HOST, Tier.HOST))
    with pytest.raises(PlanInvalid, match="host slot"):
        check(TRACE, MACHINE, replace(on_disk, streaming=replace(on_disk.streaming, host_slots=())))


def test_a_plan_that_promises_too_little_is_refused() -> None:
    for tier in ("device", "host"):
        with pytest.raises(PlanInvalid, match=f"predicts a {tier} peak of 1 bytes"):
            check(TRACE, MACHINE, replace(PLAN, **{tier: 1}))


def test_a_plan_without_a_fingerprint_is_taken_at_its_word() -> None:
    check(TRACE, MACHINE, replace(PLAN, fingerprint=""))
    other = chain_trace(TRACE.model.blocks, input_nbytes=512)
    check(other, MACHINE, replace(plan_for(TRACE, PLAN.placements, PLAN.streaming, roomy=True), fingerprint=""))
