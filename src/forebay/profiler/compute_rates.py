"""How fast the device computes: matrix products per dtype, elementwise ops, and the least time of an op."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from forebay.errors import DeviceOutOfMemory
from forebay.profiler.effort import Effort, Layer
from forebay.profiler.stopwatch import Stopwatch, in_turns, medians
from forebay.units import MiB

__all__ = [
    "DTYPES",
    "Arithmetic",
    "arithmetic",
    "elementwise_bandwidth",
    "fresh_bandwidth",
    "launch_seconds",
]

_FRESH = 48 * MiB

_TRIES = 200

_SHORT = 5
"""Times as many rounds for runs of a millisecond: cheap, and most of them fit between two turns of a neighbour."""

DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Arithmetic:
    """FLOP/s by dtype, and the dtypes that torch refused to multiply here."""

    rates: dict[str, float]
    refused: tuple[str, ...]


def arithmetic(device: str, watch: Stopwatch, effort: Effort) -> Arithmetic:
    """FLOP/s of the three products of a linear layer (forward, input gradient, weight gradient) in each dtype."""
    rates: dict[str, float] = {}
    refused = []
    for name in DTYPES:
        try:
            rates[name] = _rate(device, name, watch, effort)
        except torch.OutOfMemoryError as error:
            raise DeviceOutOfMemory(
                f"{device} has no room for the matrices of a measurement; end other programs on it",
                needed=8 * effort.layers[-1].width * effort.layers[-1].hidden,
                allowed=0,
            ) from error
        except RuntimeError:  # no kernel for this dtype on this device
            refused.append(name)
    return Arithmetic(rates, tuple(refused))


def _rate(device: str, dtype: str, watch: Stopwatch, effort: Effort) -> float:
    kind = getattr(torch, dtype)
    layer = effort.layers[0]
    for larger in effort.layers[1:]:
        # A dtype that is computed in software has to stop in time. The fastest of many runs tells: a neighbour who
        # takes the cores in most of them must not make it look like software.
        fastest = min(_layer_runs(device, kind, layer, watch, _TRIES, effort.bound / 10))
        if 2 * larger.flops / layer.flops * fastest > effort.bound:
            break
        layer = larger
    return layer.flops / median(_layer_runs(device, kind, layer, watch, effort.rounds, effort.bound))


def _layer_runs(
    device: str, dtype: torch.dtype, layer: Layer, watch: Stopwatch, rounds: int, bound: float
) -> list[float]:
    with torch.no_grad():
        # Numbers as in training: a GPU draws less power, and so runs faster, on numbers that are all the same. The
        # generator is our own, because the user's random numbers must not depend on a measurement.
        source = torch.Generator(device).manual_seed(0)
        inputs, weight, gradient = (
            torch.randn(rows, columns, device=device, dtype=torch.float32, generator=source).to(dtype)
            for rows, columns in (
                (layer.tokens, layer.width),
                (layer.hidden, layer.width),
                (layer.tokens, layer.hidden),
            )
        )
        # Results go where results were before. Whether an allocator finds such a place, or asks the system for pages,
        # depends on what ran earlier in the process, and would double the time on ``cpu``.
        results = torch.empty_like(gradient), torch.empty_like(inputs), torch.empty_like(weight)

        def products() -> None:
            torch.mm(inputs, weight.t(), out=results[0])
            torch.mm(gradient, weight, out=results[1])
            torch.mm(gradient.t(), inputs, out=results[2])

        return in_turns({"layer": lambda: watch.seconds(products)}, rounds, bound)["layer"]


def elementwise_bandwidth(device: str, watch: Stopwatch, effort: Effort) -> float:
    """Bytes/s that an elementwise sum reads and writes, its result in memory that is there."""
    with torch.no_grad():
        left = torch.ones(effort.elementwise // 4, dtype=torch.float32, device=device)
        right, result = torch.ones_like(left), torch.zeros_like(left)

        def add() -> None:
            torch.add(left, right, out=result)

        taken = medians({"add": lambda: watch.seconds(add)}, effort.rounds, effort.bound)
    return 3 * left.nbytes / taken["add"]


def fresh_bandwidth(watch: Stopwatch, effort: Effort) -> float:
    """Bytes/s at which ``cpu`` fills memory that comes from the system: every page of it is a fault."""

    def fill() -> None:
        # More than malloc ever recycles from its heap (DEFAULT_MMAP_THRESHOLD_MAX of glibc, 32 MiB).
        torch.empty(_FRESH, dtype=torch.uint8).fill_(1)

    return _FRESH / medians({"fill": lambda: watch.seconds(fill)}, effort.rounds, effort.bound)["fill"]


def launch_seconds(device: str, watch: Stopwatch, effort: Effort) -> float:
    """Seconds of one op on four numbers, in the forward and backward of a chain of them: dispatch and autograd."""
    cases = {"chain": lambda: watch.seconds(lambda: _chain(device, effort.chain))}
    taken = medians(cases, _SHORT * effort.rounds, effort.bound)
    return taken["chain"] / (2 * effort.chain)


def _chain(device: str, length: int) -> None:
    """``length`` tiny ops forward and as many backward."""
    with torch.enable_grad():
        value = torch.ones(4, dtype=torch.float32, device=device, requires_grad=True)
        factor = torch.ones(4, dtype=torch.float32, device=device)
        end = value
        for _ in range(length):
            end = end * factor
        torch.autograd.grad(end, value, torch.ones_like(factor))
