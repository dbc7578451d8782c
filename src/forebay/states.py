"""Optimizer states and how they lie: fp32, bf16, or codes of 8 or 4 bits with a scale for every block. No torch.

A state is known by its name. What follows a colon says how it lies; without one it is fp32, as ``torch.optim`` keeps
it. ``"exp_avg:8bit", "exp_avg_scale:scale"`` are a first moment in codes of 8 bits and the scales of its blocks. Names
in this form go into a ``Trace``, so that whoever sizes or moves states counts their bytes, and whoever runs a plan
knows that it was made for such states.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from forebay.errors import ConfigError

__all__ = [
    "BLOCK",
    "MOMENTS",
    "Moments",
    "StateForm",
    "form_of",
    "is_wide",
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
    )
}


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
