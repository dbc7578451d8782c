"""From a plan to what every lane does. No torch.

index     the trace turned round: lives of roots, what visits read
lives     the order of a step with what is recomputed, kept and moved, and from when to when each root is live in it
liveness  the most bytes that are there, whatever the timing
recorder  a device on paper
homes     reads, updates and writes of what is at home
moving    activations that leave and come back
stages    what is to be done in each part of a step
walk      the steps, walked through as the runtime does
lower     all of it: a plan becomes a program
buffers   the lives of a step one by one, for a layout of addresses
graph     a trace as the graph of its ops, whose order is open
accumulation  what several micro-batches take that pass the model together
"""

from forebay.lowering.accumulation import accumulation_of, parked_nbytes
from forebay.lowering.buffers import step_buffers, step_lives
from forebay.lowering.graph import step_graph
from forebay.lowering.liveness import Liveness, device_bound
from forebay.lowering.lives import Profile
from forebay.lowering.lower import lower, sketch
from forebay.lowering.stages import Grain

__all__ = [
    "Grain",
    "Liveness",
    "Profile",
    "accumulation_of",
    "device_bound",
    "lower",
    "parked_nbytes",
    "sketch",
    "step_buffers",
    "step_graph",
    "step_lives",
]
