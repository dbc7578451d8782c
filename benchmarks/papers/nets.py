"""Models of the kinds that papers on activations train: residual networks, and layers of a GPT with attention written
out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.papers.shapes import traced

if TYPE_CHECKING:
    from forebay.trace import Trace

__all__ = ["IMAGE", "MEGATRON_SEQ", "Megatron", "ResNet"]

IMAGE = 224
"""Pixels a side."""

CLASSES = 1000

MEGATRON_SEQ = 2048
"""Tokens in a sequence."""

MEGATRON_VOCABULARY = 1024
DROPOUT = 0.1


@dataclass(frozen=True)
class ResNet:
    """A residual network of transformers with bottlenecks in 32 bits, trained by SGD without momentum; ``depths`` are
    the bottlenecks of its four stages, each of which is a block."""

    depths: tuple[int, int, int, int]

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        return sum(parameter.numel() for parameter in self._built().parameters())

    def flops(self, batch: int) -> float:
        """Of the products of a step of ``batch`` images, forward and backward."""
        trace = traced(self, batch)
        return float(sum(trace.works[op.work].flops for _, _, op in trace.ops()))

    def captured(self, batch: int) -> Trace:
        """A step of ``batch`` images of ``IMAGE`` x ``IMAGE``. Nothing is computed, and no weight has memory."""
        import torch

        import forebay

        pixels = torch.zeros((batch, 3, IMAGE, IMAGE), device="meta")
        labels = torch.zeros((batch,), dtype=torch.int64, device="meta")
        stages = enumerate(self.depths)
        blocks = [f"resnet.encoder.stages.{stage}.layers.{i}" for stage, depth in stages for i in range(depth)]
        inputs = {"pixel_values": pixels, "labels": labels}
        return forebay.profile(self._built().train(), inputs, "sgd", device="cuda", blocks=blocks)

    def _built(self) -> Any:
        import torch
        from transformers import ResNetConfig, ResNetForImageClassification

        config: Any = ResNetConfig(depths=list(self.depths), num_labels=CLASSES)
        with torch.device("meta"):
            return ResNetForImageClassification(config)

    def __str__(self) -> str:
        # As the papers count: three convolutions in each bottleneck, one before and the classifier behind them.
        return f"ResNet-{3 * sum(self.depths) + 2}"


@dataclass(frozen=True)
class Megatron:
    """``layers`` of a GPT in 16 bits: ``hidden`` elements in ``heads`` heads, dropout everywhere, attention written out
    as products and a softmax, ``MEGATRON_SEQ`` tokens. The vocabulary is small: what is asked about is the layers."""

    layers: int
    hidden: int
    heads: int

    @property
    def parameters(self) -> int:
        """Elements of all parameters (``shapes.Gpt``)."""
        h = self.hidden
        return self.layers * (12 * h * h + 13 * h) + (MEGATRON_VOCABULARY + MEGATRON_SEQ) * h + 2 * h

    def flops(self, batch: int) -> float:
        """Of a step of ``batch`` sequences, 6 a parameter and token."""
        return 6.0 * self.parameters * batch * MEGATRON_SEQ

    def captured(self, batch: int) -> Trace:
        """A step of ``batch`` sequences. Nothing is computed, and no weight has memory."""
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel

        import forebay

        sizes = {"n_embd": self.hidden, "n_layer": self.layers, "n_head": self.heads, "n_positions": MEGATRON_SEQ}
        drops = {"resid_pdrop": DROPOUT, "embd_pdrop": DROPOUT, "attn_pdrop": DROPOUT}
        config: Any = GPT2Config(vocab_size=MEGATRON_VOCABULARY, attn_implementation="eager", **sizes, **drops)
        with torch.device("meta"):
            model: Any = GPT2LMHeadModel(config)
        tokens = torch.zeros((batch, MEGATRON_SEQ), dtype=torch.int64, device="meta")
        return forebay.profile(model.half().train(), {"input_ids": tokens, "labels": tokens}, device="cuda")

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.hidden} in {self.heads} heads"
