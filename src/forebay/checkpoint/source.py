"""Where an export takes its tensors from: a prepared model, or a folder. By plain names, one at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import final

import torch
from torch import nn

from forebay.checkpoint.weights import Entry, Tensors
from forebay.errors import ConfigError
from forebay.runtime.wholes import wholes_of

__all__ = ["FolderSource", "ModelSource", "Source", "kept_dtype", "saved_buffers", "saved_names"]

PIECE = 1 << 18
"""Elements that are converted to another dtype at a time."""


class Source(ABC):
    """Tensors by plain PyTorch name. ``entries`` says of each what it is; ``aliases`` are further names of some, which
    are tied to them."""

    entries: Mapping[str, Entry]
    aliases: Mapping[str, str]

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The values of one of ``entries``, on the host; its memory is free when nobody holds it any more."""

    def raw(self, name: str, dtype: torch.dtype) -> Iterator[memoryview]:
        """The bytes of one of ``entries`` as ``dtype``, in the order of its elements: part by part, each to be used
        before the next one is asked for."""
        for part in self._parts(name):
            yield from _raw_bytes(part, dtype)

    def _parts(self, name: str) -> Iterator[torch.Tensor]:
        """The values of one of ``entries`` in the order of its elements, part by part."""
        yield self.read(name)


@final
class ModelSource(Source):
    """A prepared model: its parameters in full precision, and the buffers of its state dict.

    ``parameters`` reads them by name (``forebay.parameters``), ``in_parts`` gives the same of those that need not be
    read whole, ``entries`` says what they are.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, torch.Tensor],
        in_parts: Mapping[str, Callable[[], Iterator[torch.Tensor]]],
        entries: Mapping[str, Entry],
    ) -> None:
        self._parameters = parameters
        self._in_parts = in_parts
        self._buffers = saved_buffers(model)
        of_buffers = {name: Entry(tuple(b.shape), b.dtype) for name, b in self._buffers.items()}
        self.entries = {**entries, **of_buffers}
        tied = {alias: whole.name for whole in wholes_of(model) for alias in whole.aliases}
        self.aliases = _aliases(model, self.entries) | tied

    def read(self, name: str) -> torch.Tensor:
        return self._buffers[name].detach().cpu() if name in self._buffers else self._parameters[name]

    def _parts(self, name: str) -> Iterator[torch.Tensor]:
        parts = self._in_parts.get(name)
        return super()._parts(name) if parts is None else parts()


@final
class FolderSource(Source):
    """A folder of safetensors, by the names of ``model``, which is on the meta device and says which are tied.

    Raises ``ConfigError`` for a folder that is not that model's.
    """

    def __init__(self, weights: Tensors, model: nn.Module) -> None:
        self._weights = weights
        self.entries = {name: weights.entry(name) for name in weights.names}
        self.aliases = _aliases(model, self.entries)
        self._expect_whole(model)

    def read(self, name: str) -> torch.Tensor:
        return self._weights.read(name)

    def _expect_whole(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            entry = self.entries.get(name, self.entries.get(self.aliases.get(name, "")))
            if entry is None or entry.shape != tuple(parameter.shape):
                found = "is not there" if entry is None else f"has shape {entry.shape}"
                raise ConfigError(
                    f"{self._weights.folder}: {name} {found}, and config.json describes it with shape "
                    f"{tuple(parameter.shape)}; use the config.json that belongs to the weights"
                )


def saved_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that belong to the state dict: those that a module cannot compute again."""
    saved = {}
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                saved[name] = buffer
    return saved


def saved_names(model: nn.Module) -> list[str]:
    """Of all parameters, tied ones under each of their names, and of the buffers that belong to the state dict."""
    return [*(name for name, _ in model.named_parameters(remove_duplicate=False)), *saved_buffers(model)]


def kept_dtype(entry: Entry, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that a tensor is written in where ``dtype`` is asked for (None: its own): integers stay integers."""
    return dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype


def _raw_bytes(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
    """The bytes of ``tensor`` as ``dtype``, in the order of its elements; converted ones a piece at a time."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    step = max(1, flat.numel()) if flat.dtype is dtype else PIECE
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step].to(dtype).view(torch.uint8).numpy().data


def _aliases(model: nn.Module, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Names of parameters that are not in ``entries`` and are tied to one that is."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found: dict[str, str] = {}
    for alike in names.values():
        first = next((name for name in alike if name in entries), None)
        if first is not None:
            found.update((name, first) for name in alike if name not in entries)
    return found
