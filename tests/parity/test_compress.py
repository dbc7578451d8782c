"""``compress``: a small Llama in less memory than it would take as it is, with activations as codes of fewer bits."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import forebay
from forebay.cli.main import app
from forebay.compression import CODE_BITS
from forebay.errors import ConfigError
from forebay.machine import Curve, Link
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.machine_cache import Remembered, cache_file
from forebay.profiler.probe import circumstances, nominal
from forebay.reporting.table import closing_table
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import Case

BITS = pytest.mark.parametrize("bits", CODE_BITS)
BUDGET = 3_700_000
"""Bytes of the device; everything as it is takes 5.4 million."""


def llama() -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=6,
            num_attention_heads=2,
            num_key_value_heads=2,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def tokens(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (2, 128), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


CASE = Case(llama, tokens)


@pytest.fixture(autouse=True)
def _slow_arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """As if this machine had been measured: arithmetic and links are slow and memory is fast, so that codes gain."""
    link = Link(Curve(((4096, 1e6),)))
    slow = replace(
        nominal("cpu"),
        compute={"float32": 1e8},
        device_bandwidth=1e11,
        h2d=link,
        d2h=link,
        launch_seconds=0.0,
        watch_seconds=0.0,
    )
    folder = tmp_path_factory.mktemp("measured")
    name, here = circumstances("cpu")
    Remembered(here, slow).save(cache_file(folder / "forebay", name))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield


@cache
def plain_losses(steps: int) -> list[torch.Tensor]:
    """Losses of plain PyTorch."""
    model = CASE.model(torch.float32)
    optimizer = adamw(list(model.parameters()))
    return [trained(model, optimizer, step) for step in range(steps)]


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(**CASE.inputs(step, torch.float32))["loss"]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def lossy(plan: Plan) -> set[int]:
    return {t.bits for s in plan.activations for t in s.treatments if t.lossy}


@pytest.mark.thinned(2)
@BITS
def test_trains_within_what_it_promised_and_says_what_changed(bits: int) -> None:
    """Forward is plain PyTorch's: the first loss is the same to the bit, and later ones are near."""
    steps = 4
    model = CASE.model(torch.float32)
    optimizer = adamw(list(model.parameters()))
    model, optimizer = forebay.prepare(
        model, optimizer, CASE.inputs(0, torch.float32), device_memory=BUDGET, device="cpu", compress=bits, loss="plain"
    )
    losses = [trained(model, optimizer, step) for step in range(steps)]
    report = forebay.report(model)
    forebay.close(model)
    expected = plain_losses(steps)
    assert torch.equal(losses[0], expected[0])
    assert not all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    assert all(abs(float(a / b) - 1) < 0.005 for a, b in zip(losses, expected, strict=True))
    assert lossy(report.plan) == {bits}
    (said,) = report.plan.changes_numbers
    assert f"kept as {bits} bits an element, stochastically rounded" in said
    assert any(f"keeping activations as {bits} bits saves" in reason for reason in report.plan.reasons)
    printed = Console(file=io.StringIO(), width=400, record=True)
    printed.print(closing_table(report))
    assert said in printed.export_text()
    device = report.timeline.usage(Tier.DEVICE)
    assert device.peak <= report.plan.device <= BUDGET


def test_without_leave_the_numbers_are_those_of_plain_pytorch() -> None:
    model = assert_same_training(CASE, torch.float32, steps=2, device="cpu", device_memory=BUDGET, loss="plain")
    plan = forebay.report(model).plan
    forebay.close(model)
    assert not lossy(plan) and not plan.changes_numbers


@pytest.mark.parametrize("bits", [1, 3, 16, -2])
def test_other_bits_are_refused_before_anything_happens(bits: int) -> None:
    model = CASE.model(torch.float32)
    optimizer = adamw(list(model.parameters()))
    with pytest.raises(ConfigError, match=rf"compress must be 0 \(nothing\), 8, 4 or 2 bits, got {bits}"):
        forebay.prepare(model, optimizer, device_memory=BUDGET, device="cpu", compress=bits)
    model, _ = forebay.prepare(model, optimizer, device_memory="64MiB", device="cpu")  # it is as it was
    forebay.close(model)


def test_other_bits_on_the_command_line_are_misuse(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("word " * 1000)
    for command in (
        ["plan", "tiny", "--device-memory", "8MiB", "--machine", "l4"],
        ["train", "--model", "tiny", "--data", str(text), "--device-memory", "8MiB", "--steps", "1"],
    ):
        for bits in ("3", "1", "many"):
            done = CliRunner().invoke(app, [*command, "--compress", bits])
            assert (done.exit_code, done.stdout) == (2, "")
            assert "--compress" in done.stderr and "Traceback" not in done.stderr
