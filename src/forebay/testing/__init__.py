"""Proof that forebay trains your model as plain PyTorch does, for your own tests.

    from forebay.testing import assert_same_training

    def test_my_model() -> None:
        assert_same_training(make_model, batches, make_optimizer, device_memory="8MiB", policy="stream")

docs/verify.md has the whole of it; ``forebay verify`` is the same from the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from forebay import api
from forebay.plans import Plan
from forebay.profiler.batch import moved_to
from forebay.reporting.verdict import Check, Verdict
from forebay.runtime.generators import as_drawn_before, seed_all
from forebay.runtime.losses import LossFunction
from forebay.testing.comparing import Pair, compare, loss_of
from forebay.testing.plain import PlainOptimizer, beside_plain, place_of, with_memory
from forebay.testing.promises import Course

__all__ = ["Check", "Course", "Verdict", "assert_same_training", "train_both"]

DEFAULT = Course()


def assert_same_training(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    loss_fn: LossFunction = loss_of,
    course: Course = DEFAULT,
    batch: Any = None,
    **prepare: Any,
) -> Verdict:
    """Trains a model with forebay and in plain PyTorch, and raises ``AssertionError`` where the numbers are others.

    Takes what ``train_both`` takes, ``batches`` of one shape among it, and returns what it returns. Where the plan
    changes the numbers by its own account (``Plan.changes_numbers``), they must be as near to plain PyTorch's as it
    promises (``Verdict.kept``).
    """
    verdict = train_both(make_model, batches, make_optimizer, loss_fn=loss_fn, course=course, batch=batch, **prepare)
    if not verdict.kept:
        raise AssertionError(f"not the numbers of plain PyTorch: {'; '.join(verdict.broken)}")
    return verdict


def train_both(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    loss_fn: LossFunction = loss_of,
    course: Course = DEFAULT,
    batch: Any = None,
    **prepare: Any,
) -> Verdict:
    """Trains a model with forebay and in plain PyTorch, and says what was equal.

    ``make_model`` makes the model, twice, with the same random numbers; parameters may be on the meta device and are
    then initialised as ``forebay.initialize`` does. ``batches`` are micro-batches, taken in turn, of one shape:
    mappings are keywords of the model's forward, tuples its arguments. ``make_optimizer`` is given the parameters.
    ``loss_fn`` calls a model with a batch and returns the loss to differentiate; left out, it is the one in the model's
    output, or the sum of that. ``batch`` is what the model itself is called with: the first of ``batches``, or, with a
    ``loss_fn``, None, and forebay plans without having looked at a step. ``prepare``: the arguments of
    ``forebay.prepare``, ``device_memory`` at least. Both models are in memory at the same time.

    Raises what ``forebay.prepare`` raises, ``UsageError`` where there is no batch, and whatever the model raises.
    """
    with beside_plain(prepare.get("device")) as opened:
        return _train_both(make_model, batches, make_optimizer, loss_fn, course, batch, {**prepare, "device": opened})


def _train_both(
    make_model: Callable[[], nn.Module],
    batches: Sequence[Any],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    loss_fn: LossFunction,
    course: Course,
    batch: Any,
    prepare: dict[str, Any],
) -> Verdict:
    device = place_of(prepare["device"])
    moved = [moved_to(one, device) for one in batches]
    if batch is None and loss_fn is loss_of:
        batch = next(iter(batches), None)
    seen = None if batch is None else moved_to(batch, device)
    model = _made(make_model, course.seed)
    empty = any(parameter.is_meta for parameter in model.parameters())
    model, optimizer = api.prepare(model, make_optimizer(model.parameters()), seen, **prepare)
    plan = api.report(model).plan

    def again(plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
        another = _made(make_model, course.seed)
        return api.prepare(another, make_optimizer(another.parameters()), **{**prepare, "plan": plan})

    try:
        if empty:
            api.initialize(model, course.seed)
        plain = with_memory(_made(make_model, course.seed), device)
        own = PlainOptimizer(make_optimizer(plain.parameters()))
        checks = compare(Pair(model, optimizer, plain, own, moved, loss_fn, alike=not empty, again=again), course)
    finally:
        api.close(model)
    return Verdict(type(plain).__name__, plan.planner, checks, plan.changes_numbers)


def _made(make_model: Callable[[], nn.Module], seed: int) -> nn.Module:
    with as_drawn_before():
        seed_all(seed)
        return make_model()
