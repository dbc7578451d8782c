"""The generators of random numbers that models and loops draw from on the host: Python's, NumPy's and torch's, which
nobody names, and those of these kinds that modules hold, their ``own`` (``inside.py``)."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch

from forebay.device.ledger import plain_tensors

__all__ = [
    "Generators",
    "HostNumbers",
    "LeftBehind",
    "OwnGenerator",
    "as_drawn_before",
    "drawn_from",
    "drawn_so_far",
    "is_numpys_own",
    "place_of",
    "seed_all",
]


OwnGenerator = random.Random | np.random.Generator | np.random.RandomState | torch.Generator
"""What a program makes for itself, of Python's, NumPy's and torch's kinds."""


@final
class HostNumbers:
    """Where Python's and NumPy's generators are now, and the ``own`` ones: equal if no number was drawn between. To ask
    NumPy's takes 75 microseconds."""

    def __init__(self, own: Iterable[OwnGenerator] = ()) -> None:
        self._own = tuple(own)
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state(legacy=False)
        self._others = [_state(generator) for generator in self._own]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HostNumbers):
            return NotImplemented
        return self._comparable() == other._comparable()

    __hash__ = None  # type: ignore[assignment]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The body draws what was drawn behind this; afterwards all of them are where they were."""
        now = HostNumbers(self._own)
        try:
            self.put_back()
            yield
        finally:
            now.put_back()

    def put_back(self) -> None:
        """Makes them what they were."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        for generator, state in zip(self._own, self._others, strict=True):
            _put(generator, state)

    def _comparable(self) -> object:
        return self._python, _comparable(self._numpy), [_comparable(state) for state in self._others]


def drawn_so_far(own: Iterable[OwnGenerator] = ()) -> tuple[object, ...]:
    """What is another one after a draw from either generator, in 16 microseconds, or from one of its ``own``: the place
    of Python's in its words, and NumPy's words and place where they lie. (The second of two normal numbers, which was
    made with the first one, changes neither.)"""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(generator, np.random.MT19937):
        numpy = ctypes.string_at(generator.ctypes.state_address, _MT19937)
    else:
        numpy = repr(generator.state).encode()
    return random.getstate()[1][-1], numpy, *(_comparable(_state(one)) for one in own)


def is_numpys_own() -> bool:
    """Whether NumPy draws from a Mersenne Twister, and not from what a program has put in its place."""
    return isinstance(np.random.get_bit_generator(), np.random.MT19937)  # type: ignore[attr-defined]


def _state(generator: OwnGenerator) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(legacy=False)


def _put(generator: OwnGenerator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, torch.Generator):
        generator.set_state(torch.from_numpy(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _comparable(state: Any) -> object:
    """A state of NumPy's is a mapping with arrays in it, which are not equal or unequal."""
    if isinstance(state, Mapping):
        return [(name, _comparable(value)) for name, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


_MT19937: Final = 4 * (624 + 1)
"""Bytes of the state of NumPy's own generator: words, and the place in them."""


@final
@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The generator that an op has drawn from, as it has left it: the one that it was given, its ``own``, or the
    default one of a device."""

    device: torch.device
    state: torch.Tensor

    @classmethod
    def by(cls, result: Any, own: torch.Generator | None) -> LeftBehind | None:
        """What an op has left that returned ``result``."""
        if own is not None:
            return cls(own.device, own.get_state())
        device = next((t.device for t in plain_tensors(result)), None)
        if device is None:
            return None
        if device.type == "cpu":
            return cls(device, torch.get_rng_state())
        return cls(device, torch.get_device_module(device).get_rng_state(device))

    def put_back(self, own: torch.Generator | None) -> None:
        """Has the op's generator be so again; ``own``: the one that it is given now."""
        if own is not None:
            own.set_state(self.state)
        elif self.device.type == "cpu":
            torch.set_rng_state(self.state)
        else:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)


def place_of(generator: torch.Generator) -> int:
    """Another number after a draw."""
    return hash(generator.get_state().numpy().tobytes())


@final
class Generators:
    """Their states at the time of the last ``keep``."""

    def __init__(self, own: Iterable[OwnGenerator] = ()) -> None:
        self._own = tuple(own)
        self.keep()

    def keep(self) -> None:
        """Keeps what they are now. Nothing is drawn."""
        self._torch = torch.get_rng_state()
        self._host = HostNumbers(self._own)

    def put_back(self) -> None:
        """Makes them what they were."""
        torch.set_rng_state(self._torch)
        self._host.put_back()


@contextmanager
def as_drawn_before(own: Iterable[OwnGenerator] = ()) -> Iterator[None]:
    """Whatever the body draws, training draws again."""
    before = Generators(own)
    try:
        yield
    finally:
        before.put_back()


@contextmanager
def drawn_from(seed: int, own: Iterable[OwnGenerator] = ()) -> Iterator[None]:
    """``as_drawn_before``, and what the body draws on the host follows from ``seed``, but for the ``own``."""
    with as_drawn_before(own):
        torch.default_generator.manual_seed(seed)  # and no accelerator's, whose numbers stay the program's
        _seed_host(seed)
        yield


def seed_all(seed: int) -> None:
    """What is drawn from here on, on an accelerator too, follows from ``seed``."""
    torch.manual_seed(seed)
    _seed_host(seed)


def _seed_host(seed: int) -> None:
    random.seed(seed)
    if is_numpys_own():
        np.random.seed(seed % 2**32)
