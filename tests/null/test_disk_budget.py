"""The disk of a budget: one folder or several, as written and as JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.budgets import Budget, DiskBudget, DiskShare
from forebay.errors import ConfigError
from forebay.plans import Plan, Streaming
from forebay.units import GiB, MiB


def test_one_folder_is_as_it_was() -> None:
    assert DiskBudget.of("/nvme") == DiskBudget("/nvme")
    assert DiskBudget.of("/nvme:1GiB") == DiskBudget("/nvme", GiB)
    assert DiskBudget("/nvme", GiB).folders == (DiskShare("/nvme", GiB),)


def test_several_folders_add_up() -> None:
    budget = DiskBudget.of("/a:1GiB,/b:3GiB")
    assert budget == DiskBudget("/a", 4 * GiB, (DiskShare("/b", 3 * GiB),))
    assert budget.folders == (DiskShare("/a", GiB), DiskShare("/b", 3 * GiB))
    free = DiskBudget.of("/a,/b")
    assert free.nbytes is None and free.folders == (DiskShare("/a"), DiskShare("/b"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/a:0B", "more than 0 bytes, got 0 for /a"),
        ("/a:1GiB,/b:0B", "more than 0 bytes, got 0 for /b"),
        ("/a:1GiB,/b", "either each has a size or none"),
        ("/a,/b:1GiB", "either each has a size or none"),
        ("/a:1GiB,/b:1GiB,/a:2GiB", "/a is named twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DiskBudget.of(text)


def test_others_that_leave_nothing_for_the_first_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 0 for /a"):
        DiskBudget("/a", GiB, (DiskShare("/b", GiB),))


def test_a_plan_keeps_the_folders_and_the_way_they_are_read() -> None:
    streaming = Streaming(disk_block=2 * MiB, disk_depth=3)
    plan = Plan("test", Budget(GiB, disk=DiskBudget.of("/a:1GiB,/b:3GiB")), (), streaming, GiB, 0, 0)
    assert Plan.from_json(plan.to_json()) == plan
    for wrong in ({"disk_block": 100}, {"disk_block": 0}, {"disk_depth": 0}):
        with pytest.raises(ConfigError, match="disk_block must be whole pages"):
            replace(streaming, **wrong)
