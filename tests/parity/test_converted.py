"""Weights in files that have other names and other parts than the model: ``forebay.load`` makes of them what
``from_pretrained`` makes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("transformers")

import transformers

import forebay
from forebay.checkpoint.weights import Weights
from forebay.cli.export import export
from forebay.errors import ConfigError
from forebay.recipes.sources import build_as, find, kind_of, read_config

SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 32),
    **dict.fromkeys(("num_local_experts", "num_experts", "num_attention_heads"), 4),
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads", "num_experts_per_tok"), 2),
    **{"vocab_size": 96, "image_size": 16, "patch_size": 8},
}

HEADS: Mapping[str, str] = {
    "MixtralForCausalLM": "layers.1.mlp.experts.gate_up_proj",
    "Qwen3MoeForCausalLM": "layers.1.mlp.experts.down_proj",
    "GPTNeoXForCausalLM": "lm_head.weight",
    "ViTForImageClassification": "layers.0.attention.q_proj.weight",
    "BertForMaskedLM": "",
}
"""Classes of models, and a parameter that their files do not have; Bert's have all."""


def saved(head: str, folder: Path) -> nn.Module:
    """A small model of the class ``head``, as transformers saves it."""
    made = getattr(transformers, head)
    has = made.config_class().to_dict()
    torch.manual_seed(0)
    model: nn.Module = made(made.config_class(**{name: value for name, value in SIZES.items() if name in has}))
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def prepared(folder: Path, dtype: str = "float32") -> nn.Module:
    """The model of ``folder`` without its values."""
    source = find(str(folder))
    config = read_config(source)
    model = build_as(source, dtype, kind_of(source, config), config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    forebay.prepare(model, optimizer, device_memory="64MiB", device="cpu", policy="stream")
    return model


@pytest.mark.parametrize("head", HEADS)
def test_it_is_what_from_pretrained_makes(head: str, tmp_path: Path) -> None:
    saved(head, tmp_path)
    expected = getattr(transformers, head).from_pretrained(tmp_path).state_dict()
    missing = HEADS[head]
    assert not missing or not any(name.endswith(missing) for name in Weights(tmp_path).names)
    assert any(name.endswith(missing) for name in expected)
    model = prepared(tmp_path)
    forebay.load(model, str(tmp_path))
    state = model.state_dict()
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    forebay.close(model)


def test_masters_are_not_rounded(tmp_path: Path) -> None:
    values = saved("MixtralForCausalLM", tmp_path).state_dict()
    model = prepared(tmp_path, "bfloat16")
    forebay.load(model, str(tmp_path))
    parameters = forebay.parameters(model)
    assert all(torch.equal(parameters[name], values[name]) for name in parameters)
    forebay.close(model)


def test_the_models_own_names_are_read_too(tmp_path: Path) -> None:
    """As ``forebay train`` writes them."""
    values = saved("MixtralForCausalLM", tmp_path).state_dict()
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "model.safetensors")
    model = prepared(tmp_path)
    forebay.load(model, str(tmp_path))
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    forebay.close(model)


def test_an_expert_that_is_not_there_is_told(tmp_path: Path) -> None:
    """Before anything has changed."""
    values = saved("MixtralForCausalLM", tmp_path).state_dict()
    model = prepared(tmp_path)
    forebay.load(model, str(tmp_path))
    files = load_file(tmp_path / "model.safetensors")
    del files["model.layers.1.block_sparse_moe.experts.3.w2.weight"]
    save_file({name: value + 1 for name, value in files.items()}, tmp_path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"layers\.1\.mlp\.experts\.down_proj in .* has shape \(3, 32, 32\), the model"
    ):
        forebay.load(model, str(tmp_path))
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    forebay.close(model)


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    weights = Weights(folder)
    return {name: weights.read(name) for name in weights.names}


@pytest.mark.parametrize("head", HEADS)
def test_an_export_is_what_save_pretrained_writes(head: str, tmp_path: Path) -> None:
    saved(head, tmp_path / "saved")
    model = prepared(tmp_path / "saved")
    forebay.load(model, str(tmp_path / "saved"))
    forebay.export(model, tmp_path / "exported")
    forebay.close(model)
    expected, found = files_of(tmp_path / "saved"), files_of(tmp_path / "exported")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("own", [False, True], ids=["as on the hub", "as the model is built"])
def test_a_run_is_exported_by_either_names(tmp_path: Path, *, own: bool) -> None:
    model = saved("MixtralForCausalLM", tmp_path / "run")
    values, expected = model.state_dict(), files_of(tmp_path / "run")
    if own:
        save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "run" / "model.safetensors")
    export(tmp_path / "run", tmp_path / "exported", dtype="float32")
    found = files_of(tmp_path / "exported")
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    export(tmp_path / "run", tmp_path / "torch", layout="torch")
    state = torch.load(tmp_path / "torch" / "model.pt", weights_only=True)
    assert set(state) == set(values)
    assert all(torch.equal(state[name], value) for name, value in values.items())
