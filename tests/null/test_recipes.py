"""Recipes as data: every file can be read, says what it is, and means what its name says. No torch."""

from __future__ import annotations

import json
from importlib.resources import files

import pytest

from forebay.recipes import load_recipe, recipe_names

TRAINABLE = {"demo", "demo-card", "llama-135m", "tiny"}
"""The recipes that bring settings for ``train``, or are small enough to need none."""

SEQUENCES = {"t5", "vit"}
"""Model types that are not language models over one sequence."""


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_is_what_its_file_says(name: str) -> None:
    content = json.loads((files("forebay.recipes") / f"{name}.json").read_text(encoding="utf-8"))
    assert set(content) <= {"description", "model", "train"}
    recipe = load_recipe(name)
    assert recipe.name == name
    assert 20 < len(recipe.description) < 120 and not recipe.description.endswith(".")
    assert recipe.model["model_type"]
    assert (name in TRAINABLE) or not recipe.train


@pytest.mark.parametrize("name", sorted(set(recipe_names()) - TRAINABLE))
def test_the_description_gives_the_size_that_the_name_has(name: str) -> None:
    assert "million" in load_recipe(name).description or "billion" in load_recipe(name).description


@pytest.mark.parametrize("name", recipe_names())
def test_heads_divide_the_width(name: str) -> None:
    model = load_recipe(name).model
    if model["model_type"] in SEQUENCES | {"gpt2", "deepseek_v2"}:
        return
    heads, groups = model["num_attention_heads"], model.get("num_key_value_heads", model["num_attention_heads"])
    assert heads % groups == 0
    assert "head_dim" in model or model["hidden_size"] % heads == 0


def test_the_range_is_there() -> None:
    names = set(recipe_names())
    assert names >= TRAINABLE
    assert names >= {"gpt2", "smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"}
    assert names >= {"qwen2.5-0.5b", "qwen2.5-72b", "gemma-2-27b", "phi-3-mini", "olmo-2-7b", "mistral-7b"}
    assert names >= {"mixtral-8x7b", "mixtral-8x22b", "qwen3-30b-a3b", "deepseek-v2-lite"}, "mixtures of experts"
    assert names >= {"t5-small", "flan-t5-xxl"}, "encoder-decoders"
    assert "vit-base" in names
