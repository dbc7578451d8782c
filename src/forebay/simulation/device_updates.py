"""How long torch's ops take for an update on a device that is not the host. No torch.

There the states are torch's to update, op by op: each goes over memory once more, and has its launch. What they read
and write was counted with a dispatch mode (``tests/parity/test_device_update_ops.py`` counts again), on a GPU nothing
was timed. A cache that holds what one op leaves for the next makes it shorter: a piece of 1M elements in fp32 has 4
MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from forebay.layout import is_drawn, needs_master, touched_nbytes, with_masters
from forebay.machine import Machine
from forebay.states import Masters, form_of, is_factored, is_made_at_once, plain_name
from forebay.trace import Block, Parameter
from forebay.workspaces import PART, PIECE

__all__ = ["CALL", "Ops", "device_update_rate", "ops_of"]

CALL: Final = 4 << 20
"""Elements that go through a call at a time: those of a chunk of the usual size."""


@dataclass(frozen=True, slots=True)
class Ops:
    """What ops cost for each element: bytes that they read and write, and launches."""

    nbytes: float = 0.0
    launches: float = 0.0

    def __add__(self, other: Ops) -> Ops:
        return Ops(self.nbytes + other.nbytes, self.launches + other.launches)

    def seconds(self, machine: Machine) -> float:
        """For an element: ops follow each other, and the host launches ahead."""
        return max(self.nbytes / machine.device_bandwidth, self.launches * machine.launch_seconds)


_RULES: Mapping[tuple[str, ...], Ops] = MappingProxyType(
    {
        (): Ops(12, 1 / CALL),
        ("momentum_buffer",): Ops(20, 1 / CALL),
        ("exp_avg",): Ops(112, 12 / PIECE),
        ("exp_avg", "exp_avg_sq"): Ops(28, 2 / CALL),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"): Ops(36, 2 / CALL),
    }
)
"""By its moments: an update in fp32. Those of torch are fused, Lion's is not."""

_CAST: Final = Ops(6, 1 / CALL)
"""From 16 bits to fp32, or back."""

_HALVES: Final = Ops(70, 15 / CALL)
"""A master is put together of its halves, and taken apart again (``optim.halves``)."""

_DRAW: Final = Ops(130, 16 / PIECE)
"""A parameter is rounded by chance (``optim.coding``)."""

_MOMENT: Mapping[str, Ops] = MappingProxyType(
    {"8bit": Ops(38.1, 10 / PIECE), "4bit": Ops(53.6, 16 / PIECE), "bfloat16": Ops(136, 17 / PIECE)}
)
"""By its form: a moment is read as fp32, and written."""

_IN_PARTS: Final = Ops(136, 29 / PART)
"""forebay's Adafactor, which goes over a parameter part by part; with the casts of a parameter in 16 bits."""

_AT_ONCE: Final = Ops(68, 20 / CALL)
"""Adafactor of torch and of transformers, all of a parameter at once, in fp32."""


def ops_of(parameter: Parameter, states: tuple[str, ...], masters: Masters) -> Ops:
    """What an update of a large ``parameter`` costs for each of its elements."""
    draw = _DRAW + _CAST if is_drawn(parameter) else Ops()
    if is_made_at_once(states):
        return _AT_ONCE + (_CAST + _CAST if needs_master(parameter) else Ops())
    if is_factored(states):
        return _IN_PARTS + draw
    moments = [state for state in states if form_of(state).name != "scale"]
    made = _RULES.get(tuple(map(plain_name, moments)), _RULES["exp_avg", "exp_avg_sq"])
    for moment in moments:
        made += _MOMENT.get(form_of(moment).name, Ops())
    if not (is_drawn(parameter) or needs_master(parameter)):
        return made
    back = _HALVES if masters is Masters.LOWER else _CAST
    return made + _CAST + (draw if is_drawn(parameter) else back)


def device_update_rate(blocks: Iterable[Block], states: tuple[str, ...], machine: Machine, masters: Masters) -> float:
    """Bytes/s, of the bytes that an update touches at least, of updates on the device; 0 where nothing is trained."""
    touched = seconds = 0.0
    for parameter in (p for block in blocks for p in block.parameters if p.trainable):
        streams = with_masters(states, masters) if needs_master(parameter) else states
        touched += touched_nbytes(streams, parameter)
        seconds += parameter.numel * ops_of(parameter, states, masters).seconds(machine)
    return touched / seconds if seconds else 0.0
