"""The model and the machine on which the page of every policy shows what that decides. Neither exists."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from forebay.budgets import Budget, DiskBudget
from forebay.machine import Curve, Disk, Link, Machine
from forebay.units import GiB, format_bytes

if TYPE_CHECKING:
    from torch import nn

    from forebay.trace import Trace

__all__ = ["MACHINE", "Case", "budget", "dense", "experts", "written_out"]

LAYERS: Final = 3
SEQ: Final = 1024


def _link(rate: float) -> Link:
    """``rate`` bytes/s whatever the size."""
    return Link(Curve(((4096, rate),)))


MACHINE: Final = Machine(
    name="a machine that is made up",
    source="catalogue",
    device_kind="cuda",
    device_capacity=24 * GiB,
    host_capacity=64 * GiB,
    pinned_capacity=64 * GiB,
    compute={"float32": 20e12},
    device_bandwidth=1024 * GiB,
    host_bandwidth=48 * GiB,
    update_rate=40 * GiB,
    h2d=_link(24 * GiB),
    d2h=_link(24 * GiB),
    disk=Disk(1024 * GiB, _link(5 * GiB), _link(5 * GiB)),
)


@dataclass(frozen=True, eq=False)
class Case:
    """A model in words, and its step. Like itself alone."""

    words: str
    trace: Trace


@cache
def dense() -> Case:
    """A Llama of which no two steps differ. Loads torch and transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _case(LlamaForCausalLM, LlamaConfig(**_shape()), "a Llama of")


@cache
def written_out() -> Case:
    """The same with attention op by op, as eager PyTorch has it. Loads torch and transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**_shape(), attn_implementation="eager")
    return _case(LlamaForCausalLM, config, "a Llama with attention written out and")


@cache
def experts() -> Case:
    """A mixture of experts of the same width. Loads torch and transformers."""
    from transformers import OlmoeConfig, OlmoeForCausalLM

    shape = {**_shape(), "intermediate_size": 512, "num_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0}
    return _case(OlmoeForCausalLM, OlmoeConfig(**shape), "an OLMoE with 8 experts a layer and")


def budget(device: int) -> Budget:
    """``device`` bytes of the device, and of the rest of the machine what it has."""
    return Budget(device, disk=DiskBudget("/disk", None))


def _shape() -> dict[str, Any]:
    heads = {"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": SEQ}
    width = {"vocab_size": 8192, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": LAYERS}
    return {**width, **heads, "eos_token_id": None}


def _case(kind: Any, config: Any, words: str) -> Case:
    import torch

    import forebay

    with torch.device("meta"):
        model: nn.Module = kind(config)
        ids = torch.zeros(1, SEQ, dtype=torch.int64)
    trace = forebay.profile(model, {"input_ids": ids, "labels": ids}, device=MACHINE.device_kind)
    # So few layers stand for many: beside those, a card's workspaces and the pages of its allocator are nearly nothing.
    trace = replace(trace, workspace_nbytes=0)
    nbytes = sum(block.nbytes for block in trace.model.blocks)
    return Case(
        f"{words} {LAYERS} layers, {format_bytes(nbytes)} of parameters, AdamW, a sequence of {SEQ} tokens", trace
    )
