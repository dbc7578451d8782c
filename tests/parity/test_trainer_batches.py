"""What the data of a Trainer may be like, and what planning for its first batch leaves as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from torch.utils.data import Dataset, IterableDataset

import forebay
from forebay.errors import ConfigError
from forebay.integrations.transformers import Memory
from tests.parity.small_trainers import BUDGET, Noting, Planned, Regression, arguments, same, streams

Row = dict[str, torch.Tensor]
Rows = list[Row]


@pytest.fixture
def model() -> Iterator[Regression]:
    made = Regression()
    yield made
    forebay.close(made)


def rows() -> Rows:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(128, generator=generator), "target": torch.ones(4)} for _ in range(16)]


def stacked(some: Rows, name: str) -> torch.Tensor:
    return torch.stack([row[name] for row in some])


def a_row_each(some: Rows) -> dict[str, Any]:
    return {"x": stacked(some, "x"), "labels": [{"target": row["target"]} for row in some]}


def a_head_each(some: Rows) -> dict[str, Any]:
    return {"x": stacked(some, "x"), "labels": {"target": stacked(some, "target")}}


@pytest.mark.parametrize("collate", [a_row_each, a_head_each])
def test_labels_that_are_several_tensors(
    tmp_path: Path, model: Regression, collate: Callable[[Rows], dict[str, Any]]
) -> None:
    """Those of detection, and those of several heads."""
    given = {
        "args": arguments(tmp_path, remove_unused_columns=False),
        "train_dataset": rows(),
        "data_collator": collate,
    }
    own, theirs = Planned(model=model, **given), Noting(model=Regression(), **given)
    for one in (own, theirs):
        torch.manual_seed(5)
        one.train()
    assert streams(model) and own.losses == theirs.losses and same(model, theirs.model)


class Noise:
    """Collates, with noise from a generator that it makes for its first batch, as collators of transformers do."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None

    def __call__(self, some: Rows) -> dict[str, Any]:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(5)
        x = stacked(some, "x")
        return {"x": x + torch.rand(x.shape, generator=self.generator), "labels": stacked(some, "target")}


class Augmented(Dataset[Row]):
    """Draws each row anew."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, row: int) -> Row:
        return {"x": torch.from_numpy(self.generator.random(128, dtype=np.float32)), "target": torch.ones(4)}


def test_planning_draws_nothing_from_generators_of_the_data(tmp_path: Path, model: Regression) -> None:
    losses = []
    for kind, trained in ((Planned, model), (Noting, Regression())):
        args = arguments(tmp_path, remove_unused_columns=False)
        one = kind(model=trained, args=args, train_dataset=Augmented(), data_collator=Noise())
        one.train()
        losses.append(one.losses)
    assert losses[0] == losses[1]


class Stream(IterableDataset[Row]):
    """Begins once."""

    def __init__(self) -> None:
        self.rows = ({"x": row["x"], "labels": row["target"]} for row in rows())

    def __iter__(self) -> Iterator[Row]:
        return self.rows


def test_a_stream_that_begins_once_needs_an_example(tmp_path: Path, model: Regression) -> None:
    """Training would lack its first batch."""
    stream = Stream()
    with pytest.raises(ConfigError, match=r"the training data \(Stream\) begins only once, .* give Memory an example"):
        Planned(model=model, args=arguments(tmp_path), train_dataset=stream).train()
    example = {"x": torch.zeros(4, 128), "labels": torch.zeros(4, 4)}
    memory = Memory(BUDGET, policy="stream", example=example)
    own = Planned(model=model, args=arguments(tmp_path), train_dataset=stream, memory=memory)
    own.train()
    theirs = Noting(model=Regression(), args=arguments(tmp_path), train_dataset=Stream())
    theirs.train()
    assert own.losses == theirs.losses
