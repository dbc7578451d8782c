"""The salt of what kernels round by chance (``chance_numbers``)."""

from __future__ import annotations

from typing import Any

from forebay.kernels.chance_numbers import OTHER, SPREAD
from forebay.kernels.jit import part

__all__ = ["parameter_salt"]


@part
def parameter_salt(seed: Any, place: Any) -> Any:
    """The salt of a row of parameters whose first element has this ``place``, in the step ``seed``."""
    return (seed * SPREAD ^ OTHER) + place
