"""Trainers of transformers that share a model, one after the other, and one whose model is closed in between."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

import forebay
from forebay.errors import ModelError
from forebay.integrations.transformers import Memory
from tests.parity.small_trainers import BUDGET, Noting, Planned, Regression, arguments, same, streams


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(128, generator=generator), "labels": torch.ones(4)} for _ in range(16)]


@pytest.fixture
def shared() -> Iterator[Regression]:
    model = Regression()
    yield model
    forebay.close(model)


def test_a_second_trainer_is_refused_until_the_model_is_closed(tmp_path: Path, shared: Regression) -> None:
    """A plain optimizer over parameters whose bytes are elsewhere would write to memory that is none of theirs."""
    first, second = (Planned(model=shared, args=arguments(tmp_path), train_dataset=data()) for _ in range(2))
    first.train()
    with pytest.raises(ModelError, match=r"another optimizer than this trainer's; call forebay.close\(model\) first"):
        second.train()
    first.train()  # it goes on
    forebay.close(shared)
    second.train()
    plain = Regression()
    theirs = [Noting(model=plain, args=arguments(tmp_path), train_dataset=data()) for _ in range(2)]
    for one in (theirs[0], theirs[0], theirs[1]):
        one.train()
    assert streams(shared) and same(shared, plain)
    assert [*first.losses, *second.losses] == [*theirs[0].losses, *theirs[1].losses]


def test_a_second_trainer_evaluates_within_the_budget_of_the_first(tmp_path: Path, shared: Regression) -> None:
    def another(budget: str) -> Planned:
        given = {"train_dataset": data(), "eval_dataset": data()[:4]}
        return Planned(model=shared, args=arguments(tmp_path), memory=Memory(budget, policy="stream"), **given)

    found = another(BUDGET).evaluate()["eval_loss"]
    assert another(BUDGET).evaluate()["eval_loss"] == found
    with pytest.raises(ModelError, match="within another budget than this trainer's Memory"):
        another("2MiB").evaluate()


def test_a_trainer_whose_model_was_closed_trains_on_with_new_states(tmp_path: Path, shared: Regression) -> None:
    """With the optimizer that it was given."""

    def trained(kind: type[Noting], model: Regression) -> Noting:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        data_of = {"train_dataset": data(), "eval_dataset": data()[:4]}
        one = kind(model=model, args=arguments(tmp_path), optimizers=(optimizer, schedule), **data_of)
        one.train()
        forebay.close(model)
        optimizer.state.clear()
        one.evaluate()
        one.train()
        return one

    own, theirs = trained(Planned, shared), trained(Noting, Regression())
    assert streams(shared) and own.losses == theirs.losses and same(shared, theirs.model)
