"""What the data of a Trainer may be like, and what planning for its first batch leaves as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from small_trainers import Noting, Planned, Regression, arguments, same, streams

import forebay

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
