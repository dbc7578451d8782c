"""Slots through which blocks can stream: enough for what one module needs at once."""

from __future__ import annotations

import pytest

from forebay.planners.parts import sizes_at_once, slot_options
from forebay.trace import Block


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
