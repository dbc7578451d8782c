"""What the command line needs of forebay's public interface: a seam, so that a test can stand in for the runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from forebay.checkpoint.resuming import Resumed
    from forebay.checkpoint.saving import Scheduler
    from forebay.loss import Loss
    from forebay.plans import Plan, UpdateTime
    from forebay.reporting.run import RunReport
    from forebay.runtime.losses import LossFunction

__all__ = ["Engine"]


class Engine(Protocol):
    """The functions of ``forebay.api`` that train a model: the module itself is an engine. See there for each."""

    def prepare(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: Mapping[str, Any],
        *,
        device_memory: int,
        host_memory: int | None,
        disk: str | None,
        policy: str,
        loss: Loss,
        compress: int,
        plan: Plan | None,
        device: str,
        micro_batches: int,
        accumulates: bool,
        update: UpdateTime,
        crash_safe: Path | None,
        checksums: bool,
        loss_fn: LossFunction,
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Puts model and optimizer under a plan."""

    def accumulate(
        self,
        model: nn.Module,
        micro_batches: Iterable[Any],
        loss_fn: LossFunction,
    ) -> list[torch.Tensor]:
        """Adds up the gradients of several micro-batches, each of which passes a block before the next is fetched."""

    def load(self, model: nn.Module, folder: str) -> None:
        """Streams the safetensors of ``folder`` into the tiers."""

    def initialize(self, model: nn.Module, seed: int) -> None:
        """Streams the model's own random weights into the tiers."""

    def synchronize(self, model: nn.Module) -> None:
        """Waits for every update and transfer."""

    def report(self, model: nn.Module) -> RunReport:
        """The account of the run so far."""

    def parameters(self, model: nn.Module) -> Mapping[str, torch.Tensor]:
        """Name to full-precision tensor, read as it is asked for."""

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        folder: Path,
        *,
        step: int,
        scheduler: Scheduler | None,
        extra: Any,
        background: bool,
    ) -> int:
        """Saves what training goes on from."""

    def resume(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path, *, scheduler: Scheduler | None
    ) -> Resumed:
        """Puts everything where ``save`` left it."""

    def close(self, model: nn.Module) -> None:
        """Ends the threads and frees the tiers."""
