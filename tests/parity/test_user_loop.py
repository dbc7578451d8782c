"""The training loop stays the user's own: whatever a loop does with a model under plain PyTorch, it does here, with
the same numbers, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from tests.parity.models import CASES, images, tokens

AMPLE = "64MiB"
POLICIES = ["auto", "stream"]


class Pair:
    """A model under forebay and the same one under plain PyTorch, with torch's fused AdamW or SGD for both."""

    def __init__(self, model: nn.Module, reference: nn.Module, policy: str) -> None:
        self.plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        made = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        self.model, self.optimizer = forebay.prepare(model, made, device_memory=AMPLE, policy=policy, device="cpu")
        self.reference = reference

    def both(self) -> tuple[tuple[nn.Module, torch.optim.Optimizer], ...]:
        return (self.model, self.optimizer), (self.reference, self.plain)

    def assert_equal(self) -> None:
        """Parameters and gradients agree in every bit."""
        values, gradients = forebay.parameters(self.model), forebay.gradients(self.model)
        for name, parameter in self.reference.named_parameters():
            assert torch.equal(values[name], parameter), name
            assert (name in gradients) == (parameter.grad is not None), name
            if parameter.grad is not None:
                assert torch.equal(gradients[name], parameter.grad), name


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(policy: str) -> Iterator[Pair]:
    """A small network with a module that is used twice and a parameter that an enclosing module owns."""
    pair = Pair(CASES["used-twice"].model(torch.float32), CASES["used-twice"].model(torch.float32), policy)
    yield pair
    forebay.close(pair.model)


@pytest.fixture
def llama(policy: str) -> Iterator[Pair]:
    pair = Pair(CASES["llama"].model(torch.float32), CASES["llama"].model(torch.float32), policy)
    yield pair
    forebay.close(pair.model)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    batch = tokens(step) if isinstance(model, LlamaForCausalLM) else images(step)
    loss: torch.Tensor = model(**batch)["loss"]
    return loss


def same_step(pair: Pair, step: int) -> None:
    """One ordinary step of both, compared before and after the update."""
    losses = []
    for model, _ in pair.both():
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss)
    assert torch.equal(*losses)
    pair.assert_equal()
    for _, optimizer in pair.both():
        optimizer.step()
    pair.assert_equal()
    for _, optimizer in pair.both():
        optimizer.zero_grad()


def test_accumulation_over_many_backwards(pair: Pair) -> None:
    for step in range(3):
        for micro in range(4):
            for model, _ in pair.both():
                (loss_of(model, 4 * step + micro) / 4).backward()
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()


Clip = Callable[[nn.Module], Any]
CLIPS: dict[str, Clip] = {
    "norm": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1),
    "norm, no foreach": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, foreach=False),
    "norm of 1": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=1.0),
    "largest": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-3, norm_type=float("inf")),
    "finite": lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, error_if_nonfinite=True),
    "value": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "value, no foreach": lambda m: torch.nn.utils.clip_grad_value_(m.parameters(), 1e-3, foreach=False),
    "total": lambda m: torch.nn.utils.get_total_norm([p.grad for p in m.parameters() if p.grad is not None]),
}


@pytest.mark.parametrize("clip", CLIPS)
def test_clipping(pair: Pair, clip: str) -> None:
    for step in range(2):
        for model, _ in pair.both():
            loss_of(model, step).backward()
        results = [CLIPS[clip](model) for model, _ in pair.both()]
        assert results[0] is results[1] is None or torch.equal(*results)
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()


def test_clipping_by_the_optimizer(pair: Pair) -> None:
    for step in range(2):
        for model, _ in pair.both():
            loss_of(model, step).backward()
        norm = pair.optimizer.clip_grad_norm_(0.1)
        assert torch.equal(norm, torch.nn.utils.clip_grad_norm_(pair.reference.parameters(), 0.1))
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()


ZERO: dict[str, Callable[[nn.Module, torch.optim.Optimizer], None]] = {
    "to none": lambda m, o: o.zero_grad(),
    "to zero": lambda m, o: o.zero_grad(set_to_none=False),
    "by the model": lambda m, o: m.zero_grad(),
    "by the model, to zero": lambda m, o: m.zero_grad(set_to_none=False),
    "by hand": lambda m, o: [setattr(p, "grad", None) for p in m.parameters()] and None,
    "by hand, to zero": lambda m, o: [p.grad.zero_() for p in m.parameters()] and None,
}


@pytest.mark.parametrize("zero", ZERO)
def test_zero_grad(pair: Pair, zero: str) -> None:
    for step in range(3):
        for model, optimizer in pair.both():
            loss_of(model, step).backward()
            optimizer.step()
            ZERO[zero](model, optimizer)
        pair.assert_equal()
        # Gradients of zero are gradients: momentum and decay move the parameters.
        for _, optimizer in pair.both():
            optimizer.step()
        pair.assert_equal()


EDITS: dict[str, Callable[[nn.Parameter], None]] = {
    "replaced": lambda p: setattr(p, "grad", p.grad * 2),
    "scaled": lambda p: p.grad.mul_(0.5),
    "divided": lambda p: p.grad.div_(4),
    "clamped": lambda p: p.grad.clamp_(-1e-3, 1e-3),
    "noise added": lambda p: p.grad.add_(torch.ones_like(p.grad), alpha=1e-3),
    "summed": lambda p: setattr(p, "grad", p.grad + 1e-3 * p.grad.sign()),
    "centred": lambda p: p.grad.sub_(p.grad.mean()),
    "filled": lambda p: p.grad.fill_(1e-3),
    "copied into": lambda p: p.grad.copy_(torch.full_like(p.grad, 1e-3)),
    "an element": lambda p: p.grad.view(-1).__setitem__(0, 1.0),
    "rows": lambda p: p.grad[:2].zero_(),
    "a row": lambda p: p.grad.__setitem__(1, 0.5),
    "masked": lambda p: p.grad.__setitem__(p.grad < 0, 0.0),
    "transposed": lambda p: p.grad.t().mul_(2),
    "deep": lambda p: p.grad.flatten()[1:].unsqueeze(0)[:, ::2].add_(1e-3),
    "halves": lambda p: [half.mul_(k + 2) for k, half in enumerate(p.grad.view(-1).chunk(2))],
    "through data": lambda p: p.grad.data.mul_(3),
    "nan removed": lambda p: torch.nan_to_num_(p.grad, nan=0.0),
    "handed on": lambda p: setattr(p, "grad", p.grad.detach().clone().neg_()),
}


@pytest.mark.parametrize("edit", EDITS)
def test_the_user_edits_gradients(pair: Pair, edit: str) -> None:
    for step in range(2):
        for model, _ in pair.both():
            loss_of(model, 2 * step).backward()
            for parameter in model.parameters():
                EDITS[edit](parameter)
        pair.assert_equal()
        for model, _ in pair.both():
            loss_of(model, 2 * step + 1).backward()  # accumulates on the edited gradient
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()
    pair.assert_equal()


def test_a_kept_gradient_is_never_that_of_another_step(pair: Pair) -> None:
    """torch leaves the old gradient to whoever holds it; here its bytes are overwritten, and a read says so."""
    kept = []
    for model, optimizer in pair.both():
        loss_of(model, 0).backward()
        kept.append(model.get_parameter("body.head.weight").grad)
        optimizer.zero_grad()
    assert torch.equal(*kept)
    for model, _ in pair.both():
        loss_of(model, 1).backward()
    pair.assert_equal()
    if type(kept[0]) is torch.Tensor:
        assert torch.equal(*kept)
    else:
        with pytest.raises(forebay.ForebayError, match=r"body\.head\.weight .*clone\(\)"):
            kept[0].norm()


@pytest.mark.parametrize("policy", ["stream"])
def test_gradients_that_change_places(pair: Pair) -> None:
    """A landed gradient given to another parameter of the same shape lands there; what would be lost is refused."""
    names = ("body.layers.0.weight", "body.layers.1.weight")
    for model, _ in pair.both():
        loss_of(model, 0).backward()
        first, second = (model.get_parameter(name) for name in names)
        first.grad = second.grad
    for _, optimizer in pair.both():
        optimizer.step()
    pair.assert_equal()
    for model, optimizer in pair.both():
        optimizer.zero_grad()
        loss_of(model, 1).backward()
    first, second = (pair.model.get_parameter(name) for name in names)
    first.grad, second.grad = second.grad, first.grad
    with pytest.raises(forebay.ForebayError, match=r"clone\(\)"):
        pair.optimizer.step()
    pair.optimizer.zero_grad()


def test_evaluation_between_steps_and_inside_one(pair: Pair) -> None:
    for step in range(3):
        losses = [loss_of(model, step) for model, _ in pair.both()]
        seen = []
        for model, _ in pair.both():  # between forward and backward
            model.eval()
            with torch.no_grad():
                seen.append(loss_of(model, 100 + step))
            model.train()
        assert torch.equal(*seen)
        for loss in losses:
            loss.backward()
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()
        with torch.inference_mode():
            assert torch.equal(*[loss_of(model, 200 + step) for model, _ in pair.both()])
    pair.assert_equal()


def test_evaluation_first(pair: Pair) -> None:
    with torch.no_grad():
        assert torch.equal(*[loss_of(model, 7) for model, _ in pair.both()])
    same_step(pair, 0)
    same_step(pair, 1)


def test_generate(llama: Pair) -> None:
    prompt = tokens(0)["input_ids"][:, :4]
    for step in range(2):
        made = [m.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0) for m, _ in llama.both()]
        assert torch.equal(*made)
        assert made[0].shape == (2, 10)
        same_step(llama, step)


def test_two_forwards_before_one_backward(pair: Pair) -> None:
    for step in range(3):
        for model, _ in pair.both():
            (loss_of(model, 2 * step) + 0.5 * loss_of(model, 2 * step + 1)).backward()
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()


def test_backward_in_the_other_order(pair: Pair) -> None:
    for model, _ in pair.both():
        first, second = loss_of(model, 0), loss_of(model, 1)
        second.backward()
        first.backward()
    pair.assert_equal()


def test_backward_twice_over_one_graph(pair: Pair) -> None:
    for step in range(2):
        for model, _ in pair.both():
            loss = loss_of(model, step)
            loss.backward(retain_graph=True)
            loss.backward()
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()


def test_gradients_by_autograd_grad(llama: Pair) -> None:
    """``torch.autograd.grad`` of a hidden state: no parameter is asked for, none gets a gradient."""
    results = []
    for model, _ in llama.both():
        embedded = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        loss = model(inputs_embeds=embedded, labels=tokens(0)["labels"]).loss
        results.append(torch.autograd.grad(loss, embedded)[0])
    assert torch.equal(*results)
    llama.assert_equal()
    same_step(llama, 0)


def dropping() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4
    )
    config.attention_dropout = 0.3
    return LlamaForCausalLM(config)


def test_dropout_draws_the_same_numbers(policy: str) -> None:
    pair = Pair(dropping(), dropping(), policy)
    states = []
    for step in range(3):
        losses = []
        for model, _ in pair.both():
            torch.manual_seed(step)
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss)
            states.append(torch.get_rng_state())
        assert torch.equal(*losses)
        assert torch.equal(states[-1], states[-2])
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()
    forebay.close(pair.model)


def test_preparing_draws_no_random_number(policy: str) -> None:
    model = CASES["llama"].model(torch.float32)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    model, _ = forebay.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        tokens(0),
        device_memory=AMPLE,
        policy=policy,
        device="cpu",
    )
    assert torch.equal(torch.get_rng_state(), before)
    forebay.close(model)


@pytest.mark.parametrize("enabled", [False, True])
def test_grad_scaler(pair: Pair, enabled: bool) -> None:
    scalers = [torch.amp.GradScaler("cpu", enabled=enabled, init_scale=1024.0) for _ in range(2)]
    for step in range(3):
        for scaler, (model, optimizer) in zip(scalers, pair.both(), strict=True):
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
        pair.assert_equal()
        for scaler, (model, optimizer) in zip(scalers, pair.both(), strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.assert_equal()


def test_autocast(llama: Pair) -> None:
    for step in range(3):
        losses = []
        for model, _ in llama.both():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(model, step)
            loss.backward()
            losses.append(loss)
        assert torch.equal(*losses)
        llama.assert_equal()
        for _, optimizer in llama.both():
            optimizer.step()
            optimizer.zero_grad()


class Interrupted(RuntimeError):
    """What a test raises inside a model."""


@contextlib.contextmanager
def raising_in(module: nn.Module, error: BaseException, *, after: bool) -> Iterator[None]:
    """The forward of ``module`` raises, before its computation or after it."""

    def hook(*_: Any) -> None:
        raise error

    handle = module.register_forward_hook(hook) if after else module.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("error", [Interrupted("in forward"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("where", ["body.shared", "body.layers.2", "body.head", "body", ""])
def test_exception_inside_forward(pair: Pair, where: str, error: BaseException, after: bool) -> None:
    same_step(pair, 0)
    for grad in (True, False):
        with (
            raising_in(pair.model.get_submodule(where), error, after=after),
            pytest.raises(type(error)),
            torch.set_grad_enabled(grad),
        ):
            loss_of(pair.model, 1)
    same_step(pair, 1)
    same_step(pair, 2)


class RaiseInBackward(torch.autograd.Function):
    """The identity, whose backward raises ``error``."""

    error: BaseException | None = None

    @staticmethod
    def forward(context: Any, value: torch.Tensor, error: BaseException) -> torch.Tensor:
        context.error = error
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        raise context.error


@pytest.mark.parametrize("error", [Interrupted("in backward"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_exception_inside_backward(pair: Pair, error: BaseException) -> None:
    same_step(pair, 0)
    layer = pair.model.get_submodule("body.layers.1")
    handle = layer.register_forward_hook(lambda m, a, out: RaiseInBackward.apply(out, error))
    loss = loss_of(pair.model, 1)
    with pytest.raises(type(error)):
        loss.backward()
    handle.remove()
    del loss
    # The blocks behind the fault have gradients, as in plain PyTorch; the user starts the step anew.
    assert 0 < len(forebay.gradients(pair.model)) < len(list(pair.model.parameters()))
    pair.optimizer.zero_grad()
    same_step(pair, 1)
    same_step(pair, 2)


def test_freezing_later(pair: Pair) -> None:
    """A parameter that is frozen after prepare gets no gradient and no step; thawed again it goes on."""
    same_step(pair, 0)
    for wanted in (False, True):
        for model, _ in pair.both():
            model.get_submodule("body.layers.1").requires_grad_(wanted)
        same_step(pair, 1)
        same_step(pair, 2)


def test_thawing_what_was_frozen_at_prepare_is_refused(policy: str) -> None:
    """There is no room for its gradient and states in the plan: the step says so instead of leaving it out."""
    model = CASES["frozen"].model(torch.float32)
    model, optimizer = forebay.prepare(
        model, torch.optim.AdamW(model.parameters()), device_memory=AMPLE, policy=policy, device="cpu"
    )
    model.get_submodule("model.layers.0").requires_grad_(True)
    loss_of(model, 0).backward()
    with pytest.raises(forebay.ForebayError, match=r"model\.layers\.0.* frozen .*prepare"):
        optimizer.step()
    forebay.close(model)


@pytest.mark.parametrize("stepped", [False, True])
def test_a_prepared_model_is_not_copied(pair: Pair, stepped: bool) -> None:
    """A copy would share threads, files and arenas with the original, or hold no values: it is refused."""
    if stepped:
        same_step(pair, 0)
    for make in (copy.deepcopy, pickle.dumps):
        with pytest.raises(forebay.ForebayError, match=r"cannot be copied or pickled.*state_dict"):
            make(pair.model)
        with pytest.raises(forebay.ForebayError, match=r"cannot be copied or pickled.*state_dict"):
            make(pair.optimizer)
        with pytest.raises(forebay.ForebayError):
            make(pair.model.get_submodule("body.layers.0"))
    same_step(pair, 1)


def test_parameters_outside_forward(pair: Pair, policy: str) -> None:
    """A read of a parameter that is elsewhere fails loudly and names the way that works."""
    same_step(pair, 0)
    weight = pair.model.get_parameter("body.layers.0.weight")
    if policy == "stream":
        with pytest.raises(forebay.ForebayError, match=r"forebay\.parameters"):
            (weight * 2).sum()
        with pytest.raises((forebay.ForebayError, RuntimeError)), torch.no_grad():
            weight.mul_(2)
    else:
        expected = pair.reference.get_parameter("body.layers.0.weight")
        assert torch.equal((weight * 2).sum(), (expected * 2).sum())
    same_step(pair, 1)


def test_sparse_inputs(policy: str) -> None:
    """A sparse tensor inside the step is neither counted twice nor taken for a parameter."""

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            edges = torch.eye(8).to_sparse()
            for layer in self.layers:
                x = torch.sparse.mm(edges * 2, layer(x).relu())
            return {"loss": x.square().mean()}

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Graph())
    pair = Pair(models[0], models[1], policy)
    batch = {"x": torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), "labels": torch.zeros(1)}
    for _ in range(2):
        for model, _ in pair.both():
            model(**batch)["loss"].backward()
        pair.assert_equal()
        for _, optimizer in pair.both():
            optimizer.step()
            optimizer.zero_grad()
    forebay.close(pair.model)


def test_data_loader_workers_beside_a_prepared_model(pair: Pair) -> None:
    batches = torch.utils.data.DataLoader([images(step) for step in range(3)], batch_size=None, num_workers=1)
    for step, batch in enumerate(batches):
        for model, optimizer in pair.both():
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(batch["labels"], images(step)["labels"])
    pair.assert_equal()
