"""The models whose steps are recorded: recipes, and kinds of nets that no recipe is of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.trace import Trace

__all__ = ["MODELS", "Shape"]


@dataclass(frozen=True)
class Shape:
    """What is recorded: ``batch`` sequences of ``seq`` tokens, or images (0)."""

    batch: int
    seq: int
    traced: Callable[[str, int, int], Trace]

    def __str__(self) -> str:
        return f"{self.batch} x {self.seq}" if self.seq else f"{self.batch} images"


def _recipe(name: str, batch: int, seq: int) -> Trace:
    from forebay.profiler.capture import capture
    from forebay.recipes.tasks import sample

    found = sample(name, batch=batch, seq=seq or 1, dtype="bfloat16")
    return capture(found.model, found.batch, "adamw", "cuda").trace


def _resnet(name: str, batch: int, seq: int) -> Trace:
    from benchmarks.papers.nets import ResNet

    return ResNet((3, 4, 6, 3)).captured(batch)


def _bert(name: str, batch: int, seq: int) -> Trace:
    import torch
    from transformers import BertConfig, BertForMaskedLM

    config: Any = BertConfig()
    with torch.device("meta"):
        model: Any = BertForMaskedLM(config)
    tokens = torch.zeros((batch, seq), dtype=torch.int64, device="meta")
    return _captured(model.bfloat16(), {"input_ids": tokens, "labels": tokens})


def _unet(name: str, batch: int, seq: int) -> Trace:
    """Four halvings of the image, and what each made joined again on the way back."""
    import torch

    from benchmarks.traces.unet import unet

    with torch.device("meta"):
        model = unet()
    image = torch.zeros((batch, 3, 256, 256), device="meta")
    return _captured(model, {"image": image, "mask": torch.zeros((batch, 256, 256), dtype=torch.int64, device="meta")})


def _captured(model: Any, batch: Mapping[str, Any]) -> Trace:
    from forebay.profiler.capture import capture

    return capture(model.train(), batch, "adamw", "cuda").trace


MODELS: Mapping[str, Shape] = MappingProxyType(
    {
        "gpt2": Shape(4, 1024, _recipe),
        "gpt2-xl": Shape(2, 1024, _recipe),
        "llama-3.2-1b": Shape(2, 2048, _recipe),
        "llama-3.2-3b": Shape(1, 2048, _recipe),
        "qwen2.5-0.5b": Shape(4, 1024, _recipe),
        "gemma-2-2b": Shape(1, 2048, _recipe),
        "pythia-1.4b": Shape(2, 1024, _recipe),
        "phi-3-mini": Shape(1, 2048, _recipe),
        "t5-base": Shape(8, 512, _recipe),
        "flan-t5-large": Shape(4, 512, _recipe),
        "olmoe-1b-7b": Shape(1, 1024, _recipe),
        "vit-base": Shape(16, 0, _recipe),
        "bert-base": Shape(16, 512, _bert),
        "resnet-50": Shape(32, 0, _resnet),
        "u-net": Shape(8, 0, _unet),
    }
)
