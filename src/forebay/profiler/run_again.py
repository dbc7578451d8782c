"""Blocks that a model itself runs again in backward, several at a time: a checkpoint of its own around more than one
(``torch.utils.checkpoint.checkpoint_sequential``)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import final

import torch

from forebay.model import Model

__all__ = ["RunAgain", "needing_each_other"]


@final
class RunAgain:
    """What backward has called again: blocks that are called before it goes on are one checkpoint's. What that saves of
    their parameters is read when backward comes to each of them, so that all of them are there until then."""

    def __init__(self) -> None:
        self._found: set[frozenset[str]] = set()
        self._now: set[str] = set()

    def called(self, block: str) -> None:
        """Backward has called the module of ``block``."""
        self._now.add(block)

    def goes_on(self) -> None:
        """An op runs in backward, in none of the model's modules: one of a forward that runs again records a graph, one
        of backward's own does not."""
        if self._now and not torch.is_grad_enabled():
            self._found.add(frozenset(self._now))
            self._now.clear()

    @property
    def together(self) -> Collection[frozenset[str]]:
        """The blocks that were run again together, of each checkpoint around more than one."""
        return {names for names in (*self._found, frozenset(self._now)) if len(names) > 1}


def needing_each_other(model: Model, together: Iterable[frozenset[str]]) -> Model:
    """``model``, whose blocks know with which others each is run again."""
    beside: dict[str, set[str]] = {}
    for names in together:
        for name in names:
            beside.setdefault(name, set()).update(names - {name})
    order = [block.name for block in model.blocks]
    found = {name: tuple(sorted(others, key=order.index)) for name, others in beside.items()}
    return replace(model, blocks=tuple(replace(b, beside=found.get(b.name, ())) for b in model.blocks))
