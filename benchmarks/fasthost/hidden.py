"""How much of the optimizer step is hidden, with a norm that is clipped to.

The model of ``timed`` has forward and backward that take twice as long as its update alone on all cores, as it is where
a step waits for it; that is measured first. Beside compute updates take one core less (``update alone``).
Contenders: the same forward and backward without any step, in plain PyTorch, which is what ratios are taken to; and
steps with ``torch.nn.utils.clip_grad_norm_`` before them, in three modes:

``plain``        The update is waited for.
``deferred``     The next forward waits for each block's update when it comes to the block.
``speculative``  Two of three blocks are updated into a second copy as soon as their gradients have landed; the next
                 forward waits for the others. They are spread over all blocks: so both the updates under backward and
                 those under forward have time until the next one.

*never* has a norm that nothing is clipped to, *always* one that every step is. While every step is clipped no update
can begin before backward has ended. Parameters have slots of their own on the device; *streamed* they pass through four
shared ones, and are fetched twice a step. A turn is timed from the beginning of its second step to the beginning of the
one after its last.

Floors. What a step takes at the least, from rates that are measured in the same rounds: ``w``, seconds of forward and
backward alone, of which forward takes a third, ``f``, and backward two, ``b``; ``u``, of the update alone, 28 bytes an
element (2 of gradient read, 12 of states read and written, 2 of parameters written) on ``t`` of ``k`` cores; ``c``, of
a copy of all parameters as a fetch makes it, 4 bytes an element on one core; ``g``, of gradients as they land, the same
bytes, but those that are read are in a cache; ``n``, of the norms, 2 bytes on one core. Of ``l`` blocks:

- The gradient of the first block is the last to be made, and its parameters are the first to be wanted. So between
  backward and the next forward lie its landing, its update and its fetch: ``(g + u + c) / l``.
- ``plain``: ``w + g / l + u + c / l``.
- ``deferred``: what does not fit under forward comes after it. ``b + g / l + max(f + (u + c) / l, h + f / l)`` with
  ``h = max(u, (t u + c) / k)``, since the cores have both to do.
- ``speculative``: nothing but the first block, ``w + (g + u + c) / l``, as long as the cores have the time for all the
  work: ``max(u, (t u + fetches * c + g + n) / k)``. An update into another copy is counted as one in place.
- ``always``: that of the mode, and before the updates every gradient is scaled: ``c / k``. ``speculative`` has that of
  ``deferred``, since no update can begin before.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.case import BenchmarkError
from benchmarks.fasthost.queued import QueuedDevice
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.fasthost.timed import AMPLE, TimedModel, plan_by_hand, spread
from forebay import api
from forebay.kernels.team import cores, cores_beside_compute
from forebay.memory import Tier
from forebay.plans import Plan

__all__ = ["Stepped", "compare"]

LAYERS: Final = 32
ELEMENTS: Final = 4 << 20
STEPS: Final = 5
TARGET: Final = 1.05
FEW: Final = 3
"""Rounds of the heats with less to tell: streamed, and clipped."""

SHARE: Final = 0.5
"""Update alone to forward and backward."""

NEVER: Final = 1e9
ALWAYS: Final = 1e-3
CHUNK: Final = 4 << 20
AHEAD: Final = 2 / 3
"""Of all blocks, those that are updated under backward, into a second copy.

With ``u`` the seconds of all updates, forward and backward take ``u / SHARE = 2 u``, backward two thirds of that. So
``4/3 u`` fit under backward and ``2/3 u`` under the next forward: a share from 1/3 to 1, as long as an update from one
copy into another takes no longer than one in place. 2/3 leaves both some time, for copies too. Every third block is
left, and forward wants it when it has computed two others."""

SHARED_SLOTS: Final = 4
"""Of a model that streams: so many blocks of the end of forward are still there when backward begins."""


@final
class Stepped:
    """A ``TimedModel`` that steps under ``plan`` (None: in plain PyTorch, forward and backward only), and after each
    step what ``after`` does. ``crash_safe``: as in ``forebay.prepare``."""

    def __init__(
        self,
        layers: int,
        elements: int,
        plan: Callable[[TimedModel], Plan] | None,
        after: Callable[[nn.Module, torch.optim.Optimizer], object] | None = None,
        crash_safe: Path | None = None,
    ) -> None:
        self._after = after
        self.model = TimedModel(layers, elements)
        self._x = torch.zeros(1, TimedModel.WIDTH)
        self._optimizer: torch.optim.Optimizer | None = None
        self._device = QueuedDevice(self.model.pace.compute)
        if plan is not None:
            given = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            made = plan(self.model)
            disk = None if made.budget.disk is None else made.budget.disk.path
            where = {"disk": disk, "device": self._device, "crash_safe": crash_safe}
            _, self._optimizer = api.prepare(self.model, given, plan=made, device_memory=AMPLE, **where)
        self.losses: list[float] = []

    def step(self, max_norm: float | None, *, settle: bool = False) -> None:
        """One step; ``settle`` waits for its update."""
        loss = self.model(self._x)
        loss.backward()
        value = self.model.read(loss)
        if self._optimizer is None:
            self.model.zero_grad()
            return
        self.losses.append(value)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self._optimizer.step()
        if self._after is not None:
            self._after(self.model, self._optimizer)
        if settle:
            api.synchronize(self.model)
        self._optimizer.zero_grad()

    def turn(self, steps: int, max_norm: float | None = None, *, settle: bool = False) -> float:
        """Seconds of a step among ``steps`` that follow each other; see the module's docstring."""
        self.settle()
        gc.collect()  # so that no turn pays for the garbage of those before: that takes longer than a step
        self.step(max_norm, settle=settle)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(max_norm, settle=settle)
        taken = (time.perf_counter() - start) / steps
        self.settle()
        return taken

    def update_alone(self) -> float:
        """Seconds from ``step()`` to the end of all updates, with nothing beside them."""
        self.settle()
        self.model(self._x).backward()
        self.settle()
        start = time.perf_counter()
        if self._optimizer is not None:
            self._optimizer.step()
        self.settle()
        taken = time.perf_counter() - start
        self.model.zero_grad()
        return taken

    def settle(self) -> None:
        """Waits for whatever is under way."""
        if self._optimizer is None:
            self._device.synchronize()
        else:
            api.synchronize(self.model)

    def speculation(self) -> tuple[int, int]:
        """Updates ahead of their step so far, and those of them that were taken over."""
        counters = api.report(self.model).timeline.counters
        return counters["speculated"], counters["committed"]

    def close(self) -> None:
        if self._optimizer is not None:
            api.close(self.model)
        self._device.close()
        self.model.pace.compute.close()


def compare(command: str, *, quick: bool, say: Say) -> Comparison:
    """Runs all modes. Takes some 8 GiB of host memory."""
    elements = (1 << 18) if quick else ELEMENTS
    return compared(
        "hidden step",
        "What does a step cost beside its forward and backward, with clipping, where the update alone takes half as "
        "long as both?",
        "seconds of a step over those of forward and backward alone",
        command,
        lambda: _measured(elements, 2 if quick else 5, say),
        keep=not quick,
        say=say,
    )


def _measured(elements: int, rounds: int, say: Say) -> Measured:
    pace = _pace(elements)
    say(f"  update alone on all cores {SHARE * pace:.4f} s: forward and backward take {pace:.4f} s")
    parts, base = _Parts(LAYERS, elements), Stepped(LAYERS, elements, None)
    rows: list[Row] = []
    try:
        for own_slots in (True, False):
            subjects = {mode: _subject(elements, own_slots, share) for mode, share in _SHARES.items()}
            try:
                for subject in (base, *subjects.values()):
                    subject.turn(2, NEVER)  # orders are recorded, pages touched, kernels compiled
                _check_losses(subjects)
                for subject in (base, *subjects.values()):
                    subject.model.pace.spread(pace, LAYERS)
                # At last the steps that are clipped: those who speculate in vain stop it, for a while.
                for clipped in (False, True) if own_slots else (False,):
                    count = rounds if own_slots and not clipped else min(rounds, FEW)
                    before = subjects["speculative"].speculation()
                    seconds = rotated(_turns(base, parts, subjects, clipped=clipped), count, 1, say)
                    made, taken = (n - m for n, m in zip(subjects["speculative"].speculation(), before, strict=True))
                    said = f"{taken} of {made} updates ahead were taken over"
                    rows += _rows(seconds, said, clipped=clipped, own_slots=own_slots)
            finally:
                for subject in subjects.values():
                    subject.close()
    finally:
        base.close()
    return Measured(rows, _setting(elements, rounds))


def _setting(elements: int, rounds: int) -> str:
    return (
        f"{LAYERS} layers of {elements / (1 << 20):g}M bf16 parameters with fp32 master and moments on the host; "
        f"forward and backward are timed waits, 1 to 2; {rounds} rounds of {STEPS} steps"
    )


_SHARES: Final = {"deferred": 0.0, "speculative": AHEAD}
"""Of all blocks, those that each mode updates ahead of their step."""


def _pace(elements: int) -> float:
    """Seconds of forward and backward: updates on all cores, which nothing runs beside, take ``SHARE`` of them."""
    waiting = _subject(elements, own_slots=True, share=0.0, overlap=False)
    try:
        waiting.turn(2, NEVER)  # pages touched, kernels compiled
        return median(waiting.update_alone() for _ in range(7)) / SHARE
    finally:
        waiting.close()


def _subject(elements: int, own_slots: bool, share: float, *, overlap: bool = True) -> Stepped:
    def plan(model: TimedModel) -> Plan:
        ahead = spread(model, share, first=True)
        return plan_by_hand(model, states=Tier.HOST, overlap=overlap, speculate=ahead, chunk=CHUNK, own_slots=own_slots)

    return Stepped(LAYERS, elements, plan)


def _turns(
    base: Stepped, parts: _Parts, subjects: Mapping[str, Stepped], *, clipped: bool
) -> dict[str, Callable[[], float]]:
    deferred, speculative = subjects["deferred"], subjects["speculative"]
    limit = ALWAYS if clipped else NEVER
    return {
        "forward + backward": lambda: base.turn(STEPS),
        "update alone": deferred.update_alone,
        "fetches alone": parts.fetches,
        "landings alone": parts.landings,
        "norms alone": parts.norms,
        "plain": lambda: deferred.turn(STEPS, limit, settle=True),
        "deferred": lambda: deferred.turn(STEPS, limit),
        "speculative": lambda: speculative.turn(STEPS, limit),
    }


def _check_losses(subjects: Mapping[str, Stepped]) -> None:
    """Equal steps give equal losses, to the last bit, if each forward saw the parameters of the step before."""
    expected = subjects["deferred"].losses
    for name, subject in subjects.items():
        if subject.losses != expected or len(set(expected)) < 2:
            raise BenchmarkError(f"{name} has losses {subject.losses} and deferred has {expected}")


@final
class _Parts:
    """What a step of ``layers`` layers does on one core beside its update, each kind alone."""

    def __init__(self, layers: int, elements: int) -> None:
        self._home = torch.full((layers, elements), 1e-3, dtype=torch.bfloat16)
        self._slots = torch.zeros_like(self._home).add_(1e-3)  # pages of its own
        self._gradient = torch.full((elements,), 1e-3, dtype=torch.bfloat16)

    def fetches(self) -> float:
        """Seconds in which all parameters are copied."""
        start = time.perf_counter()
        np.copyto(_bytes(self._slots), _bytes(self._home))
        return time.perf_counter() - start

    def landings(self) -> float:
        """Seconds in which all gradients are."""
        source = _bytes(self._gradient)
        start = time.perf_counter()
        for target in self._home:
            np.copyto(_bytes(target), source)
        return time.perf_counter() - start

    def norms(self) -> float:
        """Seconds in which their norms are made."""
        start = time.perf_counter()
        for gradient in self._home:
            torch.linalg.vector_norm(gradient)
        return time.perf_counter() - start


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    found: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return found


@dataclass(frozen=True)
class Parts:
    """Seconds of one round: the letters of the module's docstring, in words."""

    forward_backward: float
    update: float
    fetches: float
    landings: float
    norms: float

    def floor(self, mode: str, *, clipped: bool, fetches: float, layers: int, cores: int, threads: int) -> float:
        """Seconds of a step in ``mode`` at the least; ``fetches`` are those of a block, ``threads`` those that
        update."""
        w, u, c, g = self.forward_backward, self.update, self.fetches, self.landings
        scaled = c / cores if clipped else 0.0
        if mode == "plain":
            return w + scaled + u + (g + c) / layers
        if mode == "speculative" and not clipped:
            return max(w + (g + u + c) / layers, u, (threads * u + fetches * c + g + self.norms) / cores)
        hidden = max(w / 3 + (u + c) / layers, max(u, (threads * u + c) / cores) + w / 3 / layers)
        return 2 * w / 3 + g / layers + scaled + hidden


_WHAT: Final = {
    "forward + backward": "PyTorch, no step",
    "update alone": "from step() to the last write, nothing beside it, on one core less than there are",
    "fetches alone": "all parameters copied once, on one core",
    "landings alone": "all gradients copied once, on one core",
    "norms alone": "of all gradients, on one core",
    "plain": "the update is waited for",
    "deferred": "the next forward waits for each block",
    "speculative": "2 of 3 blocks updated into a second copy under backward",
}


def _rows(seconds: Mapping[str, list[float]], speculated: str, *, clipped: bool, own_slots: bool) -> list[Row]:
    """Those of one heat; what is measured alone is shown of the first."""
    base = seconds["forward + backward"]
    alone = [name for name in seconds if name.endswith(" alone")]
    rounds = [Parts(*each) for each in zip(base, *(seconds[name] for name in alone), strict=True)]
    rows = []
    for name, taken in seconds.items():
        ratios = tuple(own / least for own, least in zip(taken, base, strict=True))
        if name == "forward + backward" or name in alone:
            if own_slots and not clipped:
                rows.append(Row(name, _WHAT[name], tuple(taken), ratios))
            continue
        said = [f"floor {_floor(rounds, name, own_slots=own_slots, clipped=clipped):.3f}"]
        if name == "speculative":
            said.append(speculated)
        # What every step is clipped to is known when backward has ended: the floor is above the target then.
        target = TARGET if name == "speculative" and not clipped else None
        full = f"{'' if own_slots else 'streamed '}{name}, {'always' if clipped else 'never'}"
        rows.append(Row(full, _WHAT[name], tuple(taken), ratios, target, note=", ".join(said)))
    return rows


def _floor(rounds: Sequence[Parts], mode: str, *, own_slots: bool, clipped: bool) -> float:
    """The median over the rounds of the least seconds, over those of forward and backward."""
    fetches = 1 if own_slots else 2 - SHARED_SLOTS / LAYERS

    def floor(parts: Parts) -> float:
        count, threads = cores(), cores_beside_compute()
        return parts.floor(mode, clipped=clipped, fetches=fetches, layers=LAYERS, cores=count, threads=threads)

    return median(floor(parts) / parts.forward_backward for parts in rounds)
