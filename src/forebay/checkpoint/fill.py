"""Giving a model that was prepared without values its values: from safetensors, tensor by tensor as they are mapped,
or at random, block by block: no more than one block is in memory beside the tiers."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forebay.checkpoint.converted import as_wanted
from forebay.checkpoint.source import saved_buffers
from forebay.checkpoint.weights import Tensors, Weights
from forebay.errors import ConfigError, ModelError
from forebay.model import Block
from forebay.phases import PASSING
from forebay.runtime.contents import LazyTensors
from forebay.runtime.generators import drawn_from
from forebay.runtime.session import Session
from forebay.runtime.tensors import dtype_of
from forebay.runtime.tiles import Tile, Tiled
from forebay.runtime.wholes import Whole, wholes_of

__all__ = ["fill_at_random", "fill_from_folder"]


@dataclass(frozen=True)
class _Source:
    """Where the value of a parameter is: a tensor of the folder, or a part of one that is in tiles there."""

    name: str
    whole: Whole | None = None
    number: int = 0

    def read(self, weights: Tensors) -> torch.Tensor:
        """The value, which is mapped and not read."""
        value = weights.read(self.name)
        return value if self.whole is None else self.whole.layer.grid.cut(value, self.number)


def fill_from_folder(session: Session, model: nn.Module, folder: str) -> None:
    """Loads every parameter and persistent buffer of ``model`` from a folder of safetensors. Raises ``ConfigError``
    where one is missing or has another shape; nothing has changed then. A buffer that transformers lets files lack
    keeps its values."""
    weights = as_wanted(Weights(Path(folder)), model, _names(session, model))
    sources = _sources(weights, session, model)
    buffers = _buffers(weights, model)
    for block in session.model.blocks:
        names = [spec.name for spec in block.parameters]
        session.contents.write(LazyTensors(names, lambda name: sources[name].read(weights)))
    with torch.no_grad():
        for name, buffer in buffers.items():
            buffer.copy_(weights.read(name))


def _names(session: Session, model: nn.Module) -> Iterator[str]:
    """Of all that a folder may have for ``model``, tied ones under each of their names."""
    for whole in wholes_of(model):
        yield from (whole.name, *whole.aliases)
    for spec in session.contents.spec_of.values():
        yield from (spec.name, *spec.aliases)
    yield from saved_buffers(model)


def _buffers(weights: Tensors, model: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers of ``model`` by the names that ``weights`` have for them. Raises ``ConfigError``."""
    may_lack = [
        pattern
        for module in model.modules()
        for pattern in getattr(module, "_keys_to_ignore_on_load_missing", None) or ()
    ]
    names: dict[int, list[str]] = {}
    buffers = saved_buffers(model)
    for name, buffer in buffers.items():
        names.setdefault(id(buffer), []).append(name)
    found: dict[str, torch.Tensor] = {}
    for alike in names.values():
        name = next((name for name in alike if name in weights), alike[0])
        if name in weights:
            _expect_shape(weights, name, tuple(buffers[name].shape))
            found[name] = buffers[name]
        elif not any(re.search(pattern, name) for pattern in may_lack):
            raise ConfigError(
                f"{weights.folder} has no tensor {name}, which is a buffer of the model's state dict; use the folder "
                f"that was saved from this model, or register the buffer with persistent=False if the model makes its "
                f"values itself"
            )
    return found


def _sources(weights: Tensors, session: Session, model: nn.Module) -> dict[str, _Source]:
    found: dict[str, _Source] = {}
    for whole in wholes_of(model):
        name = _expected(weights, whole.name, whole.aliases, whole.layer.grid.shape)
        found |= {part: _Source(name, whole, number) for number, part in enumerate(whole.parts)}
    for spec in session.contents.spec_of.values():
        if spec.name not in found:
            found[spec.name] = _Source(_expected(weights, spec.name, spec.aliases, spec.shape))
    return found


def _expected(weights: Tensors, name: str, aliases: tuple[str, ...], shape: tuple[int, ...]) -> str:
    """Under which name ``weights`` have a tensor of this ``shape``: its own or that of a tied one. Raises
    ``ConfigError``."""
    found = next((n for n in (name, *aliases) if n in weights), None)
    if found is None:
        raise ConfigError(
            f"{weights.folder} has no tensor {name}; it was saved from another model, or this model's tied "
            f"weights are not tied (init_empty_weights() unties them: call model.tie_weights() before prepare)"
        )
    _expect_shape(weights, found, shape)
    return found


def _expect_shape(weights: Tensors, name: str, shape: tuple[int, ...]) -> None:
    there = weights.entry(name).shape
    if there != shape:
        raise ConfigError(
            f"{name} in {weights.folder} has shape {there}, the model's has {shape}; "
            f"use the config.json that belongs to the weights"
        )


def fill_at_random(session: Session, model: nn.Module, seed: int) -> None:
    """Runs the model's own initialisation over each block while its parameters are, for that time, real tensors."""
    modules = dict(model.named_modules())
    with drawn_from(seed), torch.no_grad():
        done: set[str] = set()
        wholes = {part: whole for whole in wholes_of(model) for part in whole.parts}
        for block in session.model.blocks:
            for spec in block.parameters:
                if spec.name in wholes and spec.name not in done:
                    done |= _initialize_whole(session, wholes[spec.name], model, modules)
            _initialize_block(session, block, done, model, modules)


def _initialize_whole(session: Session, whole: Whole, model: nn.Module, modules: Mapping[str, nn.Module]) -> set[str]:
    """Initialises a layer in tiles as the layer that it stands for, all of which is in memory meanwhile. Returns the
    names of its parameters."""
    layer = whole.layer.untiled().to_empty(device="cpu")
    for parameter in layer.parameters():
        parameter.fill_(float("nan"))
    _initialize_module(whole.owner, {**modules, whole.owner: layer})
    values = {}
    for name, parameter in layer.named_parameters():
        if _has_nan(parameter):
            raise _missed(model, f"{whole.owner}.{name}")
        values[f"{whole.owner}.{name}"] = parameter.detach()
    weight = values.pop(whole.name)
    values |= {part: whole.layer.grid.cut(weight, number) for number, part in enumerate(whole.parts)}
    session.contents.write(values)
    return set(values)


def _initialize_block(
    session: Session, block: Block, done: Collection[str], model: nn.Module, modules: Mapping[str, nn.Module]
) -> None:
    # NaN first: what the initialisation does not reach is found afterwards.
    values = {
        spec.name: torch.full(
            spec.shape, float("nan") if dtype_of(spec).is_floating_point else 0, dtype=dtype_of(spec), device="cpu"
        )
        for spec in block.parameters
        if spec.name not in done
    }
    if not values:
        return
    parameters = {name: session.parameters[name] for name in values}
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        for name in _modules_of(block, modules):
            if not isinstance(modules[name], Tile | Tiled):
                _initialize_module(name, modules)
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]
    missed = [name for name, value in values.items() if _has_nan(value)]
    if missed:
        raise _missed(model, missed[0])
    session.contents.write(values)


def _has_nan(values: torch.Tensor) -> bool:
    """Whether any of ``values``, which lie in order, is NaN. Looks at a part at a time."""
    return any(bool(part.isnan().any()) for part in values.detach().view(-1).split(PASSING))


def _missed(model: nn.Module, name: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} does not initialise {name} by itself; build the model with real values on the cpu, or "
        f"load weights with forebay.load"
    )


def _modules_of(block: Block, modules: Mapping[str, nn.Module]) -> list[str]:
    """Names of the modules that own the block's parameters and of what lies between them, innermost first."""
    owners = {spec.name.rpartition(".")[0] for spec in block.parameters}
    inside = {n for n in modules for root in block.modules if n == root or n.startswith(f"{root}.")}
    names = owners | (inside if not block.held else set())
    return sorted(names, key=lambda n: (-n.count("."), n))


def _initialize_module(name: str, modules: Mapping[str, nn.Module]) -> None:
    """The initialisation of one module: its transformers model's, or its own ``reset_parameters``."""
    module = modules[name]
    parts = name.split(".") if name else []
    for end in range(len(parts), -1, -1):
        owner: Any = modules[".".join(parts[:end])]
        own_init = getattr(owner, "_init_weights", None)
        if own_init is not None:
            own_init(module)
            return
    reset = getattr(module, "reset_parameters", None)
    if reset is not None:
        reset()
