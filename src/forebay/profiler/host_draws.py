"""Numbers that a model draws from Python's or NumPy's own generator while its step is recorded.

Nothing in them says what they are drawn for, and none is a tensor: that a layer is left out by one (``if
random.random() < 0.1``) would show in nothing but the ops that are missing. So both generators, which are Mersenne
Twisters, begin with the highest numbers that there are, or the lowest, as single numbers of torch are drawn
(``guesses.Draw``). Matsumoto and Nishimura, "Mersenne Twister" (ACM TOMACS 1998): a state is 624 words of 32 bits, of
which each in its turn is tempered (section 2.1, equations 2.2 to 2.5) and given; behind the last one all are made
anew.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from forebay.profiler.guesses import Draw
from forebay.runtime.generators import HostNumbers, is_numpys_own

__all__ = ["STEERED", "steer"]

STEERED: Final = 128
"""So many numbers are as they are wanted, of two words each. Those behind are like any: who draws until some number
comes is not to wait for ever, as with a state that is nothing but zeros, which stays so."""

_STATE: Final = 624
_START: Final = _STATE - 2 * STEERED

_WORDS: Final[Mapping[Draw, int]] = MappingProxyType({Draw.HIGHEST: 0x12DD9BB3, Draw.LOWEST: 0})
"""What is all ones when it is tempered, and what is all zeros."""


def steer(draw: Draw) -> Callable[[], bool]:
    """Has both generators draw what ``draw`` says; whoever calls puts them back. Returns what says whether a number has
    been drawn from either since. What a program has put in the place of NumPy's is left alone."""
    version, words, _ = random.getstate()
    random.setstate((version, (*words[:_START], *[_WORDS[draw]] * (2 * STEERED), _START), None))
    if is_numpys_own():
        state: Any = np.random.get_state()
        kind, keys, *_ = state
        keys[_START:] = _WORDS[draw]
        np.random.set_state((kind, keys, _START, 0, 0.0))
    before = HostNumbers()
    return lambda: HostNumbers() != before
