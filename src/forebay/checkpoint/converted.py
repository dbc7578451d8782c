"""Weights as a model of transformers wants them, where their files have them otherwise.

Since release 5 transformers builds some models out of other parts than their files were saved from: the experts of a
layer are one parameter, a layer has another name. ``from_pretrained`` renames and puts together what it reads, by a
table of its own (``transformers.conversion_mapping``), and ``save_pretrained`` takes it apart again: so files on the
hub, and new ones, have the old names. Here it is done by the same table, one parameter at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from forebay.checkpoint.weights import Entry, Weights
from forebay.errors import ConfigError

__all__ = ["Converted", "as_wanted"]


@final
@dataclass(frozen=True)
class _Group:
    """Tensors of files that are made into one or several of the model's by ``converter`` (None: one that is taken as it
    is). ``sources`` are their names, each with the pattern of the table that it was found by; ``name`` is the first of
    the model's, or a pattern of them."""

    name: str
    sources: tuple[tuple[str, str], ...]
    converter: Any = None


@final
class Converted:
    """``weights`` under the ``names`` of ``model``, one of transformers."""

    def __init__(self, weights: Weights, model: nn.Module, names: Iterable[str]) -> None:
        self._weights = weights
        self._model: Any = model
        self._made: dict[str, tuple[_Group, Entry | None]] = {}
        for group in _groups(weights, self._model, dict.fromkeys(names, True)):
            if group.converter is None:
                self._made[group.name] = group, None
                continue
            # Of tensors without values the converter tells what it makes.
            for name, value in self._converted(group, self._empty).items():
                self._made[name] = group, Entry(tuple(value.shape), value.dtype)

    @property
    def folder(self) -> Path:
        """Where the files are."""
        return self._weights.folder

    def __contains__(self, name: str) -> bool:
        return name in self._made

    def entry(self, name: str) -> Entry:
        """Shape and dtype of a tensor, without its values. Raises ``ConfigError``."""
        group, entry = self._made[name]
        return self._weights.entry(group.sources[0][0]) if entry is None else entry

    def read(self, name: str) -> torch.Tensor:
        """The values of a tensor: mapped, or where it is made of others in memory of its own. Raises
        ``ConfigError``."""
        group, entry = self._made[name]
        if entry is None:
            return self._weights.read(group.sources[0][0])
        return self._converted(group, self._weights.read)[name]

    def _empty(self, source: str) -> torch.Tensor:
        entry = self._weights.entry(source)
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def _converted(self, group: _Group, read: Callable[[str], torch.Tensor]) -> Mapping[str, torch.Tensor]:
        converter = deepcopy(group.converter)  # it holds what it is given until it has converted that
        for source, pattern in group.sources:
            converter.add_tensor(group.name, source, pattern, partial(read, source))
        try:
            made = converter.convert(group.name, model=self._model, config=self._model.config)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # The files are the user's: whatever transformers raises over them is an answer to them.
            said = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{self.folder}: {len(group.sources)} tensors, {group.sources[0][0]} the first of them, cannot be put "
                f"together to {group.name}: {said}; use the config.json that belongs to the weights"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def as_wanted(weights: Weights, model: nn.Module, names: Iterable[str]) -> Weights | Converted:
    """``weights``, or what they are converted to for the parameters and buffers ``names`` of ``model``."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return weights
    try:
        return Converted(weights, model, names)
    except ImportError:
        return weights  # a release before 5: files have the names of the model


def _groups(weights: Weights, model: Any, wanted: dict[str, bool]) -> Iterable[_Group]:
    """As ``transformers.core_model_loading.convert_and_load_state_dict_in_model`` has them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in table if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, _Group] = {}
    # In this order: experts are put together as they come.
    for source in sorted(weights.names, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and source in wanted:
            name, pattern = source, None  # saved under the model's own name
        if pattern is None:
            found[name] = _Group(name, ((source, source),))
            continue
        before = found[name].sources if name in found else ()
        found[name] = _Group(name, (*before, (source, pattern)), of_pattern[pattern])
    return found.values()
