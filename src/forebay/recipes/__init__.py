"""Recipes: models with a name, shipped as data. A recipe may bring settings for ``train`` that suit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from forebay.errors import ConfigError

__all__ = ["Recipe", "load_recipe", "recipe_names", "settings_of"]


@dataclass(frozen=True)
class Recipe:
    """A named model.

    ``model`` is the content of a transformers config.json; ``train`` are settings of ``TrainConfig`` that hold
    unless the user says otherwise.
    """

    name: str
    description: str
    model: Mapping[str, Any]
    train: Mapping[str, Any] = field(default_factory=dict)


def recipe_names() -> tuple[str, ...]:
    """The names of all recipes, in alphabetical order."""
    found = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def load_recipe(name: str) -> Recipe:
    """The recipe called ``name``. Raises ``ConfigError`` listing the names if there is none."""
    if name not in recipe_names():
        raise ConfigError(f"there is no recipe {name}; recipes are {', '.join(recipe_names())}")
    return Recipe(name=name, **json.loads((files(__name__) / f"{name}.json").read_text(encoding="utf-8")))


def settings_of(model: str | None) -> Mapping[str, Any]:
    """Settings that come with ``model`` where it is the name of a recipe; else none."""
    return load_recipe(model).train if model is not None and model in recipe_names() else {}
