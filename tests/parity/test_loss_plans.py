"""How often a model is captured and planned for ``loss="auto"``: once where a loss in pieces could gain nothing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import forebay
from forebay import asking, planning
from forebay.cli.main import app
from forebay.profiler import capture as capturing
from tests.parity.compare import adamw

WORDS, TOKENS = 4099, 64
"""1.0 MB of logits, which is not little of 16 MiB."""

LLAMA: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
"""1.1 MB of parameters: with gradients, states and activations some 8 MB."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a model was captured, and a plan made."""
    found = Counter[str]()

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **more: Any) -> Any:
            found[name] += 1
            return call(*args, **more)

        return counting

    for module, name in ((asking, "capture"), (capturing, "capture"), (asking, "make_plan"), (planning, "make_plan")):
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return found


def prepare(policy: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    ids = torch.randint(0, WORDS, (1, TOKENS))
    batch = {"input_ids": ids, "labels": ids}
    model, _ = forebay.prepare(
        model, adamw(list(model.parameters())), batch, device_memory="16MiB", device="cpu", policy=policy
    )
    forebay.close(model)


def plan(folder: Path, policy: str) -> None:
    config = folder / "config.json"
    config.write_text(json.dumps({"model_type": "llama", **LLAMA}))
    words = ["plan", str(config), "--seq", str(TOKENS), "--device-memory", "16MiB", "--policy", policy]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(("policy", "times"), [("auto", 1), ("stream", 2)])
def test_prepare(counts: Counter[str], policy: str, times: int) -> None:
    prepare(policy)
    assert counts == {"capture": times, "make_plan": times}


@pytest.mark.parametrize(("policy", "times"), [("resident", 1), ("stream", 2)])
def test_forebay_plan(counts: Counter[str], tmp_path: Path, policy: str, times: int) -> None:
    plan(tmp_path, policy)
    assert counts == {"capture": times, "make_plan": times}
