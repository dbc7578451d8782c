"""Folders of ``save_pretrained``: the model that the configuration names, and a batch for what that is trained for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

import transformers

from forebay.cli.main import app
from forebay.errors import ConfigError, ModelError
from forebay.profiler.batch import with_values
from forebay.profiler.capture import capture
from forebay.recipes.sources import build, find
from forebay.recipes.tasks import sample

SMALL: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "d_model", "encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **{"vocab_size": 96, "max_position_embeddings": 40, "num_key_value_heads": 2, "image_size": 32, "patch_size": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"num_mel_bins": 8, "max_source_positions": 10, "max_target_positions": 40},
}

HEADS: Mapping[str, tuple[str, Mapping[str, Any], str]] = {
    "BertLMHeadModel": ("Bert", {"is_decoder": True}, "a causal language model"),
    "LlamaForCausalLM": ("Llama", {}, "a causal language model"),
    "BertForMaskedLM": ("Bert", {}, "a masked language model"),
    "BartForConditionalGeneration": ("Bart", {}, "an encoder-decoder"),
    "BertForSequenceClassification": ("Bert", {"num_labels": 5}, "a classifier of sequences"),
    "Qwen2ForSequenceClassification": ("Qwen2", {"num_labels": 1}, "a classifier of sequences"),
    "RobertaForSequenceClassification": (
        "Roberta",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        "a classifier of sequences",
    ),
    "RobertaForTokenClassification": ("Roberta", {"num_labels": 7}, "a classifier of tokens"),
    "BertForQuestionAnswering": ("Bert", {}, "a model that answers questions"),
    "ViTForImageClassification": ("ViT", {"num_labels": 3}, "an image classifier"),
    "WhisperForConditionalGeneration": ("Whisper", {}, "a model of speech"),
}
"""Classes with a head: whose configuration, what it says beside the sizes, and the word for them."""


def folder(path: Path, head: str | None, family: str, **numbers: Any) -> str:
    """With the configuration of a small model alone."""
    kind = getattr(transformers, f"{family}Config")
    has = kind().to_dict()
    config = kind(**{name: value for name, value in SMALL.items() if name in has}, **numbers)
    config.architectures = None if head is None else [head]
    config.save_pretrained(path)
    return str(path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("head", HEADS)
def test_a_folder_has_the_model_that_it_names(head: str, tmp_path: Path) -> None:
    family, numbers, word = HEADS[head]
    made = sample(folder(tmp_path / head, head, family, **numbers), batch=2, seq=16, dtype="float32")
    assert type(made.model).__name__ == head
    assert made.kind is not None and made.kind.what == word
    assert capture(made.model, made.batch).trace.visits
    # And with values: classes are those of the model.
    model: Any = made.model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for name, buffer in getattr(transformers, head)(model.config).named_buffers():
        model.get_buffer(name).copy_(buffer)
    loss = model(**with_values(made.batch, model, "cpu")).loss
    loss.backward()
    assert torch.isfinite(loss)


@pytest.mark.parametrize(
    ("head", "family", "instead"),
    [
        (None, "Llama", "LlamaForCausalLM"),
        (None, "Bart", "BartForConditionalGeneration"),
        (None, "ViT", "ViTForImageClassification"),
        ("LlamaModel", "Llama", "LlamaForCausalLM"),
        ("LLaMAForCausalLM", "Llama", "LlamaForCausalLM"),
    ],
    ids=str,
)
def test_no_head_or_one_that_nobody_knows_is_the_usual_one(
    head: str | None, family: str, instead: str, tmp_path: Path
) -> None:
    made = sample(folder(tmp_path / "it", head, family), batch=2, seq=16, dtype="float32")
    assert type(made.model).__name__ == instead


def test_a_head_without_a_batch_is_refused(tmp_path: Path) -> None:
    name = folder(tmp_path / "it", "BertForPreTraining", "Bert")
    with pytest.raises(
        ModelError, match=r"is a BertForPreTraining, for which forebay makes no batch; write a function"
    ):
        sample(name, batch=2, seq=16, dtype="float32")


def test_sound_that_is_not_known_is_refused(tmp_path: Path) -> None:
    name = folder(tmp_path / "it", "Speech2TextForConditionalGeneration", "Speech2Text")
    with pytest.raises(ConfigError, match=r"does not know the sound that a Speech2Text\w+ reads; write a function"):
        sample(name, batch=2, seq=16, dtype="float32")


def test_too_many_tokens_are_refused(tmp_path: Path) -> None:
    for head, most in (("BertForMaskedLM", 40), ("WhisperForConditionalGeneration", 40)):
        name = folder(tmp_path / head, head, HEADS[head][0])
        with pytest.raises(ConfigError, match=rf"--seq 64 is longer than the {most} positions"):
            sample(name, batch=1, seq=64, dtype="float32")


def test_training_is_for_causal_language_models(tmp_path: Path) -> None:
    for head, family in (("BertForMaskedLM", "Bert"), ("BertForPreTraining", "Bert")):
        name = folder(tmp_path / head, head, family)
        with pytest.raises(ModelError, match=rf"is a {head}, and here causal language models are trained"):
            build(find(name), "float32")
    for recipe, what in (("vit-base", "an image classifier"), ("t5-small", "an encoder-decoder")):
        with pytest.raises(ModelError, match=f"^{recipe} is {what}, and here causal language models are trained"):
            build(find(recipe), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("head", ["BertForQuestionAnswering", "WhisperForConditionalGeneration"])
def test_they_are_verified(head: str, tmp_path: Path) -> None:
    """Of the first the micro-batches that passed together kept more than its plan had room for."""
    name = folder(tmp_path / head, head, HEADS[head][0])
    result = CliRunner().invoke(app, ["verify", name, "--batch", "2", "--seq", "32"])
    assert result.exit_code == 0, result.output
    assert "Equal: every number is that of plain PyTorch" in result.output
