"""Blocks of single modules: a model trains on a device that its largest layer does not fit into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import forebay
from forebay.errors import DoesNotFit
from forebay.memory import Tier
from forebay.units import parse_bytes
from tests.parity.compare import adamw

WIDTH, INNER = 128, 352
LAYER = 4 * (4 * WIDTH**2 + 3 * WIDTH * INNER + 2 * WIDTH)
"""Bytes of a layer: seven matrices, two norms."""


def llama() -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=3, **shape))


def test_what_a_refusal_names_trains() -> None:
    ids = torch.arange(8).reshape(1, 8)
    batch = {"input_ids": ids, "labels": ids}
    allowed: dict[str, Any] = {"device_memory": "740KiB", "policy": "stream", "device": "cpu"}
    assert parse_bytes(allowed["device_memory"]) < LAYER
    model, reference = llama(), llama()
    with pytest.raises(DoesNotFit, match=r"blocks of single modules, named in blocks= .*mlp.* takes 176\.0 KiB"):
        forebay.prepare(model, adamw(list(model.parameters())), batch, **allowed)
    names = [n for n, module in model.named_modules() if isinstance(module, nn.Linear) and "layers" in n]
    model, optimizer = forebay.prepare(model, adamw(list(model.parameters())), batch, blocks=names, **allowed)
    model(**batch).loss.backward()
    reference(**batch).loss.backward()
    gradients = forebay.gradients(model)
    assert all(torch.equal(gradients[n], p.grad) for n, p in reference.named_parameters() if p.grad is not None)
    optimizer.step()
    report = forebay.report(model)
    device = report.timeline.peaks[Tier.DEVICE]
    forebay.close(model)
    assert device <= report.plan.device < LAYER
