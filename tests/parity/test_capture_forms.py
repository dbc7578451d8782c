"""Totals of a trace against closed forms: parameters, FLOPs, bytes that autograd keeps."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from forebay.memory import Kind
from forebay.profiler.capture import capture
from forebay.trace import Phase, Trace
from tests.parity.capture_rig import saved_nbytes

BATCH, SEQ, HIDDEN, HEADS, INNER, LAYERS, VOCABULARY = 2, 64, 128, 4, 384, 3, 512


def llama(attention: str = "sdpa") -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        attn_implementation=attention,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def ids() -> dict[str, torch.Tensor]:
    made = torch.zeros((BATCH, SEQ), dtype=torch.int64, device="meta")
    return {"input_ids": made, "labels": made}


def test_parameters_of_a_llama() -> None:
    trace = capture(llama(), ids()).trace
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER + 2 * HIDDEN  # q, k, v, o; gate, up, down; two norms
    expected = 2 * VOCABULARY * HIDDEN + LAYERS * layer + HIDDEN  # embedding and head; the last norm
    assert sum(b.trainable_numel for b in trace.model.blocks) == expected
    assert sum(t.nbytes for t in trace.sources if t.kind is Kind.PARAMETER) == 4 * expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_flops_of_a_llama(attention: str) -> None:
    trace = capture(llama(attention), ids()).trace
    tokens = BATCH * SEQ
    layer = 4 * HIDDEN * HIDDEN + 3 * HIDDEN * INNER
    # Forward multiplies each token with each weight (2 FLOPs); backward does so twice, for the input's gradient and
    # the weight's. The embedding is a look-up.
    products = 6 * tokens * (LAYERS * layer + VOCABULARY * HIDDEN)
    # Attention: scores and their product with the values, each 2 s^2 h a sequence, the masked half included. Backward
    # takes two products for each; the fused kernel keeps no scores and computes them once more.
    square = 2 * BATCH * SEQ * SEQ * HIDDEN
    attended = LAYERS * square * (2 + 4 + (1 if attention == "sdpa" else 0))
    assert trace.flops == products + attended


def gpt2(dropout: float, attention: str = "eager") -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=SEQ,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        activation_function="gelu_pytorch_tanh",
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    with torch.device("meta"):
        return GPT2LMHeadModel(config).to(torch.bfloat16).train()


def test_bytes_saved_by_a_16_bit_layer_that_materialises_attention() -> None:
    """34 s b h + 5 a s^2 b (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
    equation 2), less and more what torch keeps otherwise."""
    trace = capture(gpt2(dropout=0.1), ids()).trace
    s, b, h, a = SEQ, BATCH, HIDDEN, HEADS
    # The paper's terms, of b s h bytes each: 2 the input of the first norm, 2 the input of q, k, v, 4 q and k, 2 v,
    # 2 the input of the projection, 1 its dropout mask; 2 the input of the second norm, 2 the input of the first
    # linear, 8 the input of GeLU, 8 the input of the second linear, 1 its dropout mask.
    linear = 34 * s * b * h
    # The paper's terms, of a b s^2 bytes each: 2 the output of softmax, 1 its dropout mask, 2 its dropout's output.
    square = 5 * a * s * s * b
    # The first norm's input was made by the layer before, so is not of this visit, while the last sum of this layer,
    # of the same size, is saved by the next layer. Each of two norms keeps a mean and a reciprocal deviation for each
    # token: in 32 bits on a GPU, in the input's 16 on the cpu.
    norms = 2 * 2 * 2 * s * b
    # A GPU's dropout keeps a mask of one byte an element; the cpu's multiplies by noise of the input's 16 bits: one
    # byte more for each of the masks above.
    noise = 2 * s * b * h + a * s * s * b
    assert saved_nbytes(trace, "transformer.h.1") == linear + square + norms + noise


def kinds(trace: Trace, phase: Phase) -> set[Kind]:
    return {
        tensor.kind
        for visit in trace.visits
        if visit.phase is phase
        for place, tensor in enumerate(trace.segments[visit.segment].tensors)
        if tensor.root == place
    }


def test_kinds_of_what_a_step_makes() -> None:
    trace = capture(gpt2(dropout=0.0), ids()).trace
    assert kinds(trace, Phase.FORWARD) == {Kind.ACTIVATION, Kind.TEMPORARY}
    assert kinds(trace, Phase.BACKWARD) == {Kind.GRADIENT, Kind.TEMPORARY}


def test_bytes_touched_by_a_linear_layer_a_look_up_and_a_view() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(1000, 16)
            self.linear = nn.Linear(16, 8, bias=False)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.linear(self.table(ids)).flatten()

    captured = capture(Model(), (torch.zeros(5, dtype=torch.int64),))
    works = {w.op: w for w in captured.trace.works}
    mm = next(w for w in captured.trace.works if w.op == "aten.mm.default")  # the first is forward's
    assert mm.nbytes == 4 * (5 * 16 + 16 * 8 + 5 * 8)
    assert mm.flops == 2 * 5 * 16 * 8
    # Five rows of the table are read and written, and five ids of 8 bytes read; the other 995 rows are not touched.
    assert works["aten.embedding.default"].nbytes == 2 * 4 * 5 * 16 + 8 * 5
    assert works["aten.t.default"].nbytes == works["aten.t.default"].flops == 0
    # Its gradient is as large as the table.
    assert works["aten.embedding_dense_backward.default"].nbytes == 4 * 1000 * 16 + 4 * 5 * 16 + 8 * 5


def test_calls_tell_how_to_run_every_op() -> None:
    trace, calls = (captured := capture(llama(), ids())).trace, captured.calls
    assert set(calls) == {w.signature for w in trace.works}
    embedding = next(c for c in calls.values() if str(c.func) == "aten.embedding.default")
    table, rows = embedding.args[:2]
    assert (table.shape, table.dtype, table.high) == ((VOCABULARY, HIDDEN), "float32", None)
    assert (rows.shape, rows.dtype, rows.high) == ((BATCH, SEQ), "int64", VOCABULARY)
    loss = next(c for c in calls.values() if str(c.func) == "aten.nll_loss_forward.default")
    assert loss.args[1].high == VOCABULARY


def test_a_70b_llama_on_meta_is_a_handful_of_segments() -> None:
    """The shapes of Llama 3.1 70B, with fewer layers: what repeats costs a visit and nothing else."""

    def trace(layers: int) -> Trace:
        config = LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=layers,
            num_attention_heads=64,
            num_key_value_heads=8,
        )
        with torch.device("meta"):
            model = LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros((1, 4096), dtype=torch.int64, device="meta")
        return capture(model, {"input_ids": ids, "labels": ids}).trace

    small, large = trace(3), trace(5)
    assert len(small.segments) == len(large.segments) <= 13
    assert len(large.visits) - len(small.visits) == 2 * 2  # a forward and a backward for each layer more
    assert [w.signature for w in small.works] == [w.signature for w in large.works]
