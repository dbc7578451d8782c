"""What torch's ops take beside what they update: fp32 numbers of what has fewer bits, and of factored states an update
of a whole parameter, or of a part of one. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from forebay.layout import LOWER, MASTER, STATE_ITEMSIZE, align, in_order, is_drawn, needs_master, states_nbytes
from forebay.memory import ALIGNMENT
from forebay.model import Parameter
from forebay.states import Masters, Reach, form_of, reach_of

__all__ = ["LION", "PART", "PIECE", "part_elements", "widened_copies", "workspace_nbytes"]

PIECE = 1 << 20
"""Elements, whole blocks of states, that are decoded, encoded or rounded by chance at a time. On a GPU each of the ops
of that (some sixteen for a draw) costs its launch, which for fewer elements takes longer than to go over them."""

FUSED = frozenset(
    {
        (),
        ("momentum_buffer",),
        ("exp_avg", "exp_avg_sq"),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    }
)
"""The states, in fp32, of optimizers that torch has fused ops for."""

LION = ("exp_avg",)
"""The states of an optimizer that torch has no fused op for, and forebay has a kernel. Its ops make two numbers for
each element of a piece in between."""

UNFUSED = 3
"""Numbers for each element of a piece that torch's ops make in between of others that are not fused, at most."""

PART = 4 << 20
"""Elements of a parameter that are updated at a time where its states are factored and not made at once."""


def widened_copies(parameter: Parameter, masters: Masters) -> int:
    """How many fp32 numbers torch's ops make for each element that they update: its gradient where the parameter has
    16 bits and, where no whole master is at home, the parameter."""
    if is_drawn(parameter):
        return 2
    return (2 if masters is Masters.LOWER else 1) if needs_master(parameter) else 0


def workspace_nbytes(states: Iterable[str], largest: int, widened: int, parameters: Iterable[Parameter]) -> int:
    """Bytes in which torch's ops update elements of ``parameters``, ``largest`` of one of them at the most: so many
    elements ``widened`` to fp32 (each as often as ``widened_copies`` says), and two numbers for each of a piece that is
    rounded by chance, or as many as ops make in between where torch has no fused one.

    Where ``states`` are not fp32 a piece at a time: its moments, gradients and parameters in fp32, and two numbers to
    decode and encode in.

    Where ``states`` are factored, whole ``parameters``, one after the other: what of one is widened, its update, a sum
    for each of its rows and columns, and norms. If they are not made at once: of a part of one that, and its parameter
    and its gradient in fp32 in any case. Of Muon what of one is widened, and what making an update orthogonal takes.
    """
    states = tuple(state for state in states if state not in (MASTER, LOWER))
    parameters = tuple(parameters)
    drawn = any(map(is_drawn, parameters))
    piece = min(PIECE, largest)
    match reach_of(states):
        case Reach.ELEMENTS:
            # Nothing is rounded while what ops make in between is there.
            return (widened + piece * max(2 * drawn, _between(states))) * STATE_ITEMSIZE
        case Reach.PIECES:
            moments = sum(form_of(state).name != "scale" for state in states)
            return (moments + 2 + drawn + 2) * piece * STATE_ITEMSIZE
        case reach:
            return max((_nbytes_at_once(reach, parameter) for parameter in parameters), default=0)


def _between(states: tuple[str, ...]) -> int:
    """Numbers for each element of a piece that torch's ops make in between."""
    if states in FUSED:
        return 0
    return 2 if states == LION else UNFUSED


def _nbytes_at_once(reach: Reach, parameter: Parameter) -> int:
    if reach is Reach.MATRICES:
        return _muon_nbytes(parameter)
    if reach is Reach.WHOLES:
        return _whole_nbytes(parameter, (1 + widened_copies(parameter, Masters.WHOLE)) * parameter.numel)
    return _whole_nbytes(parameter, 3 * part_elements(parameter))


def _whole_nbytes(parameter: Parameter, elements: int) -> int:
    sums = states_nbytes(("sum:rows", "sum:columns"), parameter)
    return align(STATE_ITEMSIZE * elements + sums) + ALIGNMENT


def _muon_nbytes(parameter: Parameter) -> int:
    """A gradient that is widened; of a matrix its update in fp32, where two in bf16 come later, one in bf16, and two
    squares in bf16 as wide as its shorter side, each of the four at its alignment."""
    numbers = widened_copies(parameter, Masters.WHOLE) * parameter.numel
    if parameter.orthogonal:
        side = min(parameter.shape)
        numbers += parameter.numel + ceil(parameter.numel / 2) + 2 * ceil(side * side / 2)
    return align(STATE_ITEMSIZE * numbers) + 4 * ALIGNMENT * parameter.orthogonal


def part_elements(parameter: Parameter) -> int:
    """The most elements of a part of ``parameter`` that is updated with factored states: whole rows, at least one; all
    of it where it does not lie in its order."""
    if not in_order(parameter):
        return parameter.numel
    return min(parameter.numel, max((PART, *parameter.shape[-1:])))
