"""Policies over several devices of one host: decided and simulated, not run. What ``forebay.planners`` has for one.

bench             what stages take of a device; refusals
pipelines         stages that stay: what each gives up, what it then holds, how long a step takes
giving_up         as little of a ranking of tensors as there is room for
mapping           which stage is on which device
dapple            one forward, one backward in turn, and nothing given up, or every block run again
mpress_pipeline   what has no room goes to devices that have some, to the host, or runs again
ppaware_pipeline  what hides is offloaded, the cheapest runs again, stage by stage
wrapped           harmony, mobius: more stages than devices, swapped for all micro-batches
data_parallel     tmo, zero-infinity: every device has the whole model

Each is a function from a ``ServerBench`` to a ``ServerPlan``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forebay.collector import collector_paused
from forebay.errors import ConfigError
from forebay.planners.parallel.bench import ServerBench
from forebay.planners.parallel.dapple import dapple, dapple_recompute
from forebay.planners.parallel.data_parallel import tmo, zero_infinity
from forebay.planners.parallel.mpress_pipeline import mpress
from forebay.planners.parallel.ppaware_pipeline import ppaware
from forebay.planners.parallel.wrapped import harmony, mobius
from forebay.servers import ServerPlan

__all__ = ["ON_DEVICES", "ServerBench", "plan_server"]

ON_DEVICES: Mapping[str, Callable[[ServerBench], ServerPlan]] = MappingProxyType(
    {
        "dapple": dapple,
        "dapple-recompute": dapple_recompute,
        "zero-infinity": zero_infinity,
        "harmony": harmony,
        "mpress": mpress,
        "tmo": tmo,
        "mobius": mobius,
        "ppaware": ppaware,
    }
)
"""By the name that ``policy`` takes, in the order of publication."""


def plan_server(bench: ServerBench, policy: str) -> ServerPlan:
    """What ``policy`` comes to. Raises ``ConfigError`` for one that is not for several devices, ``CannotServe`` and
    ``DoesNotFit``."""
    if policy not in ON_DEVICES:
        raise ConfigError(f"policy {policy!r} is not for several devices; there are {', '.join(ON_DEVICES)}")
    with collector_paused():
        return ON_DEVICES[policy](bench)
