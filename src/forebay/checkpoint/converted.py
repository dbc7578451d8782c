"""Weights by the names, and in the parts, of the model that they are for, where their files have them otherwise
(``conversion``); and the tensors of a model by the names, and in the parts, of such files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import final

import torch
from torch import nn

from forebay.checkpoint.conversion import Group, is_converted, to_files, to_model
from forebay.checkpoint.source import Source
from forebay.checkpoint.weights import Entry, Tensors, Weights
from forebay.errors import ConfigError

__all__ = ["Converted", "Reverted", "as_filed", "as_wanted"]


@final
class Converted:
    """``weights`` under the ``names`` of ``model``. Raises ``ConfigError`` where they do not go together."""

    def __init__(self, weights: Weights, model: nn.Module, names: Iterable[str]) -> None:
        self._weights = weights
        self._model = model
        self._wanted = tuple(dict.fromkeys(names))
        self._made: dict[str, tuple[Group, Entry | None]] = {}
        for group in to_model(model, weights.names, self._wanted):
            if group.converter is None:
                self._made[group.name] = group, None  # asked for when it is wanted: files may have more than the model
                continue
            try:
                made = group.entries(model, weights.entry)
            except ConfigError as error:
                raise ConfigError(f"{weights.folder}: {error}") from error
            self._made |= {name: (group, entry) for name, entry in made.items()}

    @property
    def folder(self) -> Path:
        return self._weights.folder

    @property
    def names(self) -> tuple[str, ...]:
        """Those of the model that are there."""
        return tuple(name for name in self._wanted if name in self._made)

    def __contains__(self, name: str) -> bool:
        return name in self._made

    def entry(self, name: str) -> Entry:
        group, entry = self._made[name]
        return self._weights.entry(group.source) if entry is None else entry

    def read(self, name: str) -> torch.Tensor:
        """Mapped, or where it is made of others in memory of its own."""
        return self._made[name][0].made(self._model, self._weights.read)[name]


@final
class Reverted(Source):
    """The tensors of ``source``, which is ``model``, by the names that its files have. What is made of one parameter is
    held until that of another is asked for: ``entries`` are in such an order."""

    def __init__(self, source: Source, model: nn.Module) -> None:
        self._source = source
        self._model = model
        self._groups: dict[str, Group] = {}
        self._last: tuple[Group, dict[str, torch.Tensor]] | None = None
        entries: dict[str, Entry] = {}
        for group in to_files(model, source.entries):
            made = group.entries(model, source.entries.__getitem__)
            entries |= made
            self._groups |= dict.fromkeys(made, group)
        self.entries = entries
        self.aliases = {}

    def read(self, name: str) -> torch.Tensor:
        group = self._groups[name]
        if self._last is None or self._last[0] is not group:
            self._last = None  # before the next ones are made
            self._last = group, group.made(self._model, self._source.read)
        return self._last[1][name]

    def raw(self, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
        group = self._groups[name]
        if group.converter is None:
            self._last = None
            return self._source.raw(group.source, dtype)
        return super().raw(name, dtype)


def as_wanted(weights: Weights, model: nn.Module, names: Iterable[str]) -> Tensors:
    """``weights``, or what they are converted to for the parameters and buffers ``names`` of ``model``."""
    return Converted(weights, model, names) if is_converted(model) else weights


def as_filed(source: Source, model: nn.Module) -> Source:
    """``source``, or what ``save_pretrained`` of transformers would make of it."""
    return Reverted(source, model) if is_converted(model) else source
