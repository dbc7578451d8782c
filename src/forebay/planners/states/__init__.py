"""Published policies for parameters, gradients and optimizer states, one file each: what ``auto`` is compared with.

l2l            a layer or two on the device, everything else on the host
zero_offload   parameters on the device, gradients and states on the host
zero_infinity  everything streams; what the host has no room for is on disk
patrickstar    chunks of equal size, by Belady's rule; states in the margin where all parameters fit
moesys         what is dense on the device, blocks with experts from the host or disk
harmony        all micro-batches pass a layer while it is there, which is updated as soon as it can
stronghold     a window of layers, as small as hides its transfers
elixir         blocks cached on the device or resident there, searched for
mobius         the same with as many layers ahead as is fastest; updates after backward
angel_ptm      all room on the device to what is used next, as early as can be; host, then disk
smart_infinity states on disk, updated there by a process of its own
lohan          updates under backward, and the best amount of swapped activations
hydra, tmo     several models on one device, several devices on one channel: simulated, and refused for one
drafting       what they share

Each decides as its paper does where a plan can say so; its docstring says where ours departs, and why. What no paper
here decides is the same for all: activations stay while there is room, else the fewest blocks run again. Where a paper
has the host update between backward and the next forward, so does the plan; where it updates while backward runs,
blocks are updated ahead of their step (``planners.speculation``) if the step gains by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forebay.planners.bench import Bench
from forebay.planners.problem import Problem
from forebay.planners.states.angel_ptm import angel_ptm, angel_ptm_lock_free
from forebay.planners.states.elixir import elixir
from forebay.planners.states.harmony import harmony
from forebay.planners.states.hydra import hydra
from forebay.planners.states.l2l import l2l
from forebay.planners.states.lohan import lohan
from forebay.planners.states.mobius import mobius
from forebay.planners.states.moesys import moesys
from forebay.planners.states.patrickstar import patrickstar
from forebay.planners.states.smart_infinity import smart_infinity, smart_infinity_compressed
from forebay.planners.states.stronghold import stronghold
from forebay.planners.states.tmo import tmo, tmo_plans
from forebay.planners.states.zero_infinity import zero_infinity
from forebay.planners.states.zero_offload import zero_offload, zero_offload_delayed
from forebay.plans import Plan

__all__ = [
    "INEXACT",
    "SEVERAL",
    "STATES",
    "angel_ptm",
    "angel_ptm_lock_free",
    "elixir",
    "harmony",
    "hydra",
    "l2l",
    "lohan",
    "mobius",
    "moesys",
    "patrickstar",
    "smart_infinity",
    "smart_infinity_compressed",
    "stronghold",
    "tmo",
    "tmo_plans",
    "zero_infinity",
    "zero_offload",
    "zero_offload_delayed",
]

STATES: Mapping[str, Callable[[Problem, Bench | None], Plan]] = MappingProxyType(
    {
        "l2l": l2l,
        "zero-offload": zero_offload,
        "zero-infinity": zero_infinity,
        "patrickstar": patrickstar,
        "moesys": moesys,
        "harmony": harmony,
        "stronghold": stronghold,
        "elixir": elixir,
        "mobius": mobius,
        "angel-ptm": angel_ptm,
        "smart-infinity": smart_infinity,
        "lohan": lohan,
    }
)
"""By the name that ``policy`` takes, in the order of publication."""

INEXACT: Mapping[str, Callable[[Problem, Bench | None], Plan]] = MappingProxyType(
    {
        "zero-offload-delayed": zero_offload_delayed,
        "angel-ptm-lock-free": angel_ptm_lock_free,
        "smart-infinity-compressed": smart_infinity_compressed,
    }
)
"""Those that change the numbers, which is asked for by their names."""

SEVERAL: Mapping[str, Callable[[Problem, Bench | None], Plan]] = MappingProxyType({"hydra": hydra, "tmo": tmo})
"""Those that are for several models or several devices, which one plan does not say: they refuse, and say what would
do."""
