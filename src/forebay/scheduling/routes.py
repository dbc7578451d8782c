"""Which lanes bring a chunk to where it is updated, update it, and take it home again. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forebay.timeline import Lane

__all__ = ["TO_DEVICE", "TO_STORAGE", "Route"]


@dataclass(frozen=True)
class Route:
    """The lanes of updates in cells, which are elsewhere than what they update. ``states``: whether the states of a
    chunk move with its gradients and parameters; else they lie where the update is. ``sparse``: whether gradients may
    go there by their largest elements alone (``Streaming.gradient_density``)."""

    bring: Lane
    update: Lane
    take: Lane
    states: bool
    sparse: bool


TO_DEVICE: Final = Route(Lane.H2D, Lane.DEVICE_UPDATE, Lane.D2H, states=True, sparse=False)
TO_STORAGE: Final = Route(Lane.DISK_WRITE, Lane.STORAGE_UPDATE, Lane.DISK_READ, states=False, sparse=True)
