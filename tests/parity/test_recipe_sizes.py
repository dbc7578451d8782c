"""Every recipe, built without memory for its parameters, has as many of them as its model card says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import torch
from torch import nn

from forebay.errors import ConfigError, ModelError
from forebay.recipes import load_recipe, recipe_names
from forebay.recipes.sources import build, find
from forebay.recipes.tasks import sample

# Parameters of the published weights (the safetensors' own count on the model cards; tied embeddings once).
PUBLISHED = {
    "deepseek-v2-lite": 15_706_484_224,
    "demo": 25_960_960,
    "demo-card": 103_057_920,
    "flan-t5-base": 247_577_856,
    "flan-t5-large": 783_150_080,
    "flan-t5-small": 76_961_152,
    "flan-t5-xl": 2_849_757_184,
    "flan-t5-xxl": 11_135_332_352,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gpt2": 124_439_808,
    "gpt2-large": 774_030_080,
    "gpt2-medium": 354_823_168,
    "gpt2-xl": 1_557_611_200,
    "llama-135m": 134_515_008,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-1b": 1_484_916_736,
    "olmo-2-32b": 32_234_279_936,
    "olmo-2-7b": 7_298_617_344,
    "olmoe-1b-7b": 6_919_161_856,
    "phi-3-medium": 13_960_238_080,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "pythia-1.4b": 1_414_647_808,
    "pythia-12b": 11_846_072_320,
    "pythia-160m": 162_322_944,
    "pythia-6.9b": 6_857_302_016,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "smollm2-1.7b": 1_711_376_384,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-small": 60_506_624,
    "tiny": 217_664,
    "vit-base": 86_567_656,
    "vit-huge": 632_045_800,
    "vit-large": 304_326_632,
}


def test_every_recipe_has_a_published_count() -> None:
    assert set(recipe_names()) == set(PUBLISHED)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_has_the_parameters_of_its_model_card(name: str) -> None:
    found = sample(name, batch=2, seq=16, dtype="bfloat16")
    parameters = list(found.model.parameters())
    assert all(p.is_meta and p.dtype is torch.bfloat16 for p in parameters)
    assert not any(b.is_meta for b in found.model.buffers())
    assert abs(sum(p.numel() for p in parameters) / PUBLISHED[name] - 1) < 0.01
    assert found.model.training
    assert {given.shape[0] for given in found.batch.values() if isinstance(given, torch.Tensor)} == {2}


def test_a_mixture_of_experts_runs_few_of_them() -> None:
    """Qwen3-30B-A3B: 3.3 billion parameters see a token (its model card): all but the experts, and 8 of 128."""
    model = sample("qwen3-30b-a3b", batch=1, seq=8, dtype="bfloat16").model
    experts = sum(p.numel() for n, p in model.named_parameters() if ".experts." in n)
    rest = sum(p.numel() for p in model.parameters()) - experts
    assert abs((rest + experts * 8 / 128) / 3.3e9 - 1) < 0.02


def test_heads_are_tied_as_the_configuration_says() -> None:
    for name, tied in (("t5-small", True), ("flan-t5-small", False)):
        model = sample(name, batch=1, seq=8, dtype="float32").model
        assert (model.lm_head.weight is model.shared.weight) is tied
        assert model.encoder.embed_tokens.weight is model.shared.weight, "the inner embeddings stay tied"


def test_a_vision_model_takes_images_and_no_sequence() -> None:
    found = sample("vit-base", batch=3, seq=10**9, dtype="float32")
    assert found.seq is None
    assert found.batch["pixel_values"].shape == (3, 3, 224, 224)
    assert found.batch["labels"].shape == (3,)


def test_attention_is_never_materialised_where_it_need_not_be() -> None:
    for name in ("llama-3.2-1b", "gpt2", "vit-base"):
        assert sample(name, batch=1, seq=8, dtype="float32").model.config._attn_implementation == "sdpa"


def test_train_builds_causal_language_models_only() -> None:
    with pytest.raises(ModelError, match=r"t5-small is an encoder-decoder, and here causal"):
        build(find("t5-small"), "float32")


def test_a_config_file_is_a_model(tmp_path: Path) -> None:
    path = tmp_path / "small.json"
    path.write_text(json.dumps(load_recipe("tiny").model))
    assert sum(p.numel() for p in sample(str(path), batch=1, seq=4, dtype="float32").model.parameters()) == 217_664


def make_pair() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return nn.Linear(4, 1), {"input": torch.zeros(2, 4)}


def make_alone() -> nn.Module:
    return nn.Linear(4, 1)


def make_nothing() -> int:
    return 3


def make_trouble() -> nn.Module:
    raise RuntimeError("no such luck")


def make_transformer() -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**load_recipe("tiny").model))


HERE = "tests.parity.test_recipe_sizes"


def test_a_function_is_called_on_the_meta_device() -> None:
    found = sample(f"{HERE}:make_pair", batch=1, seq=8, dtype="float32")
    assert found.model.weight.is_meta and found.batch["input"].is_meta
    assert found.seq is None
    found = sample(f"{HERE}:make_transformer", batch=1, seq=8, dtype="bfloat16")
    assert next(found.model.parameters()).dtype is torch.bfloat16
    assert found.batch["input_ids"].shape == (1, 8)


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (f"{HERE}:make_alone", r"returned a Linear alone.*return \(model, batch\)"),
        (f"{HERE}:make_nothing", r"must return a model, or \(model, batch\).*returned a int"),
        (f"{HERE}:make_trouble", r"failed on the meta device: RuntimeError: no such luck"),
        (f"{HERE}:nowhere", r"has no function 'nowhere'"),
        ("no.such.package:make", r"cannot import no\.such\.package"),
        ("gpt5", r"there is no model gpt5; did you mean gpt2\? It is neither a recipe"),
        ("meta-llama/Llama-3.2-1B", r"did you mean llama-3\.2-1b\?.*nothing is downloaded"),
        ("/nowhere/at/all", r"there is no model /nowhere/at/all: it is neither"),
    ],
)
def test_what_is_no_model(name: str, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        sample(name, batch=1, seq=8, dtype="float32")


def test_more_tokens_than_positions() -> None:
    with pytest.raises(ConfigError, match=r"--seq 2048 is longer than the 1024 positions of gpt2"):
        sample("gpt2", batch=1, seq=2048, dtype="float32")
