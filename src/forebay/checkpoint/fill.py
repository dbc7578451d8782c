"""Giving a model that was prepared without values its values: from safetensors, or at random. Block by block, so that
no more than one block is in memory beside the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forebay.checkpoint.weights import Weights
from forebay.errors import ConfigError, ModelError
from forebay.runtime.session import Session
from forebay.trace import Block, Parameter

__all__ = ["fill_at_random", "fill_from_folder"]


def _parameter(weights: Weights, spec: Parameter) -> torch.Tensor:
    """The value of a parameter, under its own name or that of a tied one. Raises ``ConfigError``."""
    name = next((n for n in (spec.name, *spec.aliases) if n in weights), None)
    if name is None:
        raise ConfigError(
            f"{weights.folder} has no tensor {spec.name}; it was saved from another model, or this model's tied "
            f"weights are not tied (init_empty_weights() unties them: call model.tie_weights() before prepare)"
        )
    return _read(weights, name, spec.shape)


def _read(weights: Weights, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    value = weights.read(name)
    if tuple(value.shape) != shape:
        raise ConfigError(
            f"{name} in {weights.folder} has shape {tuple(value.shape)}, the model's has {shape}; "
            f"use the config.json that belongs to the weights"
        )
    return value


def fill_from_folder(session: Session, model: nn.Module, folder: str) -> None:
    """Loads every parameter and persistent buffer of ``model`` from a folder of safetensors."""
    weights = Weights(Path(folder))
    for block in session.model.blocks:
        session.contents.write({spec.name: _parameter(weights, spec) for spec in block.parameters})
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in weights:
                buffer.copy_(_read(weights, name, tuple(buffer.shape)))


def fill_at_random(session: Session, model: nn.Module, seed: int) -> None:
    """Runs the model's own initialisation over each block while its parameters are, for that time, real tensors."""
    modules = dict(model.named_modules())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        for block in session.model.blocks:
            _initialize_block(session, block, model, modules)


def _initialize_block(session: Session, block: Block, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    # NaN first: what the initialisation does not reach is found afterwards.
    values = {
        spec.name: torch.full(spec.shape, float("nan")).to(getattr(torch, spec.dtype)) for spec in block.parameters
    }
    parameters = {name: session.parameters[name] for name in values}
    before = {name: parameter.data for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            parameter.data = values[name]
        for name in _modules_of(block, modules):
            _initialize_module(name, modules)
    finally:
        for name, parameter in parameters.items():
            parameter.data = before[name]
    missed = [name for name, value in values.items() if torch.isnan(value).any()]
    if missed:
        raise ModelError(
            f"{type(model).__name__} does not initialise {missed[0]} by itself; build the model with real values on "
            f"the cpu, or load weights with forebay.load"
        )
    session.contents.write(values)


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
