"""From a plan to what every lane does. No torch.

index     the trace turned round: lives of roots, what visits read
liveness  bytes op by op, under any set of recomputed blocks
recorder  a device on paper
homes     reads, updates and writes of what is at home
walk      the steps, walked through as the runtime does
lower     all of it: a plan becomes a program
"""

from forebay.lowering.liveness import Liveness, Profile, device_bound
from forebay.lowering.lower import lower

__all__ = ["Liveness", "Profile", "device_bound", "lower"]
