"""What a model may return, and what of it a step is planned to train by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ConfigError
from forebay.profiler.capture import capture
from forebay.profiler.remarks import SUMMED
from forebay.trace import Trace
from tests.parity.capture_rig import gradients

Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]


class Towers(nn.Module):
    """Two encoders and a temperature, and the ``form`` in which they are returned."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.zeros(()))
        self.form = form

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.form(self.a(x), self.b(y), self.scale.exp())


@dataclass
class Features:
    a: torch.Tensor
    b: torch.Tensor


@dataclass
class Output:
    loss: torch.Tensor
    features: Features


class Own:
    """Says nothing of what it has."""

    def __init__(self, *features: torch.Tensor) -> None:
        self.features = features


BATCH = {"x": torch.randn(2, 8), "y": torch.randn(2, 8)}
FEATURES_BYTES = 2 * 2 * 4 * 4  # two of 2 by 4 floats


def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a - b).square().mean()


LOSSES: dict[str, Form] = {
    "first": lambda a, b, scale: (loss(a, b), a),
    "behind what it is made of": lambda a, b, scale: (a, b, loss(a, b)),
    "behind what is made like it": lambda a, b, scale: (a.softmax(-1), b.softmax(-1), loss(a, b)),
    "by its name": lambda a, b, scale: {"a": a, "mean": b.mean(), "loss": loss(a, b)},
    "before its parts": lambda a, b, scale: (lambda one, other: (one + other, one, other))(a.mean(), b.mean()),
    "behind its parts": lambda a, b, scale: (lambda one, other: (one, other, one + other))(a.mean(), b.mean()),
    "of a dataclass": lambda a, b, scale: Output(loss(a, b), Features(a, b)),
    "of an object": lambda a, b, scale: SimpleNamespace(loss=loss(a, b), a=a),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_found(name: str) -> None:
    trace = traced(LOSSES[name])
    assert trained(trace) == {"a", "b"}
    assert SUMMED not in trace.notes and trace.unseen_nbytes == 0


@pytest.mark.parametrize(
    ("form", "unseen"),
    [
        pytest.param(lambda a, b, scale: {"a": a.mean(), "b": b.mean()}, 2 * 4, id="losses"),
        pytest.param(lambda a, b, scale: {"a": loss(a, b), "b": b.mean()}, 2 * 4, id="another loss of the same"),
        pytest.param(lambda a, b, scale: (a.mean(), b.mean(), a), 2 * 4, id="losses before features"),
        pytest.param(lambda a, b, scale: (a, b.mean()), FEATURES_BYTES // 2 + 4, id="an auxiliary loss"),
        pytest.param(lambda a, b, scale: (a, b, scale), FEATURES_BYTES + 4, id="a temperature"),
    ],
)
def test_of_several_numbers_the_sum_is_planned_and_loss_fn_is_named(form: Form, unseen: int) -> None:
    trace = traced(form)
    assert {"a", "b"} <= trained(trace)
    assert SUMMED in trace.notes and "give loss_fn=" in SUMMED
    assert trace.unseen_nbytes == 3 * unseen


def test_features_alone_are_summed_whatever_holds_them() -> None:
    by_form = [traced(form) for form in (lambda a, b, scale: (a, b), lambda a, b, scale: Features(a, b))]
    assert {trace.unseen_nbytes for trace in by_form} == {3 * FEATURES_BYTES}
    assert all(trained(trace) == {"a", "b"} and not trace.notes for trace in by_form)


def test_what_hides_its_tensors_needs_a_loss_fn() -> None:
    """It is warned of, and policies that ask for a trace say why there is none."""

    def prepared(policy: str, **how: Any) -> None:
        model = Towers(lambda a, b, scale: Own(a, b))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        forebay.close(
            forebay.prepare(model, optimizer, BATCH, device_memory="1MiB", policy=policy, device="cpu", **how)[0]
        )

    said = r"returned \(Own\); give loss_fn="
    with pytest.warns(UserWarning, match=said):
        prepared("auto")
    for policy in ("stream-recompute", "offload-all", "capuchin"):
        with pytest.warns(UserWarning, match=said), pytest.raises(ConfigError, match=f"beforehand .*{said}"):
            prepared(policy)
    prepared("stream-recompute", loss_fn=lambda model, batch: loss(*model(**batch).features))


def traced(form: Form) -> Trace:
    return capture(Towers(form), BATCH).trace


def trained(trace: Trace) -> set[str]:
    """The parts of the model whose parameters have gradients."""
    return {name.partition(".")[0] for name, _ in gradients(trace)}
