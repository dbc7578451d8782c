"""Forwards and backwards in whatever number and order: the same numbers as plain PyTorch, bit for bit."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from forebay.errors import UsageError
from tests.parity.models import CASES, tokens
from tests.parity.user_loop.pair import AMPLE, Pair, loss_of, same_step


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


def test_a_forward_beside_one_in_another_thread_is_refused(pair: Pair) -> None:
    """And leaves that one as it is."""
    inside, over = threading.Event(), threading.Event()

    def wait(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert over.wait(60)

    handle = pair.model.get_submodule("body.layers.1").register_forward_pre_hook(wait)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(torch.no_grad()(loss_of), pair.model, 0)
        try:
            assert inside.wait(60)
            with pytest.raises(UsageError, match="runs in another thread"), torch.no_grad():
                loss_of(pair.model, 1)
        finally:
            over.set()
        loss = found.result()
    handle.remove()
    assert torch.equal(loss, loss_of(pair.reference, 0))
    for step in range(2):
        same_step(pair, step)
