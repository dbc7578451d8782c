"""Models whose control flow asks for values: routes, masks; and what else changes the ops of a step: autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from forebay.errors import ModelError
from forebay.profiler.capture import capture
from forebay.trace import Phase
from tests.parity.capture_rig import real_peak, traced_peak
from tests.parity.models import CASES, tokens
from tests.parity.unseen import Unseen

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def balanced(model: nn.Module) -> nn.Module:
    """Makes every router choose in turn, as a trace takes it to do."""

    def choose(module: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, picked = output
        count = picked.numel()
        turn = (torch.arange(count) % logits.shape[-1]).reshape(picked.shape)
        return logits, weights, turn

    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(choose)
    return model


MOES: dict[str, Callable[[str], nn.Module]] = {
    "mixtral": lambda kind: MixtralForCausalLM(
        MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, experts_implementation=kind)
    ),
    "olmoe": lambda kind: OlmoeForCausalLM(
        OlmoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, experts_implementation=kind)
    ),
    "qwen2-moe": lambda kind: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SMALL, **EXPERTS, shared_expert_intermediate_size=32, experts_implementation=kind)
    ),
    "qwen3-moe": lambda kind: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8, experts_implementation=kind)
    ),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("kind", ["eager", "grouped_mm"])
@pytest.mark.parametrize("name", MOES)
def test_experts_are_routed_in_turn(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = MOES[name](kind).train()
    trace = capture(model, tokens(0)).trace
    note = "what is picked among floats (experts of a router) is taken as balanced"
    assert (f"{note} for seconds; memory holds for any routing" if trace.extremes else note) in trace.notes
    assert traced_peak(trace) == real_peak(balanced(model), tokens(0))


def test_eager_experts_run_on_an_equal_share_of_the_tokens() -> None:
    trace = capture(MOES["mixtral"]("eager"), tokens(0)).trace
    # 2 x 16 tokens with 2 experts each, 4 experts: 16 rows for each. (16, 32) by (32, 2 * 32): gate and up.
    rows = [w for w in trace.works if w.op == "aten.mm.default" and "(float32[16,32;32,1], " in w.signature]
    assert rows
    forward = [
        trace.works[op.work].op
        for _, visit, op in trace.ops()
        if visit.phase is Phase.FORWARD and visit.block == "model.layers.0"
    ]
    assert forward.count("aten.index_add_.default") == 4


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_attention_mask_decides_what_is_built(padded: bool, attention: str) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL, attn_implementation=attention))
    mask = torch.ones(2, 16, dtype=torch.int64)
    mask[1, 12:] = 0 if padded else 1
    batch = {**tokens(0), "attention_mask": mask}
    trace = capture(model, batch).trace
    assert traced_peak(trace) == real_peak(model, batch)
    # transformers builds no mask where nothing is padded, and looks at the values to know.
    masked = any("attn_mask=float32[" in w.signature for w in trace.works)
    assert masked == (padded and attention == "sdpa")


def test_an_encoder_and_a_decoder_with_padding_and_dropout() -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=128, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ).train()
    batch = {**tokens(0), "attention_mask": torch.ones(2, 16, dtype=torch.int64)}
    batch["attention_mask"][0, 10:] = 0
    trace = capture(model, batch).trace
    assert any(w.op == "aten.native_dropout.default" or "bernoulli" in w.op for w in trace.works)
    assert traced_peak(trace) == real_peak(model, batch)


@pytest.mark.parametrize("name", ["llama", "llama-tied", "vit", "convnet"])
def test_autocast_is_recorded_in_forward_and_its_copies_die_before_backward(name: str) -> None:
    case = CASES[name]
    model, batch = case.model(torch.float32), case.inputs(0, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace = capture(model, batch).trace
    assert any(w.flops and w.dtype == "bfloat16" for w in trace.works)
    assert traced_peak(trace) == real_peak(model, batch, autocast=True)


def test_a_large_vocabulary() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "vocab_size": 20_000}))
    ids = torch.randint(0, 20_000, (2, 16))
    batch = {"input_ids": ids, "labels": ids}
    trace = capture(model, batch).trace
    assert traced_peak(trace) == real_peak(model, batch)
    # Logits, in the model's dtype and in 32 bits, are the largest of what is there.
    largest = max(t.nbytes for _, t in trace.tensors() if not t.name)
    assert largest >= 2 * 16 * 20_000 * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_run_again(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    trace = capture(model, tokens(0)).trace
    assert traced_peak(trace) == real_peak(model, tokens(0))
    products = [op for _, v, op in trace.ops() if trace.works[op.work].op == "aten.mm.default"]
    again = [op for _, v, op in trace.ops() if v.phase is Phase.BACKWARD and v.block == "model.layers.0"]
    assert len(products) > 3 * (2 * 7 + 1)  # forward once and backward twice: seven of each layer, and the head
    assert any(trace.works[op.work].op == "aten.silu.default" for op in again)


class Asks(nn.Module):
    """Asks for one value in forward."""

    def __init__(self, ask: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)
        self.ask = ask

    def forward(self, ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.table(ids).sum() * float(self.ask(ids, scale))


KNOWN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "item": lambda ids, scale: ids.sum().item(),
    "tolist": lambda ids, scale: len(set(ids.flatten().tolist())),
    "nonzero": lambda ids, scale: ids.nonzero().shape[0],
    "unique": lambda ids, scale: ids.unique().shape[0],
    "bincount": lambda ids, scale: ids.flatten().bincount(minlength=4).max().item(),
    "one-hot": lambda ids, scale: nn.functional.one_hot(ids).shape[-1],
    "repeat": lambda ids, scale: (
        ids.repeat_interleave(ids.flatten() % 3, dim=1).numel()
        if ids.shape[0] == 1
        else torch.arange(4).repeat_interleave(torch.tensor([1, 0, 2, 1])).numel()
    ),
    "in-place": lambda ids, scale: torch.zeros(4, dtype=torch.int64).index_fill_(0, ids[0] % 4, 2).sum().item(),
    "masked-select": lambda ids, scale: scale.masked_select(ids > 3).numel(),
    "masked-index": lambda ids, scale: scale[ids > 3].numel(),
    "mean": lambda ids, scale: ids.float().mean().item(),
    "topk": lambda ids, scale: scale.topk(2, dim=-1).indices.max().item(),
    "argmax": lambda ids, scale: scale.argmax(-1).sum().item(),
}
UNKNOWN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "rounded": lambda ids, scale: scale.sum().long().item(),
    "size": lambda ids, scale: range(int(scale.sum().item())),
    "written": lambda ids, scale: ids.clone().masked_fill_(scale > 0, 1).sum().item(),
}


@pytest.mark.parametrize("name", KNOWN)
def test_values_that_follow_from_integers_are_known(name: str) -> None:
    ids = torch.tensor([[1, 5, 2, 5], [0, 7, 3, 1]])
    asked = Unseen()

    def ask(ids: torch.Tensor, scale: torch.Tensor) -> Any:
        return asked.note(KNOWN[name](ids, scale))

    scale = torch.tensor([[4.0, 3.0, 2.0, 1.0], [1.0, 2.0, 4.0, 3.0]])
    capture(Asks(ask), {"ids": ids, "scale": scale})
    if name in ("topk", "argmax"):  # what is picked among floats is made up, twice: does a size follow from it?
        assert len(asked.found) == 2
    else:
        assert asked.found == [KNOWN[name](ids, scale)]


@pytest.mark.parametrize("name", UNKNOWN)
def test_values_that_follow_from_floats_are_not(name: str) -> None:
    batch = {"ids": torch.ones(2, 4, dtype=torch.int64), "scale": torch.randn(2, 4)}
    with pytest.raises(ModelError, match="depends on the values of a tensor: aten"):
        capture(Asks(UNKNOWN[name]), batch)
    assert batch["ids"].eq(1).all()


MASKS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "masked-index": lambda ids, scale: ids[scale > 0].numel(),
    "masked-select": lambda ids, scale: ids.masked_select(scale[:1] > 0).numel(),
    "nonzero": lambda ids, scale: (scale > 0).nonzero().shape[0],
    "places": lambda ids, scale: (scale > 0).nonzero(as_tuple=True)[1].numel(),
    "none": lambda ids, scale: 8 * (scale.sum() > 0).nonzero().shape[0] + (scale.sum() > 0).nonzero().shape[1],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_follow_from_floats_choose_all(name: str) -> None:
    asked = Unseen()

    def ask(ids: torch.Tensor, scale: torch.Tensor) -> Any:
        return asked.note(MASKS[name](ids, scale))

    capture(Asks(ask), {"ids": torch.ones(2, 4, dtype=torch.int64), "scale": torch.randn(2, 4)})
    assert asked.found == [8]


TOO_MANY = 1 << 24
"""Of so many integers each with each there are 2 PiB."""


@pytest.mark.parametrize("combine", [torch.sub, torch.mul, torch.add, torch.lt], ids=lambda op: op.__name__)
def test_integers_that_are_too_many_have_no_values(combine: Callable[..., torch.Tensor]) -> None:
    """As with the relative positions of long sequences: torch computes some ops of known values itself."""

    def ask(ids: torch.Tensor, scale: torch.Tensor) -> int:
        places = torch.arange(TOO_MANY)
        return combine(places, places[:, None]).shape[0]

    batch = {"ids": torch.ones(2, 4, dtype=torch.int64), "scale": torch.randn(2, 4)}
    assert traced_peak(capture(Asks(ask), batch).trace) > 1 << 48


def test_integers_that_are_expanded() -> None:
    """Positions, or a mask, of one sequence for all of them: their bytes are there once."""
    positions = torch.arange(16)[None].expand(2, 16)
    mask = torch.ones(1, 1, 16, 16, dtype=torch.bool).tril().expand(2, 1, 16, 16)
    batch = {**tokens(0), "position_ids": positions, "attention_mask": mask}
    trace = capture(LlamaForCausalLM(LlamaConfig(**SMALL)), batch, "adamw", "cpu").trace
    named = {tensor.name: tensor.nbytes for tensor in trace.sources}
    assert named["position_ids"] == positions.untyped_storage().nbytes() == 16 * 8
    assert named["attention_mask"] == mask.untyped_storage().nbytes() == 16 * 16
