"""``dapple`` and ``dapple-recompute``: a pipeline with one forward and one backward in turn, and nothing given up, or
every block run again.

Fan et al., "DAPPLE: a pipelined data parallel approach for training large models", PPoPP 2021, early backward
scheduling; with recomputation its ``RC`` rows. Stages are even, a stage a device, and no stage is replicated, where the
paper searches for both. They are what ``mpress`` and ``ppaware`` are compared with.
"""

from __future__ import annotations

from forebay.planners.activations.literature.layers import all_again
from forebay.planners.parallel.bench import ServerBench
from forebay.planners.parallel.pipelines import KEPT, Decision, Seat, on_devices
from forebay.servers import ServerPlan

__all__ = ["dapple", "dapple_recompute", "running_again"]


def dapple(bench: ServerBench) -> ServerPlan:
    """Raises ``DoesNotFit``, and ``CannotServe`` for one device or fewer blocks than devices."""
    return on_devices(bench, "dapple", lambda seat: KEPT, "every stage keeps what it saves")


def dapple_recompute(bench: ServerBench) -> ServerPlan:
    """Raises what ``dapple`` raises."""
    return on_devices(bench, "dapple-recompute", running_again, "every block that may runs again")


def running_again(seat: Seat) -> Decision:
    """Every block that may runs again."""
    return Decision({layer.name: layer.worth_it(all_again(layer)) for layer in seat.layers if layer.may_rerun})
