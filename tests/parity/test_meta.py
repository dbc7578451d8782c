"""A model that was built on the meta device gets its values straight into its tiers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
    LlamaForCausalLM,
)

import forebay
from forebay.errors import ConfigError, ModelError, SessionClosed, StorageError
from forebay.memory import Tier
from forebay.runtime.contents import LazyTensors
from forebay.runtime.generators import HostNumbers
from forebay.runtime.hooks import session_of
from tests.parity.models import CASES, convnet, tokens
from tests.parity.test_streaming import everything_on_disk

accelerate = pytest.importorskip("accelerate")

AMPLE = "64MiB"


def on_meta(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The model of ``folder``'s config.json, without values; ``init_empty_weights`` unties what is tied."""
    from transformers import AutoConfig

    with accelerate.init_empty_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)
    model.tie_weights()
    assert all(p.is_meta for p in model.parameters())
    return model


def prepared(model: nn.Module, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return forebay.prepare(model, made, device_memory=AMPLE, device="cpu", **options)


@pytest.fixture(params=["llama", "llama-tied"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Weights as transformers saves them, in many files."""
    folder = tmp_path / "weights"
    CASES[request.param].model(torch.float32).save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["auto", "stream", "disk"])
def test_load_equals_from_pretrained(folder: Path, way: str, dtype: torch.dtype, tmp_path: Path) -> None:
    expected = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    options: dict[str, Any] = {"policy": way}
    if way == "disk":
        disk = f"{tmp_path}:64MiB"
        options = {"plan": everything_on_disk(LlamaForCausalLM.from_pretrained(folder, dtype=dtype), disk)}
        options["disk"] = disk
    model, optimizer = prepared(on_meta(folder, dtype), **options)
    with pytest.raises(SessionClosed, match=r"no values yet.*forebay\.load.*forebay\.initialize"):
        model(**tokens(0))
    forebay.load(model, str(folder))
    plan = forebay.report(model).plan
    host = {t.tier: t for t in forebay.report(model).timeline.tiers}[Tier.HOST]
    assert host.peak <= plan.host
    state = model.state_dict()
    assert list(state) == list(expected.state_dict())
    for name, tensor in expected.state_dict().items():
        assert torch.equal(state[name], tensor), name
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    for step in range(2):
        losses = []
        for subject, used in ((model, optimizer), (expected, plain)):
            loss = subject(**tokens(step)).loss
            loss.backward()
            losses.append(loss)
            if dtype is torch.float32 or subject is model:  # plain bf16 training has no master
                used.step()
            used.zero_grad()
        assert torch.equal(*losses)
        if dtype is torch.bfloat16:
            break
    forebay.close(model)


def test_tied_stays_tied(tmp_path: Path) -> None:
    CASES["llama-tied"].model(torch.float32).save_pretrained(tmp_path / "w")
    model, _ = prepared(on_meta(tmp_path / "w"), policy="stream")
    forebay.load(model, str(tmp_path / "w"))
    assert model.get_parameter("lm_head.weight") is model.get_parameter("model.embed_tokens.weight")
    assert "lm_head.weight" not in forebay.parameters(model)
    state = model.state_dict()
    assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    forebay.close(model)


def test_what_was_untied_is_named(tmp_path: Path) -> None:
    CASES["llama-tied"].model(torch.float32).save_pretrained(tmp_path)
    with accelerate.init_empty_weights():
        model = CASES["llama-tied"].make()
    model, _ = prepared(model, policy="stream")
    with pytest.raises(ConfigError, match=r"no tensor lm_head\.weight.*model\.tie_weights\(\)"):
        forebay.load(model, str(tmp_path))
    forebay.close(model)


def test_a_bf16_file_into_an_fp32_model(tmp_path: Path) -> None:
    saved = CASES["llama"].model(torch.bfloat16)
    saved.save_pretrained(tmp_path / "w")
    model, _ = prepared(on_meta(tmp_path / "w", torch.float32), policy="stream")
    forebay.load(model, str(tmp_path / "w"))
    for name, tensor in saved.state_dict().items():
        value = forebay.parameters(model)[name]
        assert value.dtype is torch.float32 and torch.equal(value, tensor.float()), name
    forebay.close(model)


def test_an_fp32_file_into_a_bf16_model_fills_the_master_unrounded(tmp_path: Path) -> None:
    saved = CASES["llama"].model(torch.float32)
    saved.save_pretrained(tmp_path / "w")
    model, _ = prepared(on_meta(tmp_path / "w", torch.bfloat16), policy="stream")
    forebay.load(model, str(tmp_path / "w"))
    state = model.state_dict()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(forebay.parameters(model)[name], tensor), name
        assert torch.equal(state[name], tensor.bfloat16()), name
    forebay.close(model)


def test_loading_into_a_model_that_has_values(folder: Path) -> None:
    """Weights can be loaded again at any time; the optimizer's states stay."""
    model = LlamaForCausalLM.from_pretrained(folder)
    expected = {n: t.clone() for n, t in model.state_dict().items()}
    model, optimizer = prepared(model, policy="stream")
    model(**tokens(0)).loss.backward()
    optimizer.step()
    forebay.load(model, str(folder))
    assert all(torch.equal(model.state_dict()[n], t) for n, t in expected.items())
    assert optimizer.state_dict()["state"]
    forebay.close(model)


def without_tensor(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))


def with_another_shape(folder: Path) -> None:
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2,
        )
    ).save_pretrained(folder, max_shard_size="40KB")  # fmt: skip


def truncated(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-100])


def without_file(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


def index_of_nothing(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1, 2')


def index_of_another_kind(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weights": {}}')


def index_of_no_files(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"lm_head.weight": 3}}')


def index_as_a_list(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [1]}')


def index_that_lies(folder: Path) -> None:
    """It names a file that is there and does not hold the tensor."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    files = sorted(set(content["weight_map"].values()))
    place = content["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    content["weight_map"]["model.layers.1.mlp.up_proj.weight"] = next(f for f in files if f != place)
    index.write_text(json.dumps(content))


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        if "safetensors" in file.name:
            file.unlink()


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (without_tensor, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight.*another model"),
    "wrong shape": (with_another_shape, r"mlp\..*has shape \(.*64.*the model's has \(.*48.*config\.json"),
    "truncated": (truncated, r"model-00002-of.*cannot be read as safetensors"),
    "missing file": (without_file, r"model-00002-of.*cannot be read as safetensors"),
    "broken index": (index_of_nothing, r"index\.json is not an index of safetensors; save the model again"),
    "other index": (index_of_another_kind, r"index\.json is not an index of safetensors; save the model again"),
    "index of no files": (index_of_no_files, r"index\.json is not an index of safetensors; save the model again"),
    "index as a list": (index_as_a_list, r"index\.json is not an index of safetensors; save the model again"),
    "lying index": (index_that_lies, r"has no model\.layers\.1\.mlp\.up_proj\.weight although the index says so"),
    "no files": (empty, r"has no safetensors; save the model with save_pretrained"),
}


@pytest.mark.parametrize("bad", BAD)
def test_weights_that_cannot_be_used(tmp_path: Path, bad: str) -> None:
    spoil, match = BAD[bad]
    good, spoiled = tmp_path / "good", tmp_path / "spoiled"
    for folder in (good, spoiled):
        CASES["llama"].model(torch.float32).save_pretrained(folder, max_shard_size="40KB")
    spoil(spoiled)
    model, _ = prepared(on_meta(good), policy="stream")
    with pytest.raises(ConfigError, match=match):
        forebay.load(model, str(spoiled))
    # What is missing is not forgotten, and the right folder still works.
    with pytest.raises(SessionClosed, match="no values yet"):
        model(**tokens(0))
    forebay.load(model, str(good))
    assert model(**tokens(0)).loss.isfinite()
    forebay.close(model)


class Scaled(nn.Module):
    """A layer with a running mean and a scale that belong to its state dict, and one that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.full((4,), 2.0))
        self.register_buffer("made", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(x) * self.scale + self.made
        return out


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def test_a_buffer_that_is_not_persistent_is_left_alone(tmp_path: Path) -> None:
    model, _ = prepared(Scaled())
    values = {name: value + 3 for name, value in Scaled().state_dict().items()}
    save_file({**values, "made": torch.zeros(9)}, tmp_path / "model.safetensors")
    forebay.load(model, str(tmp_path))
    found = buffers_of(model)
    assert torch.equal(found.pop("made"), torch.arange(4.0))
    assert all(torch.equal(value, values[name]) for name, value in found.items())
    forebay.close(model)


@pytest.mark.parametrize("lacks", ["scale", "norm.running_mean"])
def test_a_buffer_that_is_missing_is_named(lacks: str, tmp_path: Path) -> None:
    """Before anything has changed."""
    model, _ = prepared(Scaled())
    before = buffers_of(model)
    values = {name: value + 3 for name, value in Scaled().state_dict().items() if name != lacks}
    save_file(values, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"has no tensor {lacks}, which is a buffer"):
        forebay.load(model, str(tmp_path))
    after = buffers_of(model)
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert torch.equal(forebay.parameters(model)["norm.weight"], torch.ones(4))
    forebay.close(model)


def test_buffers_that_from_pretrained_does_without_keep_their_values(tmp_path: Path) -> None:
    sizes = dict.fromkeys(("d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 8)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 1)
    config = BartConfig(vocab_size=16, max_position_embeddings=8, encoder_layers=1, decoder_layers=1, **sizes, **heads)
    made = BartForConditionalGeneration(config)
    made.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["final_logits_bias"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    _, info = BartForConditionalGeneration.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    model, _ = prepared(made, policy="stream")
    forebay.load(model, str(tmp_path))
    assert not model.get_buffer("final_logits_bias").any()
    forebay.close(model)


def test_no_folder(tmp_path: Path) -> None:
    model, _ = prepared(CASES["used-twice"].model(torch.float32))
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere"):
        forebay.load(model, str(tmp_path / "nowhere"))
    forebay.close(model)


@pytest.mark.parametrize("policy", ["auto", "stream"])
@pytest.mark.parametrize("name", ["llama", "llama-tied", "gpt2"])
def test_initialize_is_repeatable_and_the_models_own(name: str, policy: str) -> None:
    """The same values for the same seed whatever the plan, with the mean and spread of the model's own init."""
    values: list[dict[str, torch.Tensor]] = []
    for seed in (1, 1, 2):
        with accelerate.init_empty_weights():
            model = CASES[name].make()
        model.tie_weights()
        model, _ = prepared(model, policy=policy)
        before = torch.get_rng_state()
        forebay.initialize(model, seed)
        assert torch.equal(torch.get_rng_state(), before), "the user's stream of random numbers is left alone"
        assert model(**tokens(0)).loss.isfinite()
        values.append(dict(forebay.parameters(model).items()))
        forebay.close(model)
    own = dict(CASES[name].model(torch.float32).named_parameters())
    assert set(values[0]) == set(own)
    for key, parameter in own.items():
        first, again, other = (v[key] for v in values)
        assert torch.equal(first, again), key
        spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
        if spread == 0.0:
            assert torch.equal(first, parameter), key  # a norm's ones, a bias' zeros
            continue
        assert not torch.equal(first, other), key
        # Of n draws the spread is known to about 1 in sqrt(2n), the mean to spread / sqrt(n): 6 of these.
        n = parameter.numel()
        assert abs(float(first.std()) / spread - 1) < 6 / n**0.5 + 0.01, key
        assert abs(float(first.mean())) < 6 * spread / n**0.5, key


class Noisy(nn.Linear):
    """Its values come from NumPy, those of its bias from Python."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.randn(*self.weight.shape)))
            self.bias.fill_(random.random())


def test_initialize_is_repeatable_where_values_come_from_numpy() -> None:
    values: list[dict[str, torch.Tensor]] = []
    for seed in (1, 1, 2):
        with torch.device("meta"):
            model: nn.Module = nn.Sequential(*(Noisy(16, 16) for _ in range(3)))
        model, _ = prepared(model, policy="stream")
        before = HostNumbers()
        forebay.initialize(model, seed)
        assert HostNumbers() == before, "the user's stream of random numbers is left alone"
        values.append(dict(forebay.parameters(model).items()))
        forebay.close(model)
    for key, first in values[0].items():
        assert torch.equal(first, values[1][key]) and not torch.equal(first, values[2][key])


def test_initialize_needs_a_way() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            self.table = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x + self.table

    with accelerate.init_empty_weights():
        model: nn.Module = Own()
    model, _ = prepared(model, policy="stream")
    with pytest.raises(ModelError, match=r"does not initialise table .*forebay.load"):
        forebay.initialize(model)
    forebay.close(model)


def test_buffers_without_values_are_refused_before_anything_moves() -> None:
    with torch.device("meta"):
        model = convnet()
    parameters = list(model.parameters())
    with pytest.raises(ModelError, match=r"buffer body\.1\.1\.running_mean is on the meta device.*init_empty_weights"):
        prepared(model)
    assert all(p is q and p.is_meta for p, q in zip(parameters, model.parameters(), strict=True))


def test_values_that_cannot_all_be_read_leave_a_model_that_says_so() -> None:
    """What was written of them is there already: no pass runs on some of each."""
    case = CASES["llama"]
    model = case.model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = forebay.prepare(model, optimizer, case.inputs(0, torch.float32), device_memory="64MiB", device="cpu")
    attachment = session_of(model)
    assert attachment is not None
    contents = attachment.session.contents
    block = next(b for b in attachment.session.model.blocks if len(b.parameters) > 1)
    first, last = block.parameters[0], block.parameters[-1]

    def read(name: str) -> torch.Tensor:
        if name == last.name:
            raise StorageError("the disk went away")
        return torch.zeros(first.shape)

    with pytest.raises(StorageError, match="went away"):
        contents.write(LazyTensors([first.name, last.name], read))
    with pytest.raises(SessionClosed, match="no values yet"):
        model(**case.inputs(0, torch.float32))
    contents.write({first.name: torch.zeros(first.shape), last.name: torch.zeros(last.shape)})
    model(**case.inputs(0, torch.float32))
    forebay.close(model)
