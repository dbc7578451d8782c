"""docs/policies: a page for every policy, in its planner's words, with what it decides today."""

from __future__ import annotations

import pytest

from forebay.planners import PLANNERS
from forebay.planners.parallel import ON_DEVICES
from pages import policies
from pages.markdown import stale
from pages.uses import USES

pytest.importorskip("transformers")
pytest.importorskip("ortools")


@pytest.fixture(autouse=True, scope="module")
def _plans_are_run() -> None:
    """In the place of the one for all tests here: pages quote plans of whole searches."""


def test_every_policy_has_a_use() -> None:
    assert set(USES) == set(PLANNERS) | set(ON_DEVICES)


@pytest.mark.parametrize("name", policies.names())
def test_its_docstring_says_more_than_its_name(name: str) -> None:
    said = policies.told(name)
    assert len(said) > 60 and "\n\n\n" not in said


def test_the_pages_are_what_the_planners_say_and_decide() -> None:
    assert stale(policies.FOLDER, policies.pages()) == [], "run scripts/docs"
