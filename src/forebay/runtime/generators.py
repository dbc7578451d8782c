"""The generators of random numbers that models and loops draw from without naming them: Python's, NumPy's and torch's
of the host."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import numpy as np
import torch

__all__ = ["Generators", "as_drawn_before", "drawn_alike"]


@final
class Generators:
    """Their states at the time of the last ``keep``."""

    def __init__(self) -> None:
        self.keep()

    def keep(self) -> None:
        """Keeps what they are now. Nothing is drawn."""
        self._torch = torch.get_rng_state()
        self._numpy: Any = np.random.get_state()
        self._python = random.getstate()

    def put_back(self) -> None:
        """Makes them what they were."""
        torch.set_rng_state(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


@contextmanager
def as_drawn_before() -> Iterator[None]:
    """Whatever the body draws, training draws again."""
    before = Generators()
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def drawn_alike() -> Iterator[None]:
    """``as_drawn_before``, and what the body draws is the same every time."""
    with as_drawn_before():
        torch.default_generator.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        yield
