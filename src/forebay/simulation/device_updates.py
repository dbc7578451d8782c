"""How long torch's ops take for an update on a device that is not the host. No torch.

There the states are torch's to update, op by op: each goes over memory once more, and has its launch. What they read
and write was counted with a dispatch mode (``tests/parity/test_device_update_ops.py`` counts again), on a GPU nothing
was timed. A cache that holds what one op leaves for the next makes it shorter: a piece of 1M elements in fp32 has 4
MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import ceil
from types import MappingProxyType
from typing import Final

from forebay.layout import is_drawn, needs_master, touched_nbytes, with_masters
from forebay.machine import Machine
from forebay.model import Block, Parameter
from forebay.states import Masters, Reach, form_of, plain_name, reach_of
from forebay.workspaces import PIECE

__all__ = ["CALL", "ITERATIONS", "Ops", "bf16_rate", "device_update_rate", "ops_of"]

CALL: Final = 4 << 20
"""Elements that go through a call at a time: those of a chunk of the usual size."""


@dataclass(frozen=True, slots=True)
class Ops:
    """What ops cost: bytes that they read and write for each element, floating-point operations in bf16 of each, and
    launches: of a call of ``CALL`` elements, whoever's they are (``shared``), of each parameter in a call (``calls``),
    of each ``PIECE`` of a parameter (``pieces``)."""

    nbytes: float = 0.0
    shared: int = 0
    calls: int = 0
    pieces: int = 0
    flops: float = 0.0

    def __add__(self, other: Ops) -> Ops:
        return Ops(
            self.nbytes + other.nbytes,
            self.shared + other.shared,
            self.calls + other.calls,
            self.pieces + other.pieces,
            self.flops + other.flops,
        )

    def launches(self, numel: int) -> float:
        """Those of a parameter of ``numel`` elements."""
        return self.shared * numel / CALL + self.calls * ceil(numel / CALL) + self.pieces * ceil(numel / PIECE)


_RULES: Mapping[tuple[str, ...], Ops] = MappingProxyType(
    {
        (): Ops(12, shared=1),
        ("momentum_buffer",): Ops(20, shared=1),
        ("exp_avg",): Ops(112, pieces=12),
        ("exp_avg", "exp_avg_sq"): Ops(28, shared=2),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): Ops(36, shared=2),
        ("square_avg",): Ops(56, pieces=5),
        ("square_avg", "momentum_buffer"): Ops(76, pieces=7),
        ("square_avg", "grad_avg"): Ops(84, pieces=7),
        ("square_avg", "grad_avg", "momentum_buffer"): Ops(104, pieces=9),
        ("sum",): Ops(48, pieces=4),
        ("square_avg", "acc_delta"): Ops(116, pieces=11),
        ("exp_avg", "exp_inf"): Ops(64, pieces=6),
    }
)
"""By its moments: an update in fp32. Those of torch that are fused take lists. The others, without a decay: Lion's,
that of RMSprop (without and with momentum, centered), of Adagrad, Adadelta and Adamax."""

_CAST: Final = Ops(6, calls=1)
"""From 16 bits to fp32, or back."""

_HALVES: Final = Ops(70, calls=15)
"""A master is put together of its halves, and taken apart again (``optim.halves``)."""

_DRAW: Final = Ops(130, pieces=16)
"""A parameter is rounded by chance (``optim.coding``)."""

_MOMENT: Mapping[str, Ops] = MappingProxyType(
    {"8bit": Ops(38.1, pieces=9), "4bit": Ops(53.6, pieces=16), "bfloat16": Ops(136, pieces=17)}
)
"""By its form: a moment is read as fp32, and written."""

_PIECEWISE: Final = Ops(0, pieces=2)
"""What is done call by call otherwise, where moments are read a piece at a time."""

_IN_PARTS: Final = Ops(136, calls=29)
"""forebay's Adafactor, which goes over a parameter part by part; with the casts of a parameter in 16 bits."""

_AT_ONCE: Final = Ops(68, calls=20)
"""Adafactor of torch and of transformers, all of a parameter at once, in fp32."""

_UNSURE: Final = Ops(80, calls=17)
"""What CAME does more: an average of updates, and factors of what these are off by."""


_ALONE: Final = Ops(28, calls=2)
"""A fused update of AdamW, of one parameter."""

ITERATIONS: Final = 5
"""Of Newton and Schulz in an update of Muon, as often as torch does them where nobody says otherwise."""


def _orthogonal(parameter: Parameter) -> Ops:
    """What an update of a matrix of Muon costs, in fp32: around the iterations 54 bytes and 8 launches; in each a
    square of the shorter side, its polynomial, and the product with that (``forebay.optim.orthogonal``)."""
    shorter, longer = sorted(parameter.shape)
    squares = shorter / longer  # elements of one, over those of the matrix
    flops = ITERATIONS * (4 + 2 * squares) * shorter
    return Ops(54 + ITERATIONS * (10 + 12 * squares), calls=8 + 3 * ITERATIONS, flops=flops)


def ops_of(parameter: Parameter, states: tuple[str, ...], masters: Masters) -> Ops:
    """What an update of ``parameter`` costs."""
    draw = _DRAW + _CAST if is_drawn(parameter) else Ops()
    casts = _CAST + _CAST if needs_master(parameter) else Ops()
    reach = reach_of(states)
    if reach is Reach.MATRICES:
        return casts + (_orthogonal(parameter) if parameter.orthogonal else _ALONE)
    if reach is Reach.WHOLES:
        return _AT_ONCE + casts + (_UNSURE if any(map(_is_unsure, states)) else Ops())
    if reach is Reach.PARTS:
        return _IN_PARTS + draw
    moments = [state for state in states if form_of(state).name != "scale"]
    made = _RULES.get(tuple(map(plain_name, moments)), _RULES["exp_avg", "exp_avg_sq"])
    if reach is Reach.PIECES:
        made += _PIECEWISE
    for moment in moments:
        made += _MOMENT.get(form_of(moment).name, Ops())
    if not (is_drawn(parameter) or needs_master(parameter)):
        return made
    back = _HALVES if masters is Masters.LOWER else _CAST
    return made + _CAST + (draw if is_drawn(parameter) else back)


def _is_unsure(state: str) -> bool:
    """Whether it is one of those of CAME that no other optimizer has."""
    return plain_name(state).startswith("exp_avg_res")


def device_update_rate(blocks: Iterable[Block], states: tuple[str, ...], machine: Machine, masters: Masters) -> float:
    """Bytes/s, of the bytes that an update touches at least, of updates on the device, which follow each other while
    the host launches ahead; 0 where nothing is trained."""
    touched = moved = launches = flops = 0.0
    for parameter in (p for block in blocks for p in block.parameters if p.trainable):
        streams = with_masters(states, masters) if needs_master(parameter) else states
        ops = ops_of(parameter, states, masters)
        touched += touched_nbytes(streams, parameter)
        moved += parameter.numel * ops.nbytes
        launches += ops.launches(parameter.numel)
        flops += parameter.numel * ops.flops
    busy = moved / machine.device_bandwidth + flops / bf16_rate(machine)
    seconds = max(busy, launches * machine.launch_seconds)
    return touched / seconds if seconds else 0.0


def bf16_rate(machine: Machine) -> float:
    """FLOP/s of the device in bf16, or in the slowest dtype where the machine states none for that."""
    return machine.compute.get("bfloat16", min(machine.compute.values()))
