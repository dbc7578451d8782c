"""``forebay train`` on a small model whose forwards are spoilt, as the tests of its faults call it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from forebay import api
from forebay.cli.progress import StepResult, View
from forebay.cli.train import TrainResult, train
from forebay.config import TrainConfig, make_config
from forebay.memory import Ledger
from forebay.runtime.hooks import prepared_session

__all__ = ["MODEL", "STEPS", "Hungry", "Spoil", "Spoilt", "Telling", "go", "no_number", "settings", "text", "weights"]

TEXT = "".join(f"{i} green bottles hanging on the wall, and if one should fall\n" for i in range(200))
MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96}
MODEL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "attention_dropout": 0.1}
STEPS = 5

Spoil = Callable[[int, Any], None]
"""What happens to the output of forward number so and so, counted from 1."""


@final
class Telling(View):
    """Keeps what it is told."""

    is_terminal = False

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.console: Any = self

    def print(self, text: str, **options: object) -> None:
        self.notes.append(text)

    def start(self, steps: int, device_peak: Any) -> None:
        pass

    def step(self, result: StepResult) -> None:
        pass

    def stop(self) -> None:
        pass

    def said(self, words: str) -> bool:
        return any(words in note for note in self.notes)


@final
class Hungry:
    """The backwards of these forwards have more on the device for a moment than their trace has said: at first ``over``
    bytes more than there is room for, and from then on as many."""

    def __init__(self, over: int, *forwards: int) -> None:
        self._over = over
        self._forwards = forwards
        self._nbytes = 0
        self.ledger: Ledger | None = None

    def __call__(self, number: int, output: Any) -> None:
        if number in self._forwards:
            output.last_hidden_state.register_hook(self._eat)

    def _eat(self, gradient: torch.Tensor) -> None:
        if self.ledger is not None:
            self._nbytes = self._nbytes or (self.ledger.headroom or 0) + self._over
            torch.empty(self._nbytes, dtype=torch.uint8)


@final
class Spoilt:
    """forebay's interface over models whose forward is spoilt: ``forwards`` of them so far, over all preparations."""

    def __init__(self, spoil: Spoil) -> None:
        self._spoil = spoil
        self.forwards = 0
        self.prepared: list[Mapping[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(api, name)

    def prepare(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        made = api.prepare(model, *arguments, **options)
        self.prepared.append({**options, "plan": api.report(model).plan})
        if isinstance(self._spoil, Hungry):
            self._spoil.ledger = prepared_session(model).device.ledger
        # Inside of forebay's own hooks, as if the model did it itself.
        model.get_submodule("model").register_forward_hook(self._after)
        return made

    def _after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self.forwards += 1
        self._spoil(self.forwards, output)


def no_number(*forwards: int) -> Spoil:
    """The loss of these forwards is NaN."""

    def spoil(number: int, output: Any) -> None:
        if number in forwards:
            output.last_hidden_state = output.last_hidden_state * math.nan

    return spoil


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return tmp_path / "text.txt"


def settings(text: Path, run: Path | None, **more: object) -> TrainConfig:
    base = {"model": str(text.parent / "model.json"), "data": str(text), "seq": 32, "batch": 2, "device": "cpu"}
    base |= {"device_memory": "16MiB", "steps": STEPS, "lr": 0.01, "policy": "stream", "loss": "plain"}
    return make_config(base, {} if run is None else {"run": str(run)}, more)


def go(config: TrainConfig, spoil: Spoil, view: View | None = None, *, resume: bool = False) -> TrainResult:
    engine: Any = Spoilt(spoil)
    return train(config, engine, view or Telling(), resume=resume)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")
