"""A trace against the real step: bytes at every instant, gradients, blocks, repeated visits."""

from __future__ import annotations

import warnings
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from forebay.errors import ModelError, OptimizerError, UsageError
from forebay.lowering.index import TraceIndex
from forebay.memory import Kind
from forebay.profiler.capture import capture
from forebay.profiler.optimizers import STATES
from forebay.profiler.remarks import KEEPS_CACHE
from forebay.runtime.losses import LossFunction
from forebay.states import DRAWN
from forebay.trace import Phase, Trace
from tests.parity.capture_rig import gradients, real_peak, traced_peak
from tests.parity.models import CASES
from tests.parity.replay import footprint_of

TRACEABLE = {name: case for name, case in CASES.items() if name != "experts"}


@cache
def traced(name: str, dtype: torch.dtype = torch.float32) -> Trace:
    case = CASES[name]
    return capture(case.model(dtype), case.inputs(0, dtype)).trace


@pytest.mark.thinned(3)
@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TRACEABLE)
def test_the_bytes_of_a_trace_are_those_of_the_real_step(name: str, dtype: torch.dtype, keep: bool) -> None:
    case = TRACEABLE[name]
    if dtype not in case.dtypes:
        pytest.skip(f"{name} is not trained in {dtype}")
    model, batch = case.model(dtype), case.inputs(0, dtype)
    assert traced_peak(traced(name, dtype), keep=keep) == real_peak(model, batch, keep=keep)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", TRACEABLE)
def test_every_gradient_is_complete_once_and_of_its_parameters_size(name: str) -> None:
    case = TRACEABLE[name]
    model, trace = case.model(torch.float32), traced(name)
    for key, value in case.inputs(0, torch.float32).items():
        assert next(t for t in trace.sources if t.name == key).nbytes == value.nbytes
    loss = model(**case.inputs(0, torch.float32))["loss"]
    loss.backward()
    made = {n: p.nbytes for n, p in model.named_parameters() if p.grad is not None}
    seen = list(gradients(trace))
    assert dict(seen) == made
    assert len(seen) == len(made)


def check_lives(trace: Trace) -> None:
    """Whatever a step makes is born once, and goes away once unless it is a gradient or was there before. What is saved
    is so for the first time in forward, while somebody else holds it."""
    born: set[int] = set()
    dropped: Counter[int] = Counter()
    unsaved: Counter[int] = Counter()
    packed: Counter[int] = Counter()
    tensors = dict(trace.tensors())
    for number, visit, op in trace.ops():
        for reference in op.inputs:
            used = tensors[visit.resolve(reference)].root
            assert used in born or used < len(trace.sources), (number, used)
            held = tensors[used].saved and not unsaved[used]
            assert not dropped[used] or held, (number, used)
        born.update(tensors[visit.resolve(r)].root for r in op.outputs)
        for reference in op.packed:
            assert visit.phase is Phase.FORWARD and visit.resolve(reference) in born - dropped.keys()
        packed.update(visit.resolve(r) for r in op.packed)
        for reference in op.dropped:
            assert visit.resolve(reference) in born
        dropped.update(visit.resolve(r) for r in op.dropped)
        unsaved.update(visit.resolve(r) for r in op.unsaved)
    for number, tensor in tensors.items():
        if tensor.root != number or number < len(trace.sources):
            assert not dropped[number] and not unsaved[number]
            continue
        assert dropped[number] == (tensor.kind is not Kind.GRADIENT)
        assert packed[number] == unsaved[number] == tensor.saved


@pytest.mark.parametrize("name", TRACEABLE)
def test_every_tensor_is_there_when_it_is_read_and_goes_away_once(name: str) -> None:
    check_lives(traced(name))


def test_sources_are_parameters_in_the_order_of_the_blocks_then_buffers_then_inputs() -> None:
    model, trace = CASES["convnet"].model(torch.float32), traced("convnet")
    names = [p.name for b in trace.model.blocks for p in b.parameters]
    names += [n for n, _ in model.named_buffers()] + ["pixel_values", "labels"]
    assert [t.name for t in trace.sources] == names
    assert [t.root for t in trace.sources] == list(range(len(names)))


def test_layers_that_are_alike_are_stored_once() -> None:
    trace = traced("llama")
    segments = {
        phase: [v.segment for v in trace.visits if v.block.startswith("model.layers") and v.phase is phase]
        for phase in Phase
    }
    # Layer 0 is given what the model still holds (the embeddings), the others what only they hold.
    assert len(segments[Phase.FORWARD]) == 4 and len(set(segments[Phase.FORWARD][1:])) == 1
    assert len(segments[Phase.BACKWARD]) == 4 and len(set(segments[Phase.BACKWARD][:3])) == 1
    ops = [number for number, _, _ in trace.ops()]
    assert ops == list(range(len(ops)))
    assert [number for number, _ in trace.tensors()] == list(range(sum(1 for _ in trace.tensors())))


def test_backward_ops_belong_to_the_block_whose_forward_made_them() -> None:
    trace = traced("used-twice")
    runs = [v.block for v in trace.visits if v.block and v.phase is Phase.FORWARD]
    layers = ["body.layers.0", "body.layers.1", "body.layers.2"]
    assert runs == ["body.embed", "body.shared", *layers, "body.shared", "body.head"]
    assert [v.block for v in trace.visits if v.block and v.phase is Phase.BACKWARD] == runs[::-1]


def test_a_recomputation_is_backward_in_the_block_that_is_recomputed() -> None:
    trace, plain = traced("checkpointed"), traced("llama")

    def products(one: Trace, phase: Phase) -> int:
        chosen = [(v, op) for _, v, op in one.ops() if v.block == "model.layers.2" and v.phase is phase]
        return sum(one.works[op.work].op == "aten.mm.default" for _, op in chosen)

    assert products(trace, Phase.FORWARD) == products(plain, Phase.FORWARD) == 7  # q, k, v, o, gate, up, down
    # Backward takes two products for each of the seven; the recomputation stops before down, which nothing needs.
    assert products(plain, Phase.BACKWARD) == 14
    assert products(trace, Phase.BACKWARD) == 14 + 6


@pytest.mark.parametrize("name", ["llama", "t5", "vit"])
def test_a_model_on_meta_gives_the_trace_of_the_real_one(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = case.make().to(torch.bfloat16)
    batch = {k: v.to("meta") for k, v in case.inputs(0, torch.bfloat16).items()}
    assert capture(model, batch).trace == traced(name, torch.bfloat16)


def test_the_model_is_left_as_it_was() -> None:
    case = CASES["convnet"]
    model = case.model(torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    capture(model, case.inputs(0, torch.float32))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(p.grad is None and not p._post_accumulate_grad_hooks for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", ["llama", "vit", "mixtral"])
def test_the_footprint_covers_the_step_and_the_output_that_a_loop_holds(name: str) -> None:
    case = CASES[name]
    model, batch = case.model(torch.float32), case.inputs(0, torch.float32)
    trace = traced(name)
    found = footprint_of(trace)
    assert found.peak >= traced_peak(trace)
    with torch.no_grad():
        logits = model(**batch)["logits"]
    assert trace.held_nbytes >= logits.nbytes


def test_a_loss_outside_the_model_is_reckoned_with() -> None:
    trace = capture(nn.Linear(8, 4), (torch.randn(3, 8),)).trace
    # Log-probabilities, their gradient and the logits' gradient: three times 3 x 4 floats.
    assert trace.unseen_nbytes == 3 * (3 * 4 * 4)


def of_output(model: nn.Module, batch: Any) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_what_the_loop_lets_go_of_is_gone_when_backward_begins(name: str) -> None:
    case = CASES[name]
    model, batch = case.model(torch.float32), case.inputs(0, torch.float32)
    named, brief = traced(name), capture(model, batch, loss_fn=of_output).trace
    with torch.no_grad():
        output = model(**batch)
    assert brief.held_nbytes == output.loss.nbytes and named.held_nbytes >= output.logits.nbytes + output.loss.nbytes
    assert [op.work for _, _, op in brief.ops()] == [op.work for _, _, op in named.ops()]
    assert footprint_of(brief).peak < footprint_of(named).peak


@pytest.mark.thinned(2)
@pytest.mark.parametrize("loss_fn", [None, of_output])
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_a_cache_that_nothing_reads_is_told_of(name: str, loss_fn: LossFunction | None) -> None:
    case = CASES[name]
    model, batch = case.model(torch.float32), case.inputs(0, torch.float32)
    with_cache, without = (capture(model, {**batch, "use_cache": use}, loss_fn=loss_fn).trace for use in (True, False))
    assert KEEPS_CACHE in with_cache.notes and KEEPS_CACHE not in without.notes
    assert not model._forward_hooks


def test_a_loss_of_the_loops_own_is_seen() -> None:
    def squares(model: nn.Module, batch: tuple[torch.Tensor]) -> torch.Tensor:
        return model(*batch).square().mean()

    model, batch = nn.Linear(8, 4), (torch.randn(3, 8),)
    trace, whole = capture(model, batch, loss_fn=squares).trace, capture(model, batch).trace
    assert trace.unseen_nbytes == 0 < whole.unseen_nbytes and trace.held_nbytes == 4
    names = {trace.works[op.work].op for _, _, op in trace.ops()}
    assert any("pow" in name for name in names) and any("mean" in name for name in names)


@pytest.mark.parametrize(
    ("loss_fn", "words"),
    [
        (lambda model, batch: model(*batch), "loss_fn returned a tensor of shape .* for the batch"),
        (lambda model, batch: model(*batch).sum().detach(), "the loss of the batch has no gradient"),
        (lambda model, batch: None, "loss_fn returned NoneType for the batch"),
    ],
)
def test_what_is_no_loss_is_refused(loss_fn: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        capture(nn.Linear(8, 4), (torch.randn(3, 8),), loss_fn=loss_fn)


@pytest.mark.parametrize("name", STATES)
def test_an_optimizer_goes_by_name(name: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    trace = capture(model, (torch.randn(3, 8),), optimizer=name).trace
    assert (trace.optimizer, trace.state_names) == (name.removesuffix(DRAWN), STATES[name])


@pytest.mark.parametrize("name", [name for name in STATES if name.endswith(DRAWN)])
def test_without_masters_a_trace_is_another(name: str) -> None:
    model = nn.Linear(8, 4).bfloat16()
    given = (torch.randn(3, 8, dtype=torch.bfloat16),)
    bare, usual = (capture(model, given, optimizer=one).trace for one in (name, name.removesuffix(DRAWN)))
    assert bare.model == usual.model.without_masters() != usual.model
    assert bare.fingerprint != usual.fingerprint
    assert Trace.from_json(bare.to_json()) == bare
    wide = capture(nn.Linear(8, 4), (torch.randn(3, 8),), optimizer=name).trace
    assert all(p.master for block in wide.model.blocks for p in block.parameters)


def test_an_optimizer_may_be_given() -> None:
    model = nn.Linear(8, 4)
    trace = capture(model, (torch.randn(3, 8),), optimizer=torch.optim.SGD(model.parameters(), momentum=0.9)).trace
    assert (trace.optimizer, trace.state_names) == ("sgd", ("momentum_buffer",))
    with pytest.raises(OptimizerError, match="'lamb' is not known; use one of adamw"):
        capture(model, (torch.randn(3, 8),), optimizer="lamb")


def test_tokens_are_token_ids_or_else_samples() -> None:
    assert (traced("llama").tokens, traced("vit").tokens) == (2 * 16, 2)


def test_control_flow_that_depends_on_floats_is_refused_by_op_and_module() -> None:
    case = CASES["experts"]
    with pytest.raises(ModelError, match=r"depends on the values of a tensor: aten\._local_scalar_dense\.default"):
        capture(case.model(torch.float32), case.inputs(0, torch.float32))
    with pytest.raises(ModelError, match=r"_local_scalar_dense\.default in 1 "):
        capture(nn.Sequential(nn.Linear(4, 4), Positive(), nn.Linear(4, 4)), (torch.randn(2, 4),))


class Positive(nn.Module):
    """Scales some of what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.mean())] * self.scale


def test_a_forward_that_fails_is_told_by_op_module_and_reason() -> None:
    with pytest.raises(ModelError) as caught:
        capture(nn.Sequential(nn.Linear(4, 5), nn.Linear(4, 4)), (torch.randn(2, 4),))
    message = str(caught.value)
    assert "forward cannot run under fake tensors: aten.addmm.default in 1: RuntimeError" in message
    assert "\n" not in message


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(ModelError, match="batch holds no tensors"):
        capture(nn.Linear(4, 4), {"x": 3})


@pytest.mark.parametrize("device", ["mps", "xpu:0", "cudo", "cuda:x"])
def test_a_device_that_is_neither_cpu_nor_cuda_is_refused(device: str) -> None:
    with pytest.raises(ModelError, match="recorded for device cpu or cuda"):
        capture(nn.Linear(4, 4), (torch.randn(2, 4),), device=device)


class Aside(nn.Module):
    """Writes in ``forward`` to what it does not return: the noise of a leaky ReLU, a list of tensors in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.leaky = nn.RReLU()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        scale = x.exp()
        torch._foreach_mul_([scale], 2.0)
        return {"loss": (self.leaky(self.layer(x)) * scale).square().mean()}


def test_what_an_op_writes_to_and_does_not_return_is_made_by_it() -> None:
    """Such an op is in the trace, with the bytes that it writes, and no plan treats what another op had made there."""
    model, batch, nbytes = Aside(), {"x": torch.randn(4, 8)}, 4 * 8 * 4
    trace = capture(model, batch).trace
    assert traced_peak(trace) == real_peak(model, batch)
    makers: dict[int, str] = {}
    for _, visit, op in trace.ops():
        work = trace.works[op.work]
        made = {visit.resolve(reference) for reference in op.outputs}
        if work.op == "aten.rrelu_with_noise.default":
            assert {makers[tensor] for tensor in made & set(makers)} == {"aten.empty_like.default"}
            assert work.nbytes == 4 * nbytes  # the input and, as the trace has it, the noise are read; two are written
        if work.op == "aten._foreach_mul_.Scalar":
            assert {makers[tensor] for tensor in made} == {"aten.exp.default"} and work.nbytes == 2 * nbytes
        makers |= dict.fromkeys(made - set(makers), work.op)
    index = TraceIndex(trace)
    named = {
        op for place, visit in enumerate(trace.visits) if visit.phase is Phase.FORWARD for op, _ in index.named(place)
    }
    assert "aten.rrelu_with_noise.default" in named and "aten.exp.default" not in named


def test_a_step_is_the_same_where_gradients_are_off() -> None:
    """As in a function under ``torch.no_grad()`` that makes the model and prepares it."""
    case = CASES["llama"]
    with torch.no_grad():
        trace = capture(case.model(torch.float32), case.inputs(0, torch.float32)).trace
        assert not torch.is_grad_enabled()
    assert trace == traced("llama")


def test_a_step_under_anomaly_mode_is_looked_at_in_silence() -> None:
    """That mode asks of every gradient whether it has a NaN, which no fake tensor knows."""
    case = CASES["llama"]
    model, batch = case.model(torch.float32), case.inputs(0, torch.float32)
    with torch.autograd.set_detect_anomaly(True), warnings.catch_warnings(record=True) as told:
        trace = capture(model, batch).trace
        assert traced_peak(trace, keep=True) == real_peak(model, batch, keep=True)
    assert [str(one.message) for one in told] == []
