"""What transformers does between the tensors of files and the parameters of a model, by its own table.

Since release 5 transformers builds some models out of other parts than their files are made of: the experts of a layer
are one parameter, a layer has another name. ``from_pretrained`` renames and puts together what it reads
(``transformers.conversion_mapping``), and ``save_pretrained`` takes it apart again: so files on the hub, and new ones,
have the old names. Here it is done by the same table, one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn

from forebay.checkpoint.weights import Entry
from forebay.errors import ConfigError
from forebay.runtime.pretrained import is_pretrained

__all__ = ["Group", "is_converted", "to_files", "to_model"]


@final
@dataclass(frozen=True)
class Group:
    """Tensors that are made into others: ``sources`` are their names, each with the pattern of the table that it was
    found by, and ``name`` is that of what they become, or a pattern of it. ``converter`` None: one that is taken as it
    is. ``renamed`` gives what a converter makes its last name."""

    name: str
    sources: tuple[tuple[str, str], ...]
    converter: Any = None
    renamed: Callable[[str], str] = str

    @property
    def source(self) -> str:
        """The first of the tensors, or the one there is."""
        return self.sources[0][0]

    def made(self, model: nn.Module, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """What becomes of the tensors that ``read`` gives, by name. Raises ``ConfigError`` where they do not go
        together."""
        if self.converter is None:
            return {self.name: read(self.source)}
        of_library: Any = model
        converter = deepcopy(self.converter)  # it holds what it is given until it has converted that
        for source, pattern in self.sources:
            converter.add_tensor(self.name, source, pattern, partial(read, source))
        try:
            found = converter.convert(self.name, model=model, config=of_library.config)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            # Files are the user's: whatever transformers raises over them is an answer to them.
            said = " ".join(str(error).split())[:300]
            raise ConfigError(
                f"{len(self.sources)} tensors, {self.source} the first of them, cannot be put together to {self.name}: "
                f"{said}; use the config.json that belongs to the weights"
            ) from error
        return {self.renamed(n): value[0] if isinstance(value, list) else value for n, value in found.items()}

    def entries(self, model: nn.Module, entry_of: Callable[[str], Entry]) -> dict[str, Entry]:
        """Shapes and dtypes of what ``made`` returns: of tensors without values the converter tells what it makes."""
        if self.converter is None:
            return {self.name: entry_of(self.source)}

        def empty(source: str) -> torch.Tensor:
            entry = entry_of(source)
            return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

        return {name: Entry(tuple(value.shape), value.dtype) for name, value in self.made(model, empty).items()}


def is_converted(model: nn.Module) -> bool:
    """Whether transformers has anything to do with the names of ``model``: a release before 5 has not, and what the
    first ones of 5 do is left to them."""
    if not is_pretrained(model):
        return False
    try:
        # All that is used below, where a release that lacks a part of it is none to begin with.
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: F401
        from transformers.core_model_loading import (  # noqa: F401
            PrefixChange,
            WeightConverter,
            WeightRenaming,
            apply_converters,
            apply_renamings,
            dot_natural_key,
            rename_source_key,
        )
    except ImportError:
        return False
    return True


def to_model(model: nn.Module, names: Iterable[str], wanted: Iterable[str]) -> list[Group]:
    """How tensors of files under these ``names`` become those that are ``wanted``, parameters and buffers of
    ``model``, as ``core_model_loading.convert_and_load_state_dict_in_model`` has it."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import dot_natural_key, rename_source_key

    of_library: Any = model
    known = dict.fromkeys(wanted, True)
    renamings, converters, of_pattern = _sorted_out(get_model_conversion_mapping(of_library))
    found: dict[str, Group] = {}
    # In this order: experts are put together as they come.
    for source in sorted(names, key=dot_natural_key):
        name, pattern = rename_source_key(source, renamings, converters, of_library.base_model_prefix, known)
        if name not in known and source in known:
            name, pattern = source, None  # saved under the model's own name
        if pattern is None:
            found[name] = Group(name, ((source, source),))
        else:
            found[name] = _with(found.get(name), Group(name, ((source, pattern),), of_pattern[pattern]))
    return list(found.values())


def to_files(model: nn.Module, names: Iterable[str]) -> list[Group]:
    """How parameters and buffers of ``model``, ``names``, become the tensors of files, as
    ``core_model_loading.revert_weight_conversion`` has it."""
    from transformers.core_model_loading import apply_converters, apply_renamings, dot_natural_key

    table = [transform.reverse_transform() for transform in reversed(_written_by(model))]
    renamings, converters, of_pattern = _sorted_out(table)
    renamed = partial(apply_renamings, weight_renamings=renamings)
    found: dict[str, Group] = {}
    for source in sorted(names, key=dot_natural_key):
        name, pattern = apply_converters(source, converters)
        if pattern is None:
            name = renamed(source)
            found[name] = Group(name, ((source, source),))
        else:
            found[name] = _with(found.get(name), Group(name, ((source, pattern),), of_pattern[pattern], renamed))
    return list(found.values())


def _written_by(model: Any) -> list[Any]:
    """What ``save_pretrained`` reverts: what the model was loaded with, or what the table has for it. A prefix that
    files may have or not is left as the model has it where nobody knows."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    loaded: list[Any] | None = vars(model).get("_weight_conversions")
    if loaded is not None:
        return loaded
    table = get_model_conversion_mapping(model, add_legacy=False)
    return [transform for transform in table if not isinstance(transform, PrefixChange)]


def _sorted_out(table: Iterable[Any]) -> tuple[list[Any], list[Any], Mapping[str, Any]]:
    """Renamings, converters, and these by their patterns."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    entries = list(table)
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    return [entry for entry in entries if isinstance(entry, WeightRenaming)], converters, of_pattern


def _with(before: Group | None, further: Group) -> Group:
    """``before`` with the sources of ``further``, which become the same."""
    if before is None:
        return further
    return Group(before.name, (*before.sources, *further.sources), before.converter, before.renamed)
