"""Architectures of transformers as small as they will go, with made-up weights, and batches for them.

A configuration has dozens of numbers, under names that differ from one architecture to the next, and they have to go
together. So the usual names are set to small numbers where a configuration has them, and where the model does not train
like that a few other choices are tried (``OTHERWISE``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, final

import torch
import transformers
from torch import nn
from transformers.models.auto import configuration_auto, modeling_auto

from benchmarks.families.batches import AUDIO, BATCHES, CLIPS, DETECTION, IMAGES, SEGMENTATION, SPEECH, words

__all__ = ["OTHERWISE", "TASKS", "Family", "TooLarge", "families", "tiny"]

Numbers = Mapping[str, Any]

SMALL: Final[Numbers] = MappingProxyType(
    {
        **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size"), 32),
        **dict.fromkeys(("word_embed_proj_dim", "attn_hidden_size"), 32),
        **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "ffn_hidden_size", "d_inner"), 64),
        **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 64),
        **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
        **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers", "num_encoder_layers"), 2),
        **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
        **dict.fromkeys(("head_dim", "d_kv", "global_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
        **dict.fromkeys(("v_head_dim", "lm_head_rank", "hidden_size_per_layer_input"), 8),
        **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 16),
        **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 96),
        **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
        **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 32),
        **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
        **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_key_value_heads", "type_vocab_size"), 2),
        **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "mamba_n_groups", "n_groups"), 1),
        **dict.fromkeys(("state_size", "mamba_d_state", "mamba_d_head", "mamba_n_heads"), 8),
        **dict.fromkeys(("mamba_chunk_size", "chunk_size", "sliding_window", "patch_size"), 8),
        **dict.fromkeys(("rotary_dim", "time_step_rank"), 4),
        **{"num_kv_shared_layers": 0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
        **{"image_size": 32, "num_channels": 3, "use_cache": False, "num_queries": 12, "num_detection_tokens": 10},
    }
)
"""What is set where a configuration has it."""

OTHERWISE: Final[tuple[Numbers, ...]] = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": 4, "qk_head_dim": 16, "head_dim": 16, "rope_dim": 8},
    {"num_key_value_heads": 4, "head_dim": None, "moe_layer_freq": 1, "mamba_d_ssm": 64, "mamba_expand": 2},
    {"head_dim": None, "hidden_size_per_layer_input": 0, "topk_method": "greedy", "n_shared_experts": 1},
)
"""Other numbers that are tried, one set after the other; None: as the configuration has it by itself."""

LARGEST: Final = 30_000_000
"""Parameters of a model that is small enough."""

BACKBONE: Final[Numbers] = MappingProxyType(
    {"embedding_size": 8, "hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "layer_type": "basic"}
)
"""Of a ResNet that makes the features of another model, and what goes with it where that has it (``AROUND``)."""

AROUND: Final[Numbers] = MappingProxyType(
    {"encoder_in_channels": [16, 16, 32], "decoder_in_channels": [32, 32, 32], "encoder_hidden_dim": 32}
)


@final
class TooLarge(Exception):
    """What was set did not make the model small."""


@final
@dataclass(frozen=True)
class Family:
    """An architecture: the name of its kind in transformers, and that of the class with a head for ``task``."""

    task: str
    name: str
    head: str

    def batch(self, model: nn.Module, number: int) -> dict[str, Any]:
        """What the model is called with, the same for the same ``number``."""
        return BATCHES.get(self.task, words)(model, torch.Generator().manual_seed(number))


TASKS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "causal language modelling": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked language modelling": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "sequence to sequence": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        IMAGES: modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        DETECTION: modeling_auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES,
        SEGMENTATION: modeling_auto.MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES,
        CLIPS: modeling_auto.MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES,
        SPEECH: modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
        AUDIO: modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    }
)
"""Heads by task: of each kind of model its class, or several, of which the first is taken."""


def families(task: str) -> Iterator[Family]:
    """All architectures for ``task``, in order of their names."""
    for name, heads in sorted(TASKS[task].items()):
        yield Family(task, name, heads if isinstance(heads, str) else heads[0])


def tiny(family: Family, otherwise: Numbers) -> nn.Module:
    """The model, with the same made-up weights every time. Raises ``TooLarge``, and whatever transformers raises where
    the numbers do not go together."""
    kind = configuration_auto.CONFIG_MAPPING[family.name]
    usual = kind().to_dict()
    # Other lists, and other parts with a configuration of their own, are left as they are.
    plain = {name for name, value in usual.items() if not isinstance(value, list | dict)}
    numbers = {name: value for name, value in {**SMALL, **otherwise}.items() if name in plain and value is not None}
    numbers |= _backbone(usual)
    if isinstance(usual.get("image_size"), list):
        numbers["image_size"] = [SMALL["image_size"]] * 2
    layers = usual.get("layer_types")
    if isinstance(layers, list) and layers:
        first, last = layers[0], layers[-1]
        numbers["layer_types"] = [first, last, first][: numbers.get("num_hidden_layers", SMALL["num_hidden_layers"])]
    config, head = kind(**numbers), getattr(transformers, family.head)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in head(config).parameters())
    if parameters > LARGEST:
        raise TooLarge(f"{parameters:,} parameters")
    torch.manual_seed(0)
    model: nn.Module = head(config)
    return model.train()


def _backbone(usual: Numbers) -> dict[str, Any]:
    """A small one for a configuration whose ``usual`` one is a ResNet, of timm or of transformers."""
    kind = (usual.get("backbone_config") or {}).get("model_type")
    if kind not in ("timm_backbone", "resnet", "rt_detr_resnet"):
        return {}
    levels = min(usual.get("num_feature_levels", 1), 3)
    features = usual["backbone_config"].get("out_features") or ["stage2", "stage3", "stage4"][-levels:]
    own: dict[str, Any] = {} if kind != "timm_backbone" else {"use_timm_backbone": False, "backbone": None}
    made = "resnet" if kind == "timm_backbone" else kind
    own["backbone_config"] = configuration_auto.CONFIG_MAPPING[made](**BACKBONE, out_features=features)
    return own | {name: value for name, value in AROUND.items() if name in usual}
