"""``forebay.tile``: layers whose weight is too large for the device are cut into tiles, before a model is prepared; and
what a plan says of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from forebay.errors import ConfigError, ModelError
from forebay.plans import Plan
from forebay.profiler.batch import call_arguments, count_tokens
from forebay.runtime.grids import Grid, grid_of
from forebay.runtime.hooks import is_prepared
from forebay.runtime.tiles import Tiled, TiledEmbedding, TiledLinear, is_exact
from forebay.runtime.wholes import Whole, wholes_of
from forebay.states import reach_of
from forebay.units import format_bytes, parse_bytes

__all__ = ["ROUNDED_OTHERWISE", "noted_tiles", "notes_of", "tile", "with_tiles"]

MOST_TOKENS = 128
"""Tokens with which products are tried at most."""


def tile(model: nn.Module, most: int | str) -> tuple[str, ...]:
    """Cuts the weight of every ``nn.Linear`` and ``nn.Embedding`` of ``model`` that is larger than ``most`` bytes
    (``"256MiB"``) into tiles, in place; the optimizer is to be made afterwards. Returns the names of these layers.

    Their weight is never on the device as a whole: of a linear layer there are ``most`` bytes at a time and a tile or
    two on their way, and of its gradient one tile. The numbers are those of the model as it was, bit for bit, where
    products of parts give the bits of the whole; ``prepare`` tries that on its device and says so where they do not.
    State dicts, ``forebay.parameters``, ``load`` and ``export`` have the weights as a whole, under their names.

    Raises ``ConfigError`` for a ``most`` that no tiles are small enough for, ``ModelError`` for a model that is
    prepared, and for a layer that cannot be cut. The model is then as it was.
    """
    if is_prepared(model):
        raise ModelError("this model is prepared; cut it into tiles before, or call forebay.close(model) first")
    size = parse_bytes(most)
    if size <= 0:
        raise ConfigError(f"tiles must have a size, got {most!r}; give the bytes that may be there at a time")
    names = {module: name for name, module in model.named_modules()}
    grids: dict[nn.Parameter, Grid] = {}
    users = _too_large(model, size)
    for weight, found in users.items():
        for user in found:
            _expect_plain(user, names[user])
        by_rows = not any(isinstance(user, nn.Linear) for user in found)
        shape = (weight.shape[0], weight.shape[1])
        grids[weight] = grid_of(names[found[0]], shape, weight.element_size(), size, by_rows=by_rows)
    made: dict[nn.Module, Tiled] = {}
    for weight, grid in grids.items():
        made |= _cut(weight, grid, users[weight])
    for parent in names:
        for name, child in parent._modules.items():
            if child in made:
                parent._modules[name] = made[child]
    return tuple(names[module] for module in made)


def _too_large(model: nn.Module, most: int) -> dict[nn.Parameter, list[nn.Module]]:
    """Weights of linear layers and embeddings that are larger than ``most`` bytes, with all modules that have them."""
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.nbytes > most and parameter.dim() == 2:
                users.setdefault(parameter, []).append(module)
    return {w: found for w, found in users.items() if any(type(m) in (nn.Linear, nn.Embedding) for m in found)}


def _expect_plain(module: nn.Module, name: str) -> None:
    """Raises ``ModelError`` for a layer that is not just what its class says."""
    if not name:
        raise ModelError("the model is one layer, which has no place in itself; put it into a module and tile that")
    if type(module) not in (nn.Linear, nn.Embedding):
        raise ModelError(
            f"{name} is a {type(module).__name__} and has a weight that is tied to one to be cut into tiles; only "
            f"nn.Linear and nn.Embedding can be: untie it, or choose a larger size"
        )
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        raise ModelError(f"{name} has hooks, which a tiled layer would not have; put them on after forebay.tile")
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.scale_grad_by_freq or module.sparse):
        raise ModelError(f"{name} has max_norm, scale_grad_by_freq or sparse, which a tiled embedding does not have")


def _cut(weight: nn.Parameter, grid: Grid, users: list[nn.Module]) -> dict[nn.Module, Tiled]:
    """What stands in the place of ``users``: layers with the same tiles."""
    parts = [
        nn.Parameter(grid.cut(weight.detach(), number).clone(), requires_grad=weight.requires_grad)
        for number in range(len(grid.tiles))
    ]
    made: dict[nn.Module, Tiled] = {}
    for user in users:
        if isinstance(user, nn.Linear):
            made[user] = TiledLinear(grid, parts, user.bias)
        elif isinstance(user, nn.Embedding):
            made[user] = TiledEmbedding(grid, parts, user.padding_idx)
        made[user].train(user.training)
    return made


def noted_tiles(names: tuple[str, ...], most: int) -> str:
    """What ``tile`` has done with ``most`` bytes, in words: ``names`` is what it returned."""
    if not names:
        return f"no linear layer and no embedding is larger than {format_bytes(most)}: nothing is in tiles"
    return f"in tiles: {', '.join(names)}"


def with_tiles(plan: Plan, model: nn.Module, states: Iterable[str], batch: Any, device: torch.device | None) -> Plan:
    """``plan`` with what is to be said of the tiles of ``model`` and is not said in it yet. They are tried with as many
    tokens as ``batch`` has on ``device``, where the run will be; without a batch, or on another machine (None), nobody
    knows. ``states`` are those that the optimizer keeps."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Tiled)]
    if not layers:
        return plan
    tried: dict[tuple[Grid, torch.dtype, bool], bool] = {}
    whole = reach_of(states).takes_wholes
    changes = [f"{name}: {OF_TILES}" for name, layer in layers if whole and layer.parts()[0].requires_grad]
    for name, layer in layers:
        if not isinstance(layer, TiledLinear):
            continue
        key = layer.grid, layer.dtype, layer.bias is not None
        if key not in tried:
            tried[key] = device is not None and batch is not None and _is_exact(*key, batch, device)
        if not tried[key]:
            changes.append(f"{name} is computed in tiles: {ROUNDED_OTHERWISE}")
    reasons = [f"{name}: {_words(layer)}" for name, layer in layers]
    return replace(
        plan,
        reasons=tuple(dict.fromkeys((*plan.reasons, *reasons))),
        notes=tuple(dict.fromkeys((*plan.notes, *notes_of(model)))),
        changes_numbers=tuple(dict.fromkeys((*plan.changes_numbers, *changes))),
    )


NORMS = "a norm of gradients is taken over tiles like over parameters: clipping by it may differ in the last bit"

OF_TILES = (
    "the optimizer looks at each tile by itself (its rows and columns, the size of its update, what makes that "
    "orthogonal), where it would look at the whole weight"
)

ROUNDED_OTHERWISE = (
    "the same sums, but on this device products of parts round otherwise than those of the whole, or that has not been "
    "tried"
)


def notes_of(model: nn.Module) -> tuple[str, ...]:
    """What is to be known of a model with tiles, whatever the plan; nothing where there are none."""
    wholes = wholes_of(model)
    return (NORMS, *(_tied(whole) for whole in wholes if whole.aliases)) if wholes else ()


def _tied(whole: Whole) -> str:
    nbytes = sum(part.nbytes for part in whole.layer.parts())
    return (
        f"{whole.name} is {whole.aliases[0]} too: its gradient is one sum, all {format_bytes(nbytes)} of which are on "
        f"the device from the backward of the one to that of the other"
    )


def _is_exact(grid: Grid, dtype: torch.dtype, bias: bool, batch: Any, device: torch.device) -> bool:
    args, kwargs = call_arguments(batch)
    return is_exact(grid, min(count_tokens(kwargs or args), MOST_TOKENS), dtype, device, bias=bias)


def _words(layer: Tiled) -> str:
    """What became of its weight."""
    grid, itemsize = layer.grid, layer.dtype.itemsize
    sizes = [(bottom - top) * (right - left) * itemsize for (top, bottom), (left, right) in grid.tiles]
    made = f"its weight of {format_bytes(sum(sizes))} is in {len(sizes)} tiles of at most {format_bytes(max(sizes))}"
    if isinstance(layer, TiledLinear):
        made += f", {format_bytes(grid.panel * itemsize)} of it at a time"
    return made
