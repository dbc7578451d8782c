"""What plans for a card count of the allocator's pages, against what it needed there."""

from __future__ import annotations

import pytest

from forebay.memory import PAGES
from forebay.simulation.allocators.expandable import ExpandableAllocator
from forebay.units import MiB
from tests.null.layouts.test_allocators_on_a_card import entries_of


@pytest.mark.parametrize(
    ("name", "least"), [("gpt2-streamed-expandable", 116), ("llama", 112), ("gpt2-expandable", 30)]
)
def test_what_a_limit_has_to_be_over_what_is_live(name: str, least: int) -> None:
    """In MiB: with so many the recording runs within the limit, with one less it does not."""
    live = peak = 0
    for entry in entries_of(name):
        live += {"alloc": 1, "free_completed": -1}.get(entry["action"], 0) * entry["size"]
        peak = max(peak, live)
    assert not ran_out(name, peak + least * MiB) and ran_out(name, peak + (least - 1) * MiB)
    assert least * MiB < PAGES


def ran_out(name: str, limit: int) -> int:
    """How often what was recorded would go over ``limit`` bytes."""
    model, where = ExpandableAllocator(limit), dict[int, int]()
    for number, entry in enumerate(entries_of(name)):
        if entry["action"] == "alloc":
            model.allocate(number, entry["size"], entry["stream"])
            where[entry["addr"]] = number
        elif entry["action"] == "free_completed":
            model.free(where.pop(entry["addr"]))
    return model.out_of_memory
