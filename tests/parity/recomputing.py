"""Plans that recompute blocks, and the models that put them to the test."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from forebay.arenas import arenas
from forebay.budgets import Budget
from forebay.memory import Tier
from forebay.model import Model
from forebay.plans import Placement, Plan, Streaming
from forebay.runtime.blocks import find_blocks
from tests.parity.models import CASES, VOCABULARY, Case, albert, tokens

AMPLE = 64 * 2**20
STATES = ("exp_avg", "exp_avg_sq")


def _gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=3, n_head=2))


def _t5() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))


DROPOUT = {
    "gpt2-dropout": Case(_gpt2, tokens),
    "t5-dropout": Case(_t5, tokens),
    "albert-dropout": Case(lambda: albert(0.1), tokens),
}

SUBJECTS = {
    **DROPOUT,
    **{
        name: CASES[name] for name in ("llama", "llama-tied", "albert", "t5", "mixtral", "experts", "vit", "used-twice")
    },
}


def recomputable(model: Model) -> list[str]:
    """Names of the blocks that a plan may recompute."""
    return [b.name for b in model.blocks if b.module is not None]


def plan_for(case: Case, dtype: torch.dtype, recompute: Iterable[str], *, resident: bool, slots: int = 1) -> Plan:
    """Everything streams through ``slots`` slots, or everything stays on the device; released slots are poisoned."""
    model = find_blocks(case.model(dtype)).model
    return plan_of(model, recompute, resident=resident, slots=slots)


def plan_of(model: Model, recompute: Iterable[str], *, resident: bool, slots: int = 1, device: int = AMPLE) -> Plan:
    homes = []
    for block in model.blocks:
        home = Tier.DEVICE if resident or block.held else Tier.HOST
        rest = Tier.DEVICE if resident else Tier.HOST
        homes.append(Placement(block.name, home, rest, rest))
    streamed = [b.nbytes for b in model.blocks if not b.held]
    streaming = Streaming(
        slots=() if resident or not streamed else (max(streamed),) * slots,
        prefetch_distance=slots - 1,
        gradient_window=0,
        poison=True,
    )
    sizes = arenas(model, homes, streaming, STATES)
    return Plan(
        "by hand", Budget(AMPLE), tuple(homes), streaming, device, sizes.host, sizes.disk, recompute=tuple(recompute)
    )
