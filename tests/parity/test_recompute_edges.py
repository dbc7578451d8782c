"""What a recomputation must get right beside the numbers: memory, failures, evaluation, what a forward changes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, MistralConfig, MistralForCausalLM

import forebay
from forebay.device.cpu import CpuDevice
from forebay.errors import ConfigError, ModelError
from forebay.memory import Tier
from forebay.runtime.blocks import find_blocks
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import CASES, VOCABULARY, Case, tokens
from tests.parity.recomputing import AMPLE, plan_for, plan_of

WHERE = pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])
FLOAT = 4
ROWS, WIDTH, DEPTH = 128, 8, 5
"""A layer's input (n w floats) is more than its gradients (8 w^2 + 5 w): the peak stays where backward begins."""


class Feed(nn.Module):
    """A layer that saves three tensors: its input (n x w), what goes into GELU and what comes out of it (n x 4w)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        y = self.down(nn.functional.gelu(self.up(x)))
        return y * scale if scale != 1.0 else y, {"square": y}


class Tower(nn.Module):
    """Layers that take a keyword and return a tuple. ``on_layer`` sees each of them run."""

    def __init__(self, on_layer: Callable[[int], None] = lambda i: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Feed() for _ in range(DEPTH)])
        self.on_layer = on_layer

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for i, layer in enumerate(self.layers):
            x, _ = layer(x=x, scale=1.0)
            self.on_layer(i)
        return {"loss": x.square().sum()}


TOWER = Case(Tower, lambda step: {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))})
LAYERS = [f"layers.{i}" for i in range(DEPTH)]


def peak(recompute: list[str], resident: bool) -> int:
    """Device bytes at the peak of the second step, which is like all that follow."""
    plan = plan_for(TOWER, torch.float32, recompute, resident=resident)
    model = TOWER.model(torch.float32)
    model, optimizer = forebay.prepare(
        model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu"
    )
    for step in range(2):
        model(**TOWER.inputs(step, torch.float32))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    usage = forebay.report(model).timeline.usage(Tier.DEVICE)
    forebay.close(model)
    return usage.peak


@WHERE
@pytest.mark.parametrize("count", range(DEPTH))
def test_the_peak_falls_by_what_the_blocks_saved(count: int, resident: bool) -> None:
    """Kept, a layer leaves 8 n w floats from forward to backward beside its input; recomputed, its input only.

    The peak is in the backward of the last layer, while that layer is whole: with layers 0 to k - 1 recomputed it
    falls by 8 n w floats for each of them.
    """
    fall = peak([], resident) - peak(LAYERS[:count], resident)
    assert fall == count * 8 * ROWS * WIDTH * FLOAT


@WHERE
def test_keywords_and_tuples(resident: bool) -> None:
    plan = plan_for(TOWER, torch.float32, LAYERS, resident=resident)
    forebay.close(assert_same_training(TOWER, torch.float32, plan=plan, device_memory=AMPLE, device="cpu"))


def prepared(model: nn.Module, resident: bool, names: list[str] = LAYERS) -> tuple[nn.Module, Any]:
    plan = plan_of(find_blocks(model).model, names, resident=resident)
    return forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")


class Stop:
    """Raises once, when the second layer has run."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.armed = error, False

    def __call__(self, layer: int) -> None:
        if layer == 1 and self.armed:
            self.armed = False
            raise self.error("stop")


@WHERE
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("inside", [False, True], ids=["between layers", "inside a layer"])
def test_the_step_after_a_failed_forward(error: type[BaseException], inside: bool, resident: bool) -> None:
    torch.manual_seed(0)
    stop = Stop(error)
    model = Tower(stop)
    if inside:
        model.on_layer = lambda i: None
        model.layers[1].down.register_forward_hook(lambda *_: stop(1))
    torch.manual_seed(0)
    plain = Tower()
    model, _ = prepared(model, resident)
    inputs = TOWER.inputs(0, torch.float32)
    for _ in range(2):
        stop.armed = True
        with pytest.raises(error):
            model(**inputs)
        loss, expected = model(**inputs)["loss"], plain(**inputs)["loss"]
        loss.backward()
        expected.backward()
        assert torch.equal(loss, expected)
    gradients = forebay.gradients(model)
    assert all(torch.equal(gradients[n], p.grad) for n, p in plain.named_parameters() if p.grad is not None)
    forebay.close(model)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@WHERE
def test_close_inside_nothing_takes_every_hook_off(resident: bool) -> None:
    model, _ = prepared(Tower(), resident)
    model(**TOWER.inputs(0, torch.float32))["loss"].backward()
    forebay.close(model)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    model(**TOWER.inputs(0, torch.float32))["loss"].backward()


@WHERE
def test_evaluation_recomputes_nothing_and_keeps_nothing(resident: bool) -> None:
    model, _ = prepared(Tower(), resident)
    with torch.no_grad():
        model(**TOWER.inputs(0, torch.float32))
    assert not any(e.what.startswith("recompute") for e in forebay.report(model).timeline.events)
    forebay.close(model)


def test_a_graph_that_nobody_runs_backward_is_freed() -> None:
    model, _ = prepared(Tower(), resident=False)
    forebay.synchronize(model)
    live = [t.live for t in forebay.report(model).timeline.tiers if t.tier is Tier.DEVICE]
    for _ in range(3):
        loss = model(**TOWER.inputs(0, torch.float32))["loss"]
        del loss
    gc.collect()
    assert [t.live for t in forebay.report(model).timeline.tiers if t.tier is Tier.DEVICE] == live
    forebay.close(model)


def replace_mean(norm: nn.Module, mean: torch.Tensor) -> None:
    norm.mean = norm.mean * 0.9 + mean


def set_data(norm: nn.Module, mean: torch.Tensor) -> None:
    norm.mean.data = norm.mean * 0.9 + mean


WAYS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "in place": lambda norm, mean: norm.mean.mul_(0.9).add_(mean),
    "replaced": replace_mean,
    "by way of data": lambda norm, mean: norm.mean.data.lerp_(mean, 0.1),
    "a part, by way of data": lambda norm, mean: norm.mean.data[:3].add_(mean[:3]),
    "data set": set_data,
    "in a list": lambda norm, mean: torch._foreach_lerp_([norm.mean], [mean], 0.1),
}


class Centred(nn.Module):
    """Computes with the buffer that its forward has changed, in one of ``WAYS``."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.change = WAYS[way]
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls is None:
            self.calls = torch.zeros(())
        self.calls += 1
        self.change(self, x.detach().mean(0) / self.calls)
        return (x - self.mean) * (1 + self.mean)


class Normed(nn.Module):
    """Layers whose forward changes buffers."""

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm1d(8)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), norm(), nn.ReLU()) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().sum()}


class ReadNorm(nn.BatchNorm1d):
    """Computes with its running statistics, which the kernel changes without torch's count of changes."""

    def __init__(self, *, before: bool) -> None:
        super().__init__(8)
        self.before = before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            return super().forward(x * (1 + self.running_mean)) * x
        return super().forward(x) * self.running_var


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: nn.BatchNorm1d(8),
    "statistics read before": lambda: ReadNorm(before=True),
    "statistics read behind": lambda: ReadNorm(before=False),
    **{way: partial(Centred, way) for way in WAYS},
}


@WHERE
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_buffers_change_once(norm: Callable[[], nn.Module], resident: bool) -> None:
    torch.manual_seed(0)
    plain = Normed(norm)
    torch.manual_seed(0)
    model, _ = prepared(Normed(norm), resident, LAYERS[:3])
    for step in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        model(x)["loss"].backward()
        plain(x)["loss"].backward()
    actual, gradients = dict(model.named_buffers()), forebay.gradients(model)
    assert all(torch.equal(actual[name], buffer) for name, buffer in plain.named_buffers())
    assert all(torch.equal(gradients[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)
    forebay.close(model)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_what_is_kept_of_buffers_is_foreseen(norm: Callable[[], nn.Module]) -> None:
    """From the first step on, when it is not known yet what of them is needed."""
    torch.manual_seed(0)
    model = Normed(norm)
    trace = forebay.profile(model, (torch.randn(4, 8),), "adamw", blocks=LAYERS[:3])
    read = {n for i in range(3) for n in (f"layers.{i}.1.running_mean", f"layers.{i}.1.running_var")}
    used = {"statistics read before": "running_mean", "statistics read behind": "running_var"}
    expected = {n for n in read for k, v in used.items() if NORMS[k] is norm and n.endswith(v)}
    assert read & set(trace.changed_buffers) == expected
    means = {f"layers.{i}.1.mean" for i in range(3)}
    written = any(NORMS[way] is norm for way in WAYS if way != "replaced")
    assert means & set(trace.changed_buffers) == (means if written else set())


class InPlace(nn.Module):
    """Adds to what the layer before has read: a recomputation would start from something else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.GELU(), nn.Linear(8, 8)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        y = self.layers[0](x)
        x += y
        return {"loss": self.layers[1](x).sum()}


@WHERE
@pytest.mark.parametrize("names", [LAYERS[:2], []], ids=["recomputed", "kept"])
def test_an_input_changed_in_place_is_refused(names: list[str], resident: bool) -> None:
    """Plain PyTorch refuses it too; a hook for saved tensors switches its check off."""
    model, _ = prepared(InPlace(), resident, names)
    loss = model(torch.randn(4, 8))["loss"]
    with pytest.raises(ModelError, match=r"layers.0 was changed in place"):
        loss.backward()
    forebay.close(model)


def test_a_cache_is_the_one_before_the_layer_ran() -> None:
    """transformers gives every layer a cache to append to unless it is told not to; keys come in once."""
    case = CASES["llama"]
    names = [b.name for b in find_blocks(case.model(torch.float32)).model.blocks if "layers" in b.name]
    model, _ = prepared(case.model(torch.float32), False, names)
    output = model(**case.inputs(0, torch.float32), use_cache=True)
    output["loss"].backward()
    assert output.past_key_values.get_seq_length() == 16
    forebay.close(model)


def rows_of_eight(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(step))}


class Appending(nn.Module):
    """Reads what it has appended to a cache, which it calls as it likes."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.place, self.linear = place, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, remembered: DynamicCache) -> torch.Tensor:
        keys, values = remembered.update(self.linear(x)[None, None], x[None, None], self.place)
        return x + (keys.sum(-2) * values.sum(-2))[0, 0]


class WithCache(nn.Module):
    def __init__(self, *, by_name: bool) -> None:
        super().__init__()
        self.layers, self.by_name = nn.ModuleList(map(Appending, range(3))), by_name

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        cache = DynamicCache()
        for layer in self.layers:
            x = layer(x, remembered=cache) if self.by_name else layer(x, cache)
        return {"loss": x.square().mean()}


@pytest.mark.parametrize("by_name", [False, True])
def test_a_cache_is_known_by_its_class(by_name: bool) -> None:
    """The argument is ``past_key_values`` in some releases of transformers and ``cache`` in others."""
    case = Case(partial(WithCache, by_name=by_name), rows_of_eight)
    plan = plan_for(case, torch.float32, [f"layers.{i}" for i in range(3)], resident=False)
    forebay.close(assert_same_training(case, torch.float32, plan=plan, device_memory=AMPLE, device="cpu"))


def sliding() -> nn.Module:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 8}
    return MistralForCausalLM(MistralConfig(**sizes, **heads))


def test_a_cache_that_the_loop_lets_go_of() -> None:
    """``loss = model(**batch)["loss"]``: the width of a window is in the cache, and nowhere else."""
    case = Case(sliding, tokens)
    names = [b.name for b in find_blocks(sliding()).model.blocks if "layers" in b.name]
    plan = plan_for(case, torch.float32, names, resident=False)
    forebay.close(assert_same_training(case, torch.float32, plan=plan, device_memory=AMPLE, device="cpu"))


def user_hooks(model: nn.Module) -> None:
    model.layers[1].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.layers[1].register_forward_hook(lambda m, args, output: output + 1)


@WHERE
def test_hooks_of_the_user_act_once(resident: bool) -> None:
    outcomes = []
    for ours in (False, True):
        torch.manual_seed(0)
        model: nn.Module = Normed()
        user_hooks(model)
        if ours:
            model, _ = prepared(model, resident, LAYERS[:3])
        loss = model(torch.ones(4, 8).cumsum(0))["loss"]
        loss.backward()
        gradients = forebay.gradients(model) if ours else {n: p.grad for n, p in model.named_parameters()}
        outcomes.append([loss.detach(), *(gradients[n] for n in sorted(gradients))])
        forebay.close(model)
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize(
    ("names", "message"),
    [(["layers.9"], "that the model does not have"), (["layers.0", "layers.0"], "twice"), (["(root)"], "other blocks")],
)
def test_blocks_that_cannot_be_recomputed_are_refused(names: list[str], message: str) -> None:
    model = CASES["used-twice"].model(torch.float32).body
    plan = plan_of(find_blocks(model).model, names, resident=True)
    with pytest.raises(ConfigError, match=message):
        forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device="cpu")


class Scaled(nn.Module):
    """Its backward reads a frozen parameter as it is, not by way of a view: a norm's weight under adapters, say."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.scale = nn.Parameter(torch.rand(32) + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh() * self.scale


def test_a_frozen_parameter_of_a_recomputed_block_may_leave_before_backward_reads_it() -> None:
    def losses(policy: str | None) -> list[float]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(Scaled() for _ in range(4)))
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=1e-2, fused=True)
        x = torch.randn(4, 32)
        if policy is not None:
            model, optimizer = forebay.prepare(model, optimizer, x, device_memory="128KiB", policy=policy)
        found = []
        for _ in range(3):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        forebay.close(model)
        return found

    assert losses("stream-recompute") == losses("recompute") == losses(None)


@pytest.mark.parametrize("last", ["up.weight", "down.bias"])
def test_what_a_backward_made_again_and_did_not_ask_for_goes_with_its_end(last: str) -> None:
    """And not with the graph, of which another backward may come."""
    model, device = TOWER.model(torch.float32), CpuDevice(AMPLE)
    plan, optimizer = plan_for(TOWER, torch.float32, LAYERS, resident=False), adamw(list(model.parameters()))
    model, optimizer = forebay.prepare(model, optimizer, plan=plan, device_memory=AMPLE, device=device)
    loss = model(**TOWER.inputs(0, torch.float32))["loss"]
    before = device.ledger.live
    for _ in range(2):
        loss.backward(retain_graph=True, inputs=[model.get_parameter(f"layers.{DEPTH - 1}.{last}")])
        forebay.synchronize(model)
        assert device.ledger.live == before
    forebay.close(model)
