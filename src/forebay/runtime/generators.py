"""The generators of random numbers that models and loops draw from without naming them: Python's, NumPy's and torch's
of the host."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, final

import numpy as np
import torch

__all__ = [
    "Generators",
    "HostNumbers",
    "as_drawn_before",
    "drawn_alike",
    "drawn_so_far",
    "is_numpys_own",
    "seed_host",
]


@final
class HostNumbers:
    """Where Python's and NumPy's generators are now: equal if no number was drawn between. To ask NumPy's takes 75
    microseconds."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostNumbers):
            return NotImplemented
        return self._python == other._python and _comparable(self._numpy) == _comparable(other._numpy)

    __hash__ = None  # type: ignore[assignment]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The body draws what was drawn behind this; afterwards both generators are where they were."""
        now = HostNumbers()
        try:
            self.put_back()
            yield
        finally:
            now.put_back()

    def put_back(self) -> None:
        """Makes them what they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def drawn_so_far() -> tuple[int, bytes]:
    """What is another one after a draw from either generator, in 16 microseconds: the place of Python's in its words,
    and NumPy's words and place where they lie. (The second of two normal numbers, which was made with the first one,
    changes neither.)"""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(generator, np.random.MT19937):
        numpy = ctypes.string_at(generator.ctypes.state_address, _MT19937)
    else:
        numpy = repr(generator.state).encode()
    return random.getstate()[1][-1], numpy


def is_numpys_own() -> bool:
    """Whether NumPy draws from a Mersenne Twister, and not from what a program has put in its place."""
    return isinstance(np.random.get_bit_generator(), np.random.MT19937)  # type: ignore[attr-defined]


def _comparable(state: Any) -> object:
    inner = state["state"]
    if "pos" in inner:
        return inner["key"].tobytes(), inner["pos"], state["has_gauss"], state["gauss"]
    return repr(state)


_MT19937: Final = 4 * (624 + 1)
"""Bytes of the state of NumPy's own generator: words, and the place in them."""


@final
class Generators:
    """Their states at the time of the last ``keep``."""

    def __init__(self) -> None:
        self.keep()

    def keep(self) -> None:
        """Keeps what they are now. Nothing is drawn."""
        self._torch = torch.get_rng_state()
        self._host = HostNumbers()

    def put_back(self) -> None:
        """Makes them what they were."""
        torch.set_rng_state(self._torch)
        self._host.put_back()


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
        seed_host(0)
        yield


def seed_host(seed: int) -> None:
    """Python and NumPy draw what follows from ``seed``."""
    random.seed(seed)
    if is_numpys_own():
        np.random.seed(seed % 2**32)
