"""Weights in tiles (``tiles.py``) by the names that they have in plain PyTorch, put together where they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn

from forebay.runtime.tiles import Tiled

__all__ = ["Whole", "Wholes", "wholes_of"]


@final
@dataclass(frozen=True)
class Whole:
    """A weight in tiles: its name in plain PyTorch, further names that are tied to it, its layer and that one's name,
    and the names of its tiles among the parameters of the model."""

    name: str
    aliases: tuple[str, ...]
    layer: Tiled
    owner: str
    parts: tuple[str, ...]


def wholes_of(model: nn.Module) -> tuple[Whole, ...]:
    """The weights in tiles of ``model``."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[tuple[str, ...], Whole] = {}
    for owner, module in model.named_modules():
        if isinstance(module, Tiled):
            parts, name = tuple(names[id(part)] for part in module.parts()), f"{owner}.weight"
            first = found.get(parts)
            if first is None:
                found[parts] = Whole(name, (), module, owner, parts)
            else:
                found[parts] = replace(first, aliases=(*first.aliases, name))
    return tuple(found.values())


@final
class Wholes(Mapping[str, torch.Tensor]):
    """``tensors`` by the names of parameters, with a weight in tiles under its own name in the place of its tiles; it
    is put together when it is read. Who knows the name of a tile is given the tile."""

    def __init__(self, model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        there = dict.fromkeys(tensors)
        found = [whole for whole in wholes_of(model) if all(part in there for part in whole.parts)]
        self._wholes = {whole.name: whole for whole in found}
        first = {whole.parts[0]: whole.name for whole in found}
        tiles = {part for whole in found for part in whole.parts}
        self._names = [first.get(name, name) for name in there if name in first or name not in tiles]

    def __getitem__(self, name: str) -> torch.Tensor:
        whole = self._wholes.get(name)
        if whole is None:
            return self._tensors[name]
        return whole.layer.grid.joined(self._tensors[part] for part in whole.parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
