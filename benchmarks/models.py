"""Models to train, built from explicit configurations and fixed seeds: no weights, no network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["LLAMA_1B", "LLAMA_16M", "LLAMA_270M", "LlamaShape"]

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class LlamaShape:
    """A Llama of transformers: grouped-query attention, gated MLP, untied head. Sizes in elements."""

    name: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPE_BYTES)}, got {self.dtype!r}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise ValueError(f"{self.name}: hidden must be a multiple of heads, and heads of kv_heads")

    @property
    def matrix_parameters(self) -> int:
        """Elements of the matrices that every token is multiplied with: layers and head, not the embedding."""
        kv = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Elements of all parameters."""
        norms = (2 * self.layers + 1) * self.hidden
        return self.matrix_parameters + self.vocab * self.hidden + norms

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all parameters in the model's dtype."""
        return self.parameters * _DTYPE_BYTES[self.dtype]

    def flops(self, batch: int, seq: int) -> float:
        """Floating-point operations of the matrix products of one step, attention counted causally."""
        forward = 2.0 * self.matrix_parameters + 2.0 * self.layers * seq * self.hidden
        return 3.0 * forward * batch * seq

    def build(self, seq: int, device: str, seed: int = 0) -> torch.nn.Module:
        """The model on ``device`` (``meta`` too), its parameters drawn from ``seed``; positions up to ``seq``."""
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        config: Any = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=seq,
            tie_word_embeddings=False,
            use_cache=False,
        )
        torch.manual_seed(seed)
        with torch.device(device):
            model: torch.nn.Module = LlamaForCausalLM(config)
        return model.to(dtype=getattr(torch, self.dtype)).train()

    def batch(self, batch: int, seq: int, device: str, seed: int) -> dict[str, torch.Tensor]:
        """Random tokens, shape (batch, seq), which are their own labels."""
        import torch

        tokens = torch.randint(0, self.vocab, (batch, seq), generator=torch.Generator().manual_seed(seed))
        tokens = tokens.to(device)
        return {"input_ids": tokens, "labels": tokens}


LLAMA_16M = LlamaShape(name="llama-16m", vocab=4096, hidden=384, intermediate=1024, layers=8, heads=6, kv_heads=2)
LLAMA_270M = LlamaShape(
    name="llama-270m",
    vocab=16384,
    hidden=1024,
    intermediate=2816,
    layers=20,
    heads=8,
    kv_heads=4,
    dtype="bfloat16",
)
LLAMA_1B = LlamaShape(
    name="llama-1b",
    vocab=32000,
    hidden=2048,
    intermediate=5632,
    layers=22,
    heads=32,
    kv_heads=4,
    dtype="bfloat16",
)
