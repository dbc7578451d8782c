"""Optimizer states and how they lie: fp32, bf16, codes of 8 or 4 bits with a scale for every block, a number for each
row and each column of a matrix, or of some parameters and not of others. No torch.

Masters, the fp32 copies of parameters of 16 bits, lie as they are or, beside parameters in bf16, as their lower halves
(``Masters``).

A state is known by its name. What follows a colon says how it lies; without one it is fp32, as ``torch.optim`` keeps
it. ``"exp_avg:8bit", "exp_avg_scale:scale"`` are a first moment in codes of 8 bits and the scales of its blocks. Names
in this form go into a ``Trace``, so that whoever sizes or moves states counts their bytes, and whoever runs a plan
knows that it was made for such states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from math import prod
from types import MappingProxyType
from typing import Literal, Protocol, get_args

from forebay.errors import ConfigError, ForebayError

__all__ = [
    "BLOCK",
    "DRAWN",
    "FACTORED",
    "MOMENTS",
    "MUON",
    "OF_FOREBAY",
    "TIES",
    "Extent",
    "Masters",
    "Moments",
    "Reach",
    "Shape",
    "Shaped",
    "StateForm",
    "element_nbytes",
    "form_of",
    "is_fp32",
    "is_wide",
    "masters_fault",
    "masters_for",
    "moment_states",
    "plain_name",
    "reach_of",
    "state_changes",
    "update_kind",
]

BLOCK = 256
"""Elements of a parameter, counted from its first one, that share a scale."""

Moments = Literal["float32", "bfloat16", "8bit", "4bit"]
"""How the moments of an optimizer are kept."""

MOMENTS: tuple[Moments, ...] = get_args(Moments)
"""All of them, the widest first."""


class Shaped(Protocol):
    """A parameter, for whoever asks which states it has."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions."""

    @property
    def orthogonal(self) -> bool:
        """Whether its updates are made orthogonal, as Muon does with the matrices that it is given."""


@dataclass(frozen=True)
class Shape:
    """``Shaped`` and nothing else."""

    shape: tuple[int, ...]
    orthogonal: bool = False


class Extent(StrEnum):
    """What of a parameter has values of a state."""

    BLOCKS = "blocks"
    """Every block of its elements."""
    ROWS = "rows"
    """Every row, along its last dimension; of what has two dimensions or more."""
    COLUMNS = "columns"
    """Every column, along its last dimension but one; of what has two dimensions or more."""
    VECTOR = "vector"
    """Every element of what has fewer."""
    ORTHOGONAL = "orthogonal"
    """Every element of a matrix whose updates are made orthogonal."""
    OTHER = "other"
    """Every element of any other parameter."""


_SOME = (Extent.ORTHOGONAL, Extent.OTHER)
"""Where some parameters have a state, of their shape, and the others have none."""


@dataclass(frozen=True)
class StateForm:
    """Values of ``dtype``, ``itemsize`` bytes each, for every part of a parameter that ``extent`` says: one, or
    ``entries`` for every ``BLOCK`` elements."""

    name: str
    dtype: str
    itemsize: int
    entries: int = 1
    extent: Extent = Extent.BLOCKS
    keepdim: bool = True
    """Of rows and columns: whether the dimension that they sum up is there, with a length of 1."""
    at_once: bool = False
    """Of rows, columns and vectors: whether an update makes all of a parameter's at once, as torch's ops do in whose
    order it is to be; else it goes over the parameter part by part."""

    def count(self, elements: int) -> int:
        """The values of ``elements`` elements from the first of a block on: a block that is not whole has as many as it
        has elements, if it would not have fewer. Only of blocks: others belong to whole parameters."""
        if self.is_of_wholes:
            raise ForebayError(f"a state as {self.name} has values of whole parameters, not of some elements")
        whole, rest = divmod(elements, BLOCK)
        return whole * self.entries + min(rest, self.entries)

    def nbytes(self, elements: int) -> int:
        """Bytes of ``elements`` elements from the first of a block on."""
        return self.count(elements) * self.itemsize

    def shape_for(self, parameter: Shaped) -> tuple[int, ...] | None:
        """The shape of the state of a whole ``parameter``; None of one that has none."""
        shape = parameter.shape
        matrix = len(shape) >= 2
        if self.extent is Extent.BLOCKS:
            return shape if self.is_elementwise else (self.count(prod(shape)),)
        if self.extent in _SOME:
            return shape if parameter.orthogonal is (self.extent is Extent.ORTHOGONAL) else None
        if self.extent is Extent.VECTOR:
            return None if matrix else shape
        if not matrix:
            return None
        kept = (1,) if self.keepdim else ()
        return (*shape[:-1], *kept) if self.extent is Extent.ROWS else (*shape[:-2], *kept, shape[-1])

    def count_for(self, parameter: Shaped) -> int:
        """The values of a whole ``parameter``."""
        own = self.shape_for(parameter)
        return 0 if own is None else prod(own)

    def nbytes_for(self, parameter: Shaped) -> int:
        """Bytes of a whole ``parameter``."""
        return self.count_for(parameter) * self.itemsize

    @property
    def is_of_wholes(self) -> bool:
        """Whether its values are those of whole parameters, and no update of a part of one has some of them."""
        return self.extent is not Extent.BLOCKS

    @property
    def is_coded(self) -> bool:
        """Whether it means something to nobody but who wrote it: codes, scales, and halves of other numbers."""
        return not self.is_of_wholes and not self.is_elementwise

    @property
    def is_elementwise(self) -> bool:
        """Whether every element has a value of its own, so that a state has the shape of its parameter."""
        if self.extent in _SOME:
            return True
        return not self.is_of_wholes and self.dtype != "uint8" and self.entries == BLOCK


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
        StateForm("rows", "float32", 4, extent=Extent.ROWS),
        StateForm("columns", "float32", 4, extent=Extent.COLUMNS),
        StateForm("rows-torch", "float32", 4, extent=Extent.ROWS, at_once=True),
        StateForm("columns-torch", "float32", 4, extent=Extent.COLUMNS, at_once=True),
        StateForm("vector-torch", "float32", 4, extent=Extent.VECTOR, at_once=True),
        StateForm("rows-flat", "float32", 4, extent=Extent.ROWS, keepdim=False, at_once=True),
        StateForm("columns-flat", "float32", 4, extent=Extent.COLUMNS, keepdim=False, at_once=True),
        StateForm("vector", "float32", 4, extent=Extent.VECTOR),
        StateForm("orthogonal", "float32", 4, extent=Extent.ORTHOGONAL, at_once=True),
        StateForm("other", "float32", 4, extent=Extent.OTHER, at_once=True),
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


@cache
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


def is_fp32(states: Iterable[str]) -> bool:
    """Whether all of ``states`` are fp32 numbers, one for each element or factored."""
    return all(form_of(state).dtype == "float32" for state in states)


class Reach(StrEnum):
    """What of a parameter an update looks at together. Whoever cuts updates into chunks, sizes their memory or says
    how long they take goes by it."""

    ELEMENTS = "elements"
    """Each by itself, in fp32."""
    PIECES = "pieces"
    """Some at a time: states of fewer bits become fp32 for an update, and are what they were behind it."""
    PARTS = "parts"
    """Some rows at a time, for sums of all: states are factored, and made by kernels of forebay's."""
    WHOLES = "wholes"
    """All, in the order of torch's ops: states are factored."""
    MATRICES = "matrices"
    """All of a matrix, of which products make an orthogonal one; of other parameters each element by itself."""

    @property
    def takes_wholes(self) -> bool:
        """Whether it has to have whole parameters, so that no chunk has a part of one."""
        return self not in (Reach.ELEMENTS, Reach.PIECES)


def reach_of(states: Iterable[str]) -> Reach:
    """What of a parameter an update looks at together, with an optimizer that keeps ``states``, masters left out."""
    forms = tuple(map(form_of, states))
    if any(form.extent is Extent.ORTHOGONAL for form in forms):
        return Reach.MATRICES
    if any(form.at_once for form in forms):
        return Reach.WHOLES
    if any(form.is_of_wholes for form in forms):
        return Reach.PARTS
    return Reach.ELEMENTS if all(form.name == "float32" for form in forms) else Reach.PIECES


def element_nbytes(states: Iterable[str]) -> float:
    """Bytes of ``states`` for each element of a parameter, of the parameters that have most. Of factored ones there are
    too few to count."""
    forms = tuple(map(form_of, states))
    some = max(sum(form.itemsize for form in forms if form.extent is extent) for extent in _SOME)
    return some + sum(form.nbytes(BLOCK) / BLOCK for form in forms if not form.is_of_wholes)


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


FACTORED = ("row_var:rows", "col_var:columns", "variance:vector")
"""The states of forebay's Adafactor."""

MUON = ("momentum_buffer:orthogonal", "exp_avg:other", "exp_avg_sq:other")
"""The states of Muon: one of the matrices whose updates it makes orthogonal, AdamW's of everything else."""

DRAWN = "-sr"
"""How the name of an optimizer ends that rounds parameters in bf16 by chance and keeps no masters of them (stochastic
rounding)."""

OF_FOREBAY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "adamw": ("exp_avg", "exp_avg_sq"),
        "adamw-bf16": moment_states(("exp_avg", "exp_avg_sq"), "bfloat16"),
        "adamw-8bit": moment_states(("exp_avg", "exp_avg_sq"), "8bit"),
        "adamw-4bit": moment_states(("exp_avg", "exp_avg_sq"), "4bit"),
        "lion": ("exp_avg",),
        "adafactor": FACTORED,
    }
)
"""The states of forebay's own optimizers by name that may do without masters: each has one with ``DRAWN`` behind it,
too."""
