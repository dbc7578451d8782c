"""The average of a prepared model's weights, as its page has it, is that of ``AveragedModel`` in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forebay
from tests.parity.page_programs import programs


def plain(decay: float) -> tuple[nn.Module, float]:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loader = torch.randn(10, 32, 256)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay), use_buffers=False
    )
    average.n_averaged += 1  # it begins with the weights before the first step, as the page does
    for batch in loader:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    return average.module, loss.item()


def test_the_program_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = programs("averages.md", "test_averages.py")
    torch.manual_seed(0)
    found: dict[str, dict[str, torch.Tensor]] = {"__name__": {}}
    exec(program, found)
    torch.manual_seed(0)
    expected, loss = plain(0.99)
    assert capsys.readouterr().out == f"loss {loss:.3f}\n"
    assert all(torch.equal(found["average"][name], p) for name, p in expected.named_parameters())


def test_a_copy_is_refused_and_the_error_says_what_to_read() -> None:
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    model, _ = forebay.prepare(model, optimizer, torch.randn(2, 16), device_memory="1MiB", device="cpu")
    with pytest.raises(forebay.errors.UsageError, match=r"average of its weights.*forebay\.parameters"):
        torch.optim.swa_utils.AveragedModel(model)
    forebay.close(model)
