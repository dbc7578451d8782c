"""The models whose activations are bounded: entries of the zoo with larger batches, so that activations are most of
what a plain step takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from benchmarks.case import BenchmarkError
from benchmarks.prediction.zoo import ZOO, Entry

if TYPE_CHECKING:
    import torch

__all__ = ["BATCHES", "NO_DROPOUT", "ZooModel", "chosen"]

NO_DROPOUT = "-no-dropout"
"""Ends the name of a model that is the entry of the zoo called what stands before it, with its dropout off."""

BATCHES: Mapping[str, int] = MappingProxyType(
    {"gpt2-14m": 8, f"gpt2-14m{NO_DROPOUT}": 8, "llama-16m": 8, "vit-14m": 12}
)
"""Sequences or images of one step, by the name of the model."""


@dataclass(frozen=True)
class ZooModel:
    """An entry of the zoo, built and fed like the models of ``benchmarks.models``. Sequences are as long as there."""

    name: str

    def build(self, seq: int, device: str) -> torch.nn.Module:
        """The model in train mode on ``device``; its parameters are always the same. ``seq`` is the zoo's."""
        model = self._entry().build().to(device)
        if self.name.endswith(NO_DROPOUT):
            for layer in _dropouts(model):
                layer.p = 0.0
        return model

    @property
    def draws(self) -> bool:
        """Whether a step draws random numbers: whether there is dropout."""
        return any(layer.p > 0 for layer in _dropouts(self.build(0, "cpu")))

    def build_compiled(self, seq: int, device: str, share: float) -> torch.nn.Module:
        """The same, its blocks compiled one by one with an activation memory budget of ``share``, as a rival is. The
        switches are of this process."""
        from torch._functorch import config as partitioner
        from torch._inductor import config as inductor

        from forebay.runtime.blocks import whole_blocks

        partitioner.activation_memory_budget = share
        inductor.fallback_random = True  # dropout draws from eager PyTorch's generator, as in the rivals
        model = self.build(seq, device)
        for block in whole_blocks(model).values():
            block.compile()
        return model

    def batch(self, batch: int, seq: int, device: str, seed: int) -> dict[str, torch.Tensor]:
        """``batch`` rows like those of the zoo, drawn from ``seed``; what is equal there is equal here."""
        import torch

        example, generator = self._entry().batch(), torch.Generator().manual_seed(seed)
        made: dict[str, torch.Tensor] = {}
        for name, tensor in example.items():
            twin = next((n for n in made if torch.equal(example[n], tensor)), None)
            made[name] = made[twin].clone() if twin else _drawn(tensor, batch, generator)
        return {name: tensor.to(device) for name, tensor in made.items()}

    def _entry(self) -> Entry:
        return next(entry for entry in ZOO if entry.name == self.name.removesuffix(NO_DROPOUT))


def chosen(names: list[str]) -> list[ZooModel]:
    """The models called ``names`` (all, if empty). Raises ``BenchmarkError`` for a name that is none."""
    if unknown := sorted(set(names) - set(BATCHES)):
        raise BenchmarkError(f"no model {', '.join(unknown)}; there are {', '.join(BATCHES)}")
    return [ZooModel(name) for name in BATCHES if not names or name in names]


def _dropouts(model: torch.nn.Module) -> Iterator[torch.nn.Dropout]:
    from torch import nn

    return (module for module in model.modules() if isinstance(module, nn.Dropout))


def _drawn(example: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Random values of the kind of ``example``: as many as ``rows``, integers within its range."""
    import torch

    shape = (rows, *example.shape[1:])
    if example.is_floating_point():
        return torch.randn(shape, generator=generator, dtype=example.dtype)
    return torch.randint(int(example.min()), int(example.max()) + 1, shape, generator=generator, dtype=example.dtype)
