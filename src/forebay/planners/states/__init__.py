"""Published policies for parameters, gradients and optimizer states, one file each: what ``auto`` is compared with.

l2l            a layer or two on the device, everything else on the host
zero_offload   parameters on the device, gradients and states on the host
zero_infinity  everything streams; what the host has no room for is on disk
stronghold     a window of layers, as small as hides its transfers
elixir         blocks cached on the device or resident there, searched for
lohan          updates under backward, and the best amount of swapped activations
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
from forebay.planners.states.elixir import elixir
from forebay.planners.states.l2l import l2l
from forebay.planners.states.lohan import lohan
from forebay.planners.states.stronghold import stronghold
from forebay.planners.states.zero_infinity import zero_infinity
from forebay.planners.states.zero_offload import zero_offload
from forebay.plans import Plan

__all__ = ["STATES", "elixir", "l2l", "lohan", "stronghold", "zero_infinity", "zero_offload"]

STATES: Mapping[str, Callable[[Problem, Bench | None], Plan]] = MappingProxyType(
    {
        "l2l": l2l,
        "zero-offload": zero_offload,
        "zero-infinity": zero_infinity,
        "stronghold": stronghold,
        "elixir": elixir,
        "lohan": lohan,
    }
)
"""By the name that ``policy`` takes, in the order of publication."""
