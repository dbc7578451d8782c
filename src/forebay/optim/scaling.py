"""Landed gradients times the factor of clipping: by the threads that update, as part of an update.

Clipping multiplies every gradient, one after the other, before the first update may begin, and a gradient in host
memory is multiplied no faster than one thread reads and writes it. So the factor waits beside the bytes
(``runtime.gradient_buffer``) until the update that reads them: all threads of its team multiply then, and the update
finds what they have made in a cache. The bits are those of ``mul_`` either way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Final, final

import numpy as np
import numpy.typing as npt
import torch

from forebay.kernels.team import Team

__all__ = ["SCALABLE", "Span", "multiply"]

SCALABLE: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
"""Dtypes of gradients that are multiplied so."""


@final
@dataclass(frozen=True, slots=True)
class Span:
    """The elements from ``start`` to ``stop`` of ``values`` (1-D, dense, in host memory, of a ``SCALABLE`` dtype) and
    the ``factor`` that they are to be multiplied by."""

    values: torch.Tensor
    start: int
    stop: int
    factor: float


def multiply(team: Team, spans: Iterable[Span]) -> None:
    """Multiplies ``spans``, in place, on the threads of ``team``. Asks torch for no op, which would give the
    interpreter's lock away."""
    if find_spec("numba") is None:
        for span in spans:
            span.values[span.start : span.stop].mul_(span.factor)
        return
    # It takes a third of a second to import: not before there is something to multiply.
    from forebay.kernels.scaling import scaling_kernel
    from forebay.optim.launching import FORMS

    alike: dict[tuple[torch.dtype, float], list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        address = span.values.data_ptr() + span.start * span.values.itemsize
        alike[span.values.dtype, span.factor].append((span.stop - span.start, address))
    for (dtype, factor), found in alike.items():
        rows, kernel = np.array(found, dtype=np.int64), scaling_kernel(FORMS[dtype])
        team.take_turns(partial(_run, kernel, rows, np.float32(factor)), int(rows[:, 0].sum()))


def _run(
    kernel: Callable[..., float], rows: npt.NDArray[np.int64], factor: np.float32, counter: int, shares: int
) -> float:
    return kernel(rows, 0, shares, counter, factor)
