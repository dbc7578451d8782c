"""What ends a pass early, and what a user does to the model between steps."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import SessionClosed
from tests.parity.models import CASES, images
from tests.parity.user_loop.pair import AMPLE, Interrupted, Pair, loss_of, same_step


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


def test_data_loader_workers_beside_a_prepared_model(pair: Pair) -> None:
    batches = torch.utils.data.DataLoader([images(step) for step in range(3)], batch_size=None, num_workers=1)
    for step, batch in enumerate(batches):
        for model, optimizer in pair.both():
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(batch["labels"], images(step)["labels"])
    pair.assert_equal()


def told_in_a_child(calls: list[Callable[[], object]], told: Path) -> None:
    """Has a forked child make ``calls`` and write down what each raises."""
    child = os.fork()
    if child == 0:
        try:
            for call in calls:
                try:
                    call()
                    said = "nothing"
                except BaseException as error:
                    said = f"{type(error).__name__}: {error}"
                with told.open("a") as file:
                    file.write(said.splitlines()[0] + "\n")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_is_told_that_the_model_is_elsewhere(pair: Pair, policy: str, tmp_path: Path) -> None:
    """It has neither the pages of arenas nor threads: a read would end it, and a wait would not end."""
    same_step(pair, 0)
    model, optimizer = pair.model, pair.optimizer
    values = forebay.parameters(model)
    calls: list[Callable[[], object]] = [
        lambda: loss_of(model, 1),
        lambda: forebay.accumulate(model, [1, 2], loss_of),
        optimizer.step,
        optimizer.state_dict,
        lambda: list(values.values()),
        lambda: model.load_state_dict(pair.reference.state_dict()),
        lambda: forebay.synchronize(model),
        lambda: forebay.save(model, optimizer, tmp_path / "checkpoint", step=1),
        lambda: forebay.close(model),
    ]
    if policy == "stream":  # else its values are ordinary tensors of the model
        calls.insert(0, model.state_dict)
    told_in_a_child(calls, tmp_path / "told")
    lines = (tmp_path / "told").read_text().splitlines()
    expected = f"{SessionClosed.__name__}: the model was prepared in process {os.getpid()}, "
    assert len(lines) == len(calls)
    assert [line for line in lines if not line.startswith(expected)] == []
    same_step(pair, 1)
