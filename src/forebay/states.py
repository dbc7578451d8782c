"""Optimizer states and how they lie: fp32, bf16, or codes of 8 or 4 bits with a scale for every block. No torch.

Masters, the fp32 copies of parameters of 16 bits, lie as they are or, beside parameters in bf16, as their lower halves
(``Masters``).

A state is known by its name. What follows a colon says how it lies; without one it is fp32, as ``torch.optim`` keeps
it. ``"exp_avg:8bit", "exp_avg_scale:scale"`` are a first moment in codes of 8 bits and the scales of its blocks. Names
in this form go into a ``Trace``, so that whoever sizes or moves states counts their bytes, and whoever runs a plan
knows that it was made for such states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, get_args

from forebay.errors import ConfigError

__all__ = [
    "BLOCK",
    "MOMENTS",
    "TIES",
    "Masters",
    "Moments",
    "StateForm",
    "form_of",
    "is_wide",
    "masters_fault",
    "masters_for",
    "moment_states",
    "plain_name",
    "state_changes",
    "update_kind",
]

BLOCK = 256
"""Elements of a parameter, counted from its first one, that share a scale."""

Moments = Literal["float32", "bfloat16", "8bit", "4bit"]
"""How the moments of an optimizer are kept."""

MOMENTS: tuple[Moments, ...] = get_args(Moments)
"""All of them, the widest first."""


@dataclass(frozen=True)
class StateForm:
    """Every ``BLOCK`` elements of a parameter have ``entries`` values of ``dtype``, ``itemsize`` bytes each."""

    name: str
    dtype: str
    itemsize: int
    entries: int

    def count(self, elements: int) -> int:
        """The values of ``elements`` elements from the first of a block on: a block that is not whole has as many as it
        has elements, if it would not have fewer."""
        whole, rest = divmod(elements, BLOCK)
        return whole * self.entries + min(rest, self.entries)

    def nbytes(self, elements: int) -> int:
        """Bytes of ``elements`` elements from the first of a block on."""
        return self.count(elements) * self.itemsize

    @property
    def is_elementwise(self) -> bool:
        """Whether every element has a value of its own, so that a state has the shape of its parameter."""
        return self.dtype != "uint8" and self.entries == BLOCK


_FORMS = {
    form.name: form
    for form in (
        StateForm("float32", "float32", 4, BLOCK),
        StateForm("bfloat16", "bfloat16", 2, BLOCK),
        StateForm("8bit", "uint8", 1, BLOCK),
        # Two elements a byte: element i of a block and element BLOCK // 2 + i.
        StateForm("4bit", "uint8", 1, BLOCK // 2),
        StateForm("scale", "float32", 4, 1),
        # The lower 16 bits of an fp32 number.
        StateForm("lower", "int16", 2, BLOCK),
    )
}

TIES = "exp_avg_sq"
"""The state whose sign, which it has no use for, says what rounding a master to bf16 leaves unsaid (``Masters``)."""


class Masters(StrEnum):
    """How the fp32 masters of parameters in 16 bits are kept.

    A parameter in bf16 is the upper half of its master, rounded to nearest. So the lower half is all there is to keep
    beside it: 2 bytes an element where the master has 4, and no bit is lost (Kalamkar et al., "Optimizing deep learning
    recommender systems training on CPU cluster architectures", SC 2020, section V.C, keep the halves of a master whose
    upper one is cut and not rounded). Taken as a signed number it is what was added or taken off by rounding, for all
    but one: a master half-way between two, which goes to the even one, from above or from below. From above is what the
    number says; that it was from below is a minus sign of ``TIES``.
    """

    WHOLE = "whole"
    LOWER = "lower"


def form_of(state: str) -> StateForm:
    """How ``state`` lies. Raises ``ConfigError`` for a form that there is not."""
    _, _, form = state.partition(":")
    found = _FORMS.get(form or "float32")
    if found is None:
        raise ConfigError(f"state {state!r}: there is no form {form!r}; forms are {', '.join(_FORMS)}")
    return found


def plain_name(state: str) -> str:
    """The name without its form: the key in a ``state_dict``."""
    return state.partition(":")[0]


def is_wide(states: Iterable[str]) -> bool:
    """Whether all of ``states`` are fp32."""
    return all(form_of(state).name == "float32" for state in states)


def masters_for(states: Iterable[str], trained: Iterable[str]) -> Masters:
    """How masters may be kept by an optimizer with ``states`` of parameters that are ``trained`` in these dtypes."""
    states = tuple(states)
    halves = set(trained) - {"float32", "float64"} == {"bfloat16"}
    return Masters.LOWER if halves and TIES in states and is_wide(states) else Masters.WHOLE


def masters_fault(masters: Masters, states: Iterable[str], trained: Iterable[str]) -> str:
    """What is wrong with ``masters`` that are kept so by an optimizer with ``states`` of parameters that are
    ``trained`` in these dtypes, in words; nothing is ``""``."""
    states, trained = tuple(states), sorted(set(trained))
    if masters is Masters.WHOLE or masters_for(states, trained) is masters:
        return ""
    return (
        f"the plan keeps the lower halves of masters, which goes with parameters in bfloat16 and an optimizer that "
        f"keeps {TIES} in fp32; the model trains {', '.join(trained) or 'nothing'} and the states are "
        f"{', '.join(states) or 'none'}"
    )


def moment_states(names: Iterable[str], moments: Moments) -> tuple[str, ...]:
    """The states of moments called ``names``. Raises ``ConfigError`` for a form that moments do not have."""
    if moments not in MOMENTS:
        raise ConfigError(f"moments are kept as {', '.join(MOMENTS)}, not {moments!r}")
    if moments == "float32":
        return tuple(names)
    if moments == "bfloat16":
        return tuple(f"{name}:bfloat16" for name in names)
    return tuple(state for name in names for state in (f"{name}:{moments}", f"{name}_scale:scale"))


def update_kind(states: Iterable[str]) -> str:
    """What an update of ``states`` is called where a machine keeps its rate: their names and their form, without scales
    (``"exp_avg+exp_avg_sq:8bit"``). ``""`` for an optimizer that keeps none."""
    moments = [state for state in states if form_of(state).name != "scale"]
    forms = dict.fromkeys(form_of(state).name for state in moments)
    return f"{'+'.join(map(plain_name, moments))}:{'+'.join(forms)}" if moments else ""


_WORDS = {
    "bfloat16": "kept in bf16, rounded up or down by chance",
    "8bit": f"kept in 8 bits (block-wise dynamic code, a scale for {BLOCK} elements)",
    "4bit": f"kept in 4 bits (block-wise code, a scale for {BLOCK} elements)",
}


def state_changes(states: Iterable[str]) -> tuple[str, ...]:
    """What the forms of ``states`` do to the numbers, in words (``Plan.changes_numbers``)."""
    forms = dict.fromkeys(form_of(state).name for state in states)
    return tuple(f"moments of the optimizer are {_WORDS[form]}" for form in forms if form in _WORDS)
