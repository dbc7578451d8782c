"""From counts to blocks: which of the blocks that are alike takes which choice.

Spread: the counts are diffused along the blocks, each taking the choice that is most behind its share (error
diffusion, Floyd and Steinberg, "An adaptive algorithm for spatial greyscale", 1976, in one dimension), so that the
lanes have work all along. Early: what holds the least comes first. When its turn comes in backward, what the later
blocks held is gone, and it has had the most time to leave and come back.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["diffused", "sorted_out"]


def diffused(shares: Sequence[float], count: int) -> list[int]:
    """Which choice each of ``count`` blocks takes, with ``shares`` that add up to ``count``; each choice is taken as
    often as its share, to within less than one block for every choice that is taken."""
    # Of the many choices that a block has a programme takes a few: what has no share is never behind it.
    able = {choice: share for choice, share in enumerate(shares) if share > 0}
    taken = dict.fromkeys(able, 0)
    chosen = []
    for block in range(1, count + 1):
        behind = {choice: share * block / count - taken[choice] for choice, share in able.items()}
        best = max(behind, key=behind.__getitem__)
        taken[best] += 1
        chosen.append(best)
    return chosen


def sorted_out(shares: Sequence[float], count: int, order: Sequence[float]) -> list[int]:
    """The same choices as ``diffused``, those first for which ``order`` is the least."""
    return sorted(diffused(shares, count), key=lambda choice: order[choice])
