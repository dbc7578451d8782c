"""Sessions that nobody closes: the mode that counts their bytes sees nothing any more, wherever it is left."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import forebay
from forebay.runtime.hooks import prepared_session
from tests.faults.trained import WIDTH, network, prepare, step


class Collects(TorchDispatchMode):
    """Runs the garbage collector inside of every op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gc.collect()
        return func(*args, **(kwargs or {}))


class Others(TorchDispatchMode):
    """A mode of the user's."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("steps", [0, 1])
def test_one_that_is_dropped_and_collected_in_an_op(steps: int, tmp_path: Path) -> None:
    """The next model goes on as if it had not been there."""
    model, optimizer = prepare("stream", tmp_path)
    for _ in range(steps):
        step(model, optimizer)
    watch = weakref.ref(prepared_session(model).watch)
    assert len(_get_current_dispatch_mode_stack()) == 1
    gc.disable()
    try:
        del model, optimizer
        with Collects():
            x = torch.ones(2)
    finally:
        gc.enable()
    assert x.sum().item() == 2
    gc.collect()
    assert watch() is None
    model, optimizer = prepare("stream", tmp_path)
    expected = network()
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        step(model, optimizer)
        step(expected, plain)
    assert len(_get_current_dispatch_mode_stack()) == 1
    forebay.close(model)
    assert not _get_current_dispatch_mode_stack()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))


def test_one_whose_optimizer_is_kept_is_not_seen_to_again(tmp_path: Path) -> None:
    model, optimizer = prepare("stream", tmp_path)
    step(model, optimizer)
    session = prepared_session(model)
    del model
    gc.collect()
    assert not _get_current_dispatch_mode_stack()
    session.lookout.between_passes()
    assert not _get_current_dispatch_mode_stack()


def test_a_step_within_a_mode_of_the_users(tmp_path: Path) -> None:
    """Where its ``with`` ends, it is off, and the session's is not."""
    model, optimizer = prepare("stream", tmp_path)
    for _ in range(4):  # of which the last two are not looked at
        with Others():
            step(model, optimizer)
        assert not any(isinstance(mode, Others) for mode in _get_current_dispatch_mode_stack())
        assert len(_get_current_dispatch_mode_stack()) == 1
        with torch.no_grad(), Others():
            model(torch.ones(2, WIDTH))
        assert not any(isinstance(mode, Others) for mode in _get_current_dispatch_mode_stack())
    forebay.close(model)
    assert not _get_current_dispatch_mode_stack()
