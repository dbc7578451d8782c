"""The same model with fewer layers, for every kind of model that has a recipe."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from forebay.errors import ConfigError
from forebay.recipes import load_recipe, recipe_names
from forebay.recipes.depth import depth_of, with_layers
from forebay.recipes.sources import find, read_config
from forebay.recipes.tasks import build_any, depth, sample

KINDS = {str(load_recipe(name).model["model_type"]): name for name in recipe_names()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_layers_are_those_of_the_whole(kind: str) -> None:
    source = find(KINDS[kind])
    config = read_config(source)
    whole = depth_of(config)
    assert whole is not None and whole > 2 and depth(KINDS[kind]) == whole
    short = build_any(source, "float32", COUNT.get(kind, 2))
    shapes = {name: parameter.shape for name, parameter in short.named_parameters()}
    layers = {number for name in shapes for number in _number(name)}
    assert layers == {str(number) for number in range(COUNT.get(kind, 2))}
    assert depth_of(read_config(source)) == depth_of(config) == whole, "the configuration itself stays"


COUNT = {"deepseek_v2": 1}
"""Of its second layer the experts take seconds to build."""

PARTS = ("layers", "h", "block", "layer")


def _number(name: str) -> list[str]:
    """The layer in the name of a parameter, if it is in one."""
    part = next((part for part in PARTS if f".{part}." in name), None)
    return [] if part is None else [name.split(f".{part}.")[1].split(".")[0]]


def test_what_is_said_of_each_layer_is_cut_too() -> None:
    config = read_config(find(KINDS["gemma2"]))
    whole = depth_of(config)
    assert whole is not None and len(config.layer_types) == whole
    assert with_layers(config, 3).layer_types == config.layer_types[:3] and len(config.layer_types) == whole


def test_a_function_makes_what_it_makes() -> None:
    assert depth("tests.parity.test_verify_cli:own") is None
    with pytest.raises(ConfigError, match="leave --layers"):
        sample("tests.parity.test_verify_cli:own", batch=1, seq=8, dtype="float32", layers=1)
