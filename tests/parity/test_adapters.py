"""Adapters of PEFT, over a frozen model that is plain or in 4 bits, and TRL's SFTTrainer: with a memory plan the
numbers are those of the libraries alone.

The libraries take seconds to import, so all of them are in this file.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("bitsandbytes")
pytest.importorskip("datasets")
pytest.importorskip("trl")

import bitsandbytes
from datasets import Dataset
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
    prepare_model_for_kbit_training,
)
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import forebay
from forebay.errors import ModelError
from forebay.integrations.bitsandbytes import StreamedLinear4bit, StreamedLinear8bit, stream
from forebay.integrations.transformers import FOLDER, ForebayTrainer, Memory
from forebay.integrations.trl import ForebaySFTTrainer
from forebay.memory import Kind, Tier

LORA = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM", "lora_dropout": 0.1}

LETTERS = {chr(code): code - 30 for code in range(33, 127)}

QUIET = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "learning_rate": 1e-3}


def llama(vocabulary: int = 128) -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=64, **shape))


def tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordLevel({"[UNK]": 0, "[EOS]": 1, "[PAD]": 2, **LETTERS}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="[EOS]", pad_token="[PAD]")


@pytest.fixture
def closed() -> Iterator[list[Trainer]]:
    """Trainers whose models are closed at the end."""
    made: list[Trainer] = []
    yield made
    for one in made:
        forebay.close(one.model)
    gc.collect()


def seen(of: Trainer) -> list[dict[str, float]]:
    """What the Trainer logged, without times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "entropy", "mean_token_accuracy", "num_tokens", "step")
    return [{name: entry[name] for name in kept if name in entry} for entry in of.state.log_history]


def same(one: nn.Module, other: nn.Module, part: str = "") -> bool:
    left, right = one.state_dict(), other.state_dict()
    named = [name for name in right if part in name]
    return left.keys() == right.keys() and bool(named) and all(torch.equal(left[n], right[n]) for n in named)


def expect_only_adapters_have_states(trained: Trainer) -> None:
    """Of the ledger of the host and of the optimizer: the frozen model has neither gradients nor states."""
    adapters = {name: p for name, p in trained.model.named_parameters() if p.requires_grad}
    assert adapters and all("lora_" in name for name in adapters)
    nbytes = sum(p.nbytes for p in adapters.values())
    # Those of each block begin at whole pages.
    padding = 4096 * len(forebay.report(trained.model).plan.placements)
    host = forebay.report(trained.model).usage(Tier.HOST)
    assert host is not None
    assert 0 < host.at_peak[Kind.GRADIENT] <= nbytes + padding
    assert 0 < host.at_peak[Kind.STATE] <= 2 * nbytes + padding
    whole = sum(p.nbytes for p in trained.model.parameters())
    assert host.at_peak[Kind.PARAMETER] >= whole > 3 * nbytes


# TRL.


def sft(folder: Path, memory: Memory | None, *, lora: bool, packing: bool) -> Trainer:
    few = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 2}
    when = {"max_steps": 3, "save_steps": 2, "eval_strategy": "steps", "eval_steps": 3}
    args = SFTConfig(str(folder), max_length=24, bf16=False, packing=packing, **few, **when, **QUIET)
    data = Dataset.from_dict({"text": [f"thequickbrownfox{i}jumpsover{i * i}lazydogs" for i in range(24)]})
    given: dict[str, Any] = {
        "model": llama(),
        "args": args,
        "train_dataset": data,
        "eval_dataset": data.select(range(2)),
        "processing_class": tokenizer(),
        "peft_config": LoraConfig(**LORA) if lora else None,
    }
    return SFTTrainer(**given) if memory is None else ForebaySFTTrainer(memory=memory, **given)


@pytest.mark.parametrize(
    ("lora", "packing"),
    [
        pytest.param(False, False, id="full", marks=pytest.mark.slow),
        pytest.param(True, True, id="lora-packed"),
        pytest.param(False, True, id="full-packed", marks=pytest.mark.slow),
        pytest.param(True, False, id="lora", marks=pytest.mark.slow),
    ],
)
def test_sft_trains_as_trl_does(closed: list[Trainer], tmp_path: Path, *, lora: bool, packing: bool) -> None:
    # Of these 3 MiB are a tile of logits, which are 32,768 entries wide whatever the vocabulary.
    own = sft(tmp_path / "own", Memory("6MiB", policy="stream"), lora=lora, packing=packing)
    closed.append(own)
    own.train()
    theirs = sft(tmp_path / "theirs", None, lora=lora, packing=packing)
    theirs.train()
    assert seen(own) == seen(theirs)
    assert same(own.model, theirs.model)
    record = forebay.report(own.model)
    # TRL reads the weight of the head itself, which streams all the same: it is there for a forward.
    (head,) = record.plan.read_outside
    assert head.endswith("lm_head") and not any(placed.resident for placed in record.plan.placements)
    assert record.measured_peaks()[Tier.DEVICE] <= record.predicted_peaks()[Tier.DEVICE] <= 6 << 20
    assert own.state.log_history[-1]["forebay_device_bytes"] == record.measured_peaks()[Tier.DEVICE]
    checkpoint = tmp_path / "own" / "checkpoint-3"
    assert (checkpoint / FOLDER).exists() is not lora
    if lora:
        expect_only_adapters_have_states(own)
        loaded = PeftModel.from_pretrained(llama(), checkpoint)
    else:
        loaded = LlamaForCausalLM.from_pretrained(checkpoint)
    assert same(own.model, loaded)


# PEFT, and QLoRA.


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the frozen model."""
    folder = tmp_path_factory.mktemp("base")
    llama().save_pretrained(folder)
    return folder


IN_4_BITS: dict[str, Any] = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_compute_dtype": torch.float32,
}


def quantised(base: Path, **how: Any) -> PeftModel:
    how = BitsAndBytesConfig(**how)
    loaded = AutoModelForCausalLM.from_pretrained(base, quantization_config=how, device_map={"": "cpu"})
    ready = prepare_model_for_kbit_training(loaded)
    torch.manual_seed(5)
    return get_peft_model(ready, LoraConfig(**LORA))


def adapted(base: Path) -> PeftModel:
    loaded = LlamaForCausalLM.from_pretrained(base)
    torch.manual_seed(5)
    return get_peft_model(loaded, LoraConfig(**LORA))


def with_adapters() -> LlamaForCausalLM:
    """Put there by transformers."""
    made = llama()
    torch.manual_seed(5)
    made.add_adapter(LoraConfig(**LORA))
    return made


def trainer(folder: Path, model: PeftModel | LlamaForCausalLM, memory: Memory | None, **more: Any) -> Trainer:
    generator = torch.Generator().manual_seed(1)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (24, 32), generator=generator)]
    usual = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "save_steps": 2}
    args = TrainingArguments(str(folder), **{**usual, **QUIET, **more})
    given: dict[str, Any] = {"model": model, "args": args, "train_dataset": data, "eval_dataset": data[:4]}
    return Trainer(**given) if memory is None else ForebayTrainer(memory=memory, **given)


def expect_training_as_alone(closed: list[Trainer], tmp_path: Path, model: Any, base: Path, load: Any) -> Trainer:
    """Trains ``model()`` with a plan and without, resumes it, and loads what was saved on ``load()``."""
    own = trainer(tmp_path / "own", model(), Memory("2MiB", policy="stream"))
    closed.append(own)
    own.train()
    theirs = trainer(tmp_path / "theirs", model(), None)
    theirs.train()
    assert seen(own) == seen(theirs)
    assert same(own.model, theirs.model)
    expect_only_adapters_have_states(own)
    checkpoint = tmp_path / "own" / "checkpoint-2"
    assert (checkpoint / "adapter_model.safetensors").stat().st_size < 100_000
    assert not (checkpoint / FOLDER).exists() and not (checkpoint / "model.safetensors").exists()
    again = trainer(tmp_path / "own", model(), Memory("4MiB", policy="stream-recompute"))
    closed.append(again)
    again.train(resume_from_checkpoint=str(checkpoint))
    assert seen(again) == seen(own) and same(again.model, own.model)
    loaded = PeftModel.from_pretrained(load(), tmp_path / "own" / "checkpoint-4")
    assert same(loaded, own.model, "lora_")
    return own


def test_adapters_that_transformers_has_put_into_a_model(closed: list[Trainer], tmp_path: Path) -> None:
    """Checkpoints have them as the Trainer writes them, and what it goes on from, which the Trainer alone cannot."""
    short, memory = {"max_steps": 2, "save_steps": 1, "gradient_accumulation_steps": 1}, Memory("4MiB", policy="stream")
    own = trainer(tmp_path / "own", with_adapters(), memory, **short)
    closed.append(own)
    own.train()
    theirs = trainer(tmp_path / "theirs", with_adapters(), None, **short)
    theirs.train()
    assert seen(own) == seen(theirs) and same(own.model, theirs.model)
    files = [load_file(tmp_path / one / "checkpoint-2" / "adapter_model.safetensors") for one in ("own", "theirs")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][name], files[1][name]) for name in files[1])
    loaded = llama()
    loaded.load_adapter(str(tmp_path / "own" / "checkpoint-2"))
    assert same(loaded, own.model, "lora_")
    again = trainer(tmp_path / "again", with_adapters(), memory, **short)
    closed.append(again)
    again.train(resume_from_checkpoint=str(tmp_path / "own" / "checkpoint-1"))
    assert same(again.model, own.model)


@pytest.mark.parametrize(
    "config",
    [
        # Saved as its encoder makes it, which is called for that.
        PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
        # With projections that all layers share, by another name than the rest of it.
        VeraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    ],
    ids=["prompt", "vera"],
)
def test_other_adapters_are_saved_as_peft_saves_them(closed: list[Trainer], tmp_path: Path, config: PeftConfig) -> None:
    def run(name: str, memory: Memory | None, resumed: str | None = None) -> Trainer:
        model = llama()
        torch.manual_seed(5)
        short = {"max_steps": 2, "save_steps": 1, "gradient_accumulation_steps": 1}
        made = trainer(tmp_path / name, get_peft_model(model, deepcopy(config)), memory, **short)
        made.train(resume_from_checkpoint=resumed)
        return made

    theirs = run("theirs", None)
    own = run("own", Memory("4MiB", policy="stream"))
    closed.append(own)
    closed.append(run("own", Memory("4MiB", policy="stream"), str(tmp_path / "own" / "checkpoint-1")))
    assert all(seen(one) == seen(theirs) and same(one.model, theirs.model) for one in closed)
    files = [load_file(tmp_path / one / "checkpoint-2" / "adapter_model.safetensors") for one in ("own", "theirs")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][name], files[1][name]) for name in files[1])


@pytest.mark.parametrize("nested", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["nested", "single"])
def test_qlora_trains_as_bitsandbytes_does(closed: list[Trainer], tmp_path: Path, base: Path, *, nested: bool) -> None:
    how = {**IN_4_BITS, "bnb_4bit_use_double_quant": nested}

    def load() -> nn.Module:
        return quantised(base, **how).unload()

    own = expect_training_as_alone(closed, tmp_path, lambda: quantised(base, **how), base, load)
    layers = [module for module in own.model.modules() if isinstance(module, StreamedLinear4bit)]
    assert len(layers) == 3 * 7
    # Codes go with their block: half a byte an element, beside scales that stay on the device.
    plan = forebay.report(own.model).plan
    assert all(not placed.resident for placed in plan.placements)
    assert all(layer.weight.nbytes == layer.in_features * layer.out_features // 2 for layer in layers)
    assert all(set(dict(layer.named_buffers())) >= {"scale"} for layer in layers)


@pytest.mark.parametrize("threshold", [0.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_adapters_over_8_bits_train_as_over_bitsandbytes(
    closed: list[Trainer], tmp_path: Path, base: Path, threshold: float
) -> None:
    how = {"load_in_8bit": True, "llm_int8_threshold": threshold}
    when = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 1, "max_steps": 2}
    own = trainer(tmp_path / "own", quantised(base, **how), Memory("2MiB", policy="stream"), **when)
    closed.append(own)
    own.train()
    theirs = trainer(tmp_path / "theirs", quantised(base, **how), None, **when)
    theirs.train()
    # Evaluations too, in which activations are of 8 bits.
    assert seen(own) == seen(theirs) and sum("eval_loss" in entry for entry in seen(own)) == 2
    assert same(own.model, theirs.model)
    expect_only_adapters_have_states(own)
    layers = [module for module in own.model.modules() if isinstance(module, StreamedLinear8bit)]
    assert len(layers) == 3 * 7
    assert all(layer.weight.nbytes == layer.in_features * layer.out_features for layer in layers)
    assert all(not placed.resident for placed in forebay.report(own.model).plan.placements)
    loaded = PeftModel.from_pretrained(quantised(base, **how).unload(), tmp_path / "own" / "checkpoint-2")
    assert same(loaded, own.model, "lora_")


@pytest.mark.slow
def test_lora_trains_as_peft_does(closed: list[Trainer], tmp_path: Path, base: Path) -> None:
    expect_training_as_alone(
        closed, tmp_path, lambda: adapted(base), base, lambda: LlamaForCausalLM.from_pretrained(base)
    )


def quantised_layers(kind: type[nn.Module], **more: Any) -> nn.Sequential:
    layers = nn.Sequential(*(kind(64, 64, bias=False, **more) for _ in range(3)), nn.Linear(64, 4))
    return layers.to("cpu")


def test_the_layers_compute_what_those_of_bitsandbytes_do() -> None:
    torch.manual_seed(3)
    for compute in (torch.float32, torch.bfloat16):
        plain = bitsandbytes.nn.Linear4bit(64, 96, quant_type="nf4", compute_dtype=compute).to("cpu")
        own = bitsandbytes.nn.Linear4bit(64, 96, quant_type="nf4", compute_dtype=compute).to("cpu")
        own.load_state_dict(plain.state_dict(), strict=False)
        own.weight, own.bias = plain.weight, plain.bias
        assert stream(nn.Sequential(own)) == ("0",)
        x = torch.randn(2, 5, 64)
        results = []
        for layer in (plain, own):
            given = x.clone().requires_grad_()
            made = layer(given)
            made.square().sum().backward()
            results.append((made, given.grad))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize("threshold", [0.0, 2.0])
def test_layers_of_8_bits_compute_what_those_of_bitsandbytes_do(threshold: float) -> None:
    torch.manual_seed(3)
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(2, 5, 64)
    plain, own = (bitsandbytes.nn.Linear8bitLt(64, 96, has_fp16_weights=False, threshold=threshold) for _ in range(2))
    for layer in (plain, own):
        layer.load_state_dict({"weight": weight, "bias": bias})
        layer.to("cpu")  # where it is quantised
    plain(x)  # which moves scales and codes to another place
    assert stream(nn.Sequential(own)) == ("0",)
    assert own.state_dict().keys() == plain.state_dict().keys()
    assert all(torch.equal(value, own.state_dict()[name]) for name, value in plain.state_dict().items())
    for training in (True, False):
        results = []
        for layer in (plain, own):
            layer.train(training)
            given = x.clone().requires_grad_()
            made = layer(given)
            made.square().sum().backward()
            results.append((made, given.grad, layer.bias.grad))
        assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    assert torch.equal(plain(x[0]), own(x[0]))
    own.load_state_dict(plain.state_dict())
    assert stream(nn.Sequential(plain)) == ("0",) and torch.equal(plain(x), own(x))


def test_layers_that_keep_their_weights_are_refused_with_the_remedy() -> None:
    def prepared(model: nn.Module) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        forebay.prepare(model, optimizer, torch.randn(2, 64), device_memory="1MiB")

    model = quantised_layers(bitsandbytes.nn.Linear4bit)
    with pytest.raises(ModelError, match=r"0 is a Linear4bit .*; call forebay\.integrations\.bitsandbytes\.stream"):
        prepared(model)
    with pytest.raises(ModelError, match=r"0 is a Linear8bitLt .*; call forebay\.integrations\.bitsandbytes\.stream"):
        prepared(quantised_layers(bitsandbytes.nn.Linear8bitLt, has_fp16_weights=False))
    with pytest.raises(ModelError, match=r"0 trains 16 bits .*; train adapters over a model that is loaded in 8 bits"):
        stream(quantised_layers(bitsandbytes.nn.Linear8bitLt))
    with pytest.raises(ModelError, match="0 is not quantised yet"):
        stream(nn.Sequential(bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)))
    table = nn.Sequential(bitsandbytes.nn.Embedding4bit(8, 64), nn.Linear(64, 4)).to("cpu")
    with pytest.raises(ModelError, match=r"0 is a Embedding4bit .*; load it as it is"):
        prepared(table)
    with pytest.raises(ModelError, match="0 is not quantised yet"):
        stream(nn.Sequential(bitsandbytes.nn.Linear4bit(64, 64)))
    assert stream(model) == ("0", "1", "2") and stream(model) == ()
    prepared(model)
    forebay.close(model)
