"""What drafts are put together from: slots for what one module needs at once, and one way to update each block."""

from __future__ import annotations

import pytest

from forebay.memory import Tier
from forebay.model import Block
from forebay.planners.parts import DEDICATED, HOSTED, RESIDENT, Draft, sizes_at_once, slot_options
from forebay.plans import Placement, Streaming, Update


def blocks(*described: tuple[int, tuple[str, ...]]) -> list[Block]:
    return [Block(modules[0], (), modules, nbytes) for nbytes, modules in described]


LAYERS = [(700, (f"layers.{i}",)) for i in range(3)]


def test_blocks_that_follow_each_other_need_one_slot() -> None:
    found = blocks((640, ("embedding",)), *LAYERS, (64, ("head",)))
    assert sizes_at_once(found) == []
    assert slot_options(found)[-1] == (700,)


@pytest.mark.parametrize("modules", [("head", "head.decoder"), ("head",)])
def test_a_tied_head_inside_a_block_of_its_own_needs_both_at_once(modules: tuple[str, ...]) -> None:
    """The decoder reads the embedding's weight while the block around it is open."""
    found = blocks((640, ("embedding", "head.decoder")), *LAYERS, (64, modules))
    assert sizes_at_once(found) == [(640, 64)]
    for option in slot_options(found):
        assert len(option) >= 2 and option[0] >= 640 and option[1] >= 64
    assert slot_options(found)[-1] == (700, 64)


HOMES = {"a": HOSTED, "b": DEDICATED, "c": (Tier.DISK, Tier.HOST, Tier.DISK), "d": RESIDENT}


def draft() -> Draft:
    return Draft(tuple(Placement(name, *home) for name, home in HOMES.items()), Streaming(update_window=64))


def ways(draft: Draft) -> list[Update]:
    return [p.update for p in draft.placements]


def test_a_block_is_updated_in_one_way() -> None:
    """The one that was named last; those that were updated so and are not named any more are when their step asks."""
    early = draft().updating(Update.AHEAD, ("b", "c"))
    assert ways(early) == [Update.STEP, Update.AHEAD, Update.AHEAD, Update.STEP]
    both = early.updating(Update.DEVICE, ("a", "c"))
    assert ways(both) == [Update.DEVICE, Update.AHEAD, Update.DEVICE, Update.STEP]
    assert (both.updated(Update.AHEAD), both.updated(Update.DEVICE)) == (("b",), ("a", "c"))
    assert ways(both.updating(Update.DEVICE, ("c",))) == [Update.STEP, Update.AHEAD, Update.DEVICE, Update.STEP]
    assert both.updating(Update.DEVICE, ()).updating(Update.AHEAD, ()) == draft()


def test_the_order_in_which_blocks_are_named_means_nothing() -> None:
    one, other = (draft().updating(Update.AHEAD, names) for names in (("c", "a"), ("a", "c")))
    assert one == other and hash(one) == hash(other) and one.updated(Update.AHEAD) == ("a", "c")
    assert one != draft() and hash(one) != hash(draft())


def test_a_plain_draft_has_no_window_and_updates_when_steps_ask() -> None:
    both = draft().updating(Update.AHEAD, ("b",)).updating(Update.STORAGE, ("c",))
    assert set(ways(both.plain)) == {Update.STEP} and both.plain.streaming.update_window == 0
    assert both.plain == draft().plain


def test_a_block_that_moves_is_updated_when_its_step_asks() -> None:
    early = draft().updating(Update.AHEAD, ("a", "b"))
    assert ways(early.placed("a", RESIDENT)) == [Update.STEP, Update.AHEAD, Update.STEP, Update.STEP]
