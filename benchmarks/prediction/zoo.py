"""The models that predictions are held against: dense, mixtures of experts, encoder-decoders, vision.

Every one is built by transformers from an explicit configuration with a fixed seed, small enough for a step in about
a second on two cores and large enough that arithmetic, not Python, fills it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["BY_VALUE", "ZOO", "Entry"]

SEED = 0

BY_VALUE = "mixture of experts, routed by value"
"""The kind of models in which the sizes of tensors follow from which experts a router picks."""


@dataclass(frozen=True)
class Entry:
    """A model with a batch. ``build`` returns the model in train mode, ``batch`` what its forward is called with."""

    name: str
    kind: str
    build: Callable[[], torch.nn.Module]
    batch: Callable[[], dict[str, torch.Tensor]]


def _language(name: str, kind: str, config: str, model: str, batch: int, seq: int, **settings: Any) -> Entry:
    def build() -> torch.nn.Module:
        import torch
        import transformers

        torch.manual_seed(SEED)
        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        return made.train()

    def tokens() -> dict[str, torch.Tensor]:
        import torch

        vocab = settings["vocab_size"]
        ids = torch.randint(2, vocab, (batch, seq), generator=torch.Generator().manual_seed(SEED))
        return {"input_ids": ids, "labels": ids.clone()}

    return Entry(name, kind, build, tokens)


def _vision(name: str, config: str, model: str, batch: int, size: int, **settings: Any) -> Entry:
    def build() -> torch.nn.Module:
        import torch
        import transformers

        torch.manual_seed(SEED)
        made = getattr(transformers, model)(getattr(transformers, config)(num_labels=100, **settings))
        return made.train()

    def images() -> dict[str, torch.Tensor]:
        import torch

        generator = torch.Generator().manual_seed(SEED)
        pixels = torch.randn(batch, 3, size, size, generator=generator)
        return {"pixel_values": pixels, "labels": torch.randint(0, 100, (batch,), generator=generator)}

    return Entry(name, "vision", build, images)


_GQA = {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 384, "use_cache": False}

ZOO: tuple[Entry, ...] = (
    _language(
        "llama-16m",
        "dense",
        "LlamaConfig",
        "LlamaForCausalLM",
        4,
        256,
        vocab_size=4096,
        intermediate_size=1024,
        num_hidden_layers=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        **_GQA,
    ),
    _language(
        "llama-tied-13m",
        "dense",
        "LlamaConfig",
        "LlamaForCausalLM",
        2,
        384,
        vocab_size=8192,
        intermediate_size=1024,
        num_hidden_layers=6,
        max_position_embeddings=384,
        tie_word_embeddings=True,
        **_GQA,
    ),
    _language(
        "gpt2-14m",
        "dense",
        "GPT2Config",
        "GPT2LMHeadModel",
        4,
        256,
        vocab_size=4096,
        n_embd=384,
        n_layer=7,
        n_head=6,
        n_positions=256,
        use_cache=False,
    ),
    _language(
        "gpt2-eager-14m",
        "dense",
        "GPT2Config",
        "GPT2LMHeadModel",
        2,
        256,
        vocab_size=4096,
        n_embd=384,
        n_layer=7,
        n_head=6,
        n_positions=256,
        use_cache=False,
        attn_implementation="eager",
    ),
    _language(
        "qwen2-18m",
        "dense",
        "Qwen2Config",
        "Qwen2ForCausalLM",
        4,
        192,
        vocab_size=6144,
        intermediate_size=1280,
        num_hidden_layers=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        **_GQA,
    ),
    _language(
        "gemma-20m",
        "dense",
        "GemmaConfig",
        "GemmaForCausalLM",
        2,
        256,
        vocab_size=8192,
        intermediate_size=1536,
        num_hidden_layers=6,
        head_dim=64,
        max_position_embeddings=256,
        **_GQA,
    ),
    _language(
        "bert-14m",
        "dense",
        "BertConfig",
        "BertForMaskedLM",
        4,
        256,
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=6,
        max_position_embeddings=256,
    ),
    _language(
        "mixtral-24m",
        "mixture of experts",
        "MixtralConfig",
        "MixtralForCausalLM",
        2,
        256,
        vocab_size=4096,
        intermediate_size=512,
        num_hidden_layers=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        **_GQA,
    ),
    _language(
        "mixtral-eager-24m",
        BY_VALUE,
        "MixtralConfig",
        "MixtralForCausalLM",
        2,
        256,
        vocab_size=4096,
        intermediate_size=512,
        num_hidden_layers=5,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        experts_implementation="eager",
        **_GQA,
    ),
    _language(
        "olmoe-20m",
        "mixture of experts",
        "OlmoeConfig",
        "OlmoeForCausalLM",
        4,
        256,
        vocab_size=4096,
        hidden_size=384,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        use_cache=False,
    ),
    _language(
        "t5-18m",
        "encoder-decoder",
        "T5Config",
        "T5ForConditionalGeneration",
        4,
        160,
        vocab_size=4096,
        d_model=384,
        d_ff=1024,
        d_kv=64,
        num_layers=4,
        num_heads=6,
        decoder_start_token_id=0,
        use_cache=False,
    ),
    _language(
        "bart-20m",
        "encoder-decoder",
        "BartConfig",
        "BartForConditionalGeneration",
        4,
        160,
        vocab_size=4096,
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1536,
        decoder_ffn_dim=1536,
        max_position_embeddings=256,
        use_cache=False,
    ),
    _vision(
        "vit-14m",
        "ViTConfig",
        "ViTForImageClassification",
        8,
        128,
        hidden_size=384,
        num_hidden_layers=8,
        num_attention_heads=6,
        intermediate_size=1536,
        image_size=128,
        patch_size=8,
    ),
    _vision(
        "convnext-10m",
        "ConvNextConfig",
        "ConvNextForImageClassification",
        8,
        192,
        depths=[2, 2, 4, 2],
        hidden_sizes=[64, 128, 256, 512],
    ),
    _vision(
        "resnet-12m",
        "ResNetConfig",
        "ResNetForImageClassification",
        16,
        160,
        embedding_size=48,
        hidden_sizes=[96, 192, 384, 768],
        depths=[2, 2, 2, 2],
    ),
)
"""Fourteen models whose memory follows from the shapes of their batch, and one whose memory follows from values."""
