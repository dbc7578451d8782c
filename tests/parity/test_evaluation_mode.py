"""A model in evaluation mode, as ``from_pretrained`` leaves it, before ``model.train()`` and without it: planned as it
is in training mode, within the budget in either, and left in the mode in which it was."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import forebay
from forebay.errors import DeviceOutOfMemory, DoesNotFit
from forebay.memory import Tier
from tests.parity.compare import stepped
from tests.parity.models import convnet, images

TOKENS = 64
WORDS = 1500


def llama() -> nn.Module:
    """Its logits are most of what it needs."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": WORDS}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, use_cache=False))


def gpt2() -> nn.Module:
    """With dropout, whose masks it keeps."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=WORDS, n_positions=TOKENS))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The one whose bits forebay's kernels have."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@cache
def least(make: Callable[[], nn.Module], *, training: bool) -> int:
    """The least budget of the model."""
    model = make().train(training)
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(model, adamw(model), batch(), device_memory=4096, device="cpu", loss="chunked")
    assert refused.value.needed is not None
    # The loop keeps the loss of the step before.
    return refused.value.needed + 4


def prepared(model: nn.Module, budget: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    return forebay.prepare(model, adamw(model), batch(), device_memory=budget, device="cpu")


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 3) -> list[float]:
    torch.manual_seed(1)
    return stepped(optimizer, (model(**batch())["loss"] for _ in range(count)))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("training", [False, True])
def test_what_came_in_evaluation_mode_trains_in_either(make: Callable[[], nn.Module], *, training: bool) -> None:
    plain = make().train(training)
    expected = steps(plain, adamw(plain))
    model, optimizer = prepared(make().eval(), least(make, training=False))
    assert not any(module.training for module in model.modules())
    model.train(training)
    assert steps(model, optimizer) == expected
    report = forebay.report(model)
    assert report.plan.loss_piece > 0
    assert report.timeline.peaks[Tier.DEVICE] <= least(make, training=False)
    values = model.state_dict()
    assert all(torch.equal(values[name], value) for name, value in plain.state_dict().items())
    forebay.close(model)


class Around(nn.Module):
    """In training mode, around a model that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = gpt2().eval()

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.inner(**batch)


def test_a_model_around_one_that_came_in_evaluation_mode() -> None:
    plain = Around().train()
    expected = steps(plain, adamw(plain))
    budget = least(Around, training=True)
    model, optimizer = prepared(Around(), budget)
    assert model.training and not any(module.training for module in model.inner.modules())
    model.train()
    assert steps(model, optimizer) == expected
    assert forebay.report(model).timeline.peaks[Tier.DEVICE] <= budget
    forebay.close(model)


def test_evaluation_reads_logits() -> None:
    """Without gradients always, and with them once the loop has said that it knows of modes."""
    model = llama().eval()
    forebay.prepare(model, adamw(model), batch(), device_memory="64MiB", device="cpu", loss="chunked")
    assert forebay.report(model).plan.loss_piece > 0
    assert model(**batch()).logits.shape[1] == 0
    with torch.no_grad():
        assert model(**batch()).logits.shape == (2, TOKENS, WORDS)
    model.train()
    assert model(**batch()).logits.shape[1] == 0
    model.eval()
    assert model(**batch()).logits.shape == (2, TOKENS, WORDS)
    forebay.close(model)


def test_modes_are_as_they_were() -> None:
    """Where the model is in training mode, parts of it need not be."""
    for training in (False, True):
        model = convnet().train(training)
        norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm2d))
        norm.eval()
        before = [module.training for module in model.modules()]
        forebay.profile(model, images(0))
        assert [module.training for module in model.modules()] == before


def test_a_plan_that_evaluation_mode_has_no_room_in_says_so() -> None:
    model, optimizer = prepared(llama().train(), least(llama, training=True))
    steps(model, optimizer)
    model.eval()
    with pytest.raises(DeviceOutOfMemory, match=r"made for training mode.*call model\.train\(\) before forward"):
        steps(model, optimizer)
    model.train()
    steps(model, optimizer)
    forebay.close(model)
