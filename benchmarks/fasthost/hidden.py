"""How much of the optimizer step is hidden, with a norm that is clipped to.

The model of ``timed`` has forward and backward that take twice as long as its update alone on all cores, as it is where
a step waits for it. That is measured at the begin of each round, and holds for the turns of the round: a host may be
half as fast from one minute to the next. Beside compute updates take the cores that ``forebay doctor`` would give them
(``profiler.update_rates.spared_cores``): all but one, or all where the last one is worth it (``update alone``).
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
one after its last. Longer models, of which there is the last mode, show how much of what a step costs grows with it:
the turn from backward to the next forward takes as long in a step of any length, but for what is done for each block.
Wider ones show how much that is, as far as it does not grow with the block.

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
- ``always``: that of the mode with updates that scale their gradients first: ``u + c / k`` for ``u``. ``speculative``
  has that of ``deferred``, since no update can begin before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Final, final

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.case import BenchmarkError
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.fasthost.stepped import ALWAYS, NEVER, Stepped
from benchmarks.fasthost.timed import TimedModel, plan_by_hand, spread
from forebay.device.cpu import CpuDevice
from forebay.kernels.team import cores, cores_beside_compute
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.profiler.effort import CPU_EFFORT
from forebay.profiler.update_rates import spared_cores

__all__ = ["Parts", "compare", "compare_longer", "compare_wider"]

LAYERS: Final = 32
LONGER: Final = (56, 80)
"""Blocks of longer models. The last one takes some 10 GiB."""

ELEMENTS: Final = 4 << 20
WIDER: Final = 2
"""Times as many in blocks of the wider model. That takes some 16 GiB."""

STEPS: Final = 5
TARGET: Final = 1.05
FEW: Final = 3
"""Rounds of the heats with less to tell: streamed, and clipped."""

SHARE: Final = 0.5
"""Update alone to forward and backward."""

PACED: Final = 16
"""Blocks of the model whose update alone is measured. That of a longer one takes longer by as much as it has more."""

ALL_CORES: Final = "update on all cores"
WARMUP: Final = 1
CHUNK: Final = 4 << 20
AHEAD: Final = 2 / 3
"""Of all blocks, those that are updated under backward, into a second copy.

With ``u`` the seconds of all updates, forward and backward take ``u / SHARE = 2 u``, backward two thirds of that. So
``4/3 u`` fit under backward and ``2/3 u`` under the next forward: a share from 1/3 to 1, as long as an update from one
copy into another takes no longer than one in place. 2/3 leaves both some time, for copies too. Every third block is
left, and forward wants it when it has computed two others."""

SHARED_SLOTS: Final = 4
"""Of a model that streams: so many blocks of the end of forward are still there when backward begins."""


_QUESTION: Final = (
    "What does a step cost beside its forward and backward, with clipping, where the update alone takes half as "
    "long as both?"
)


def compare(command: str, *, quick: bool, say: Say) -> Comparison:
    """Runs all modes of a model of ``LAYERS`` blocks. Takes some 9 GiB of host memory."""
    rounds = 2 if quick else 5
    few = min(rounds, FEW)
    own, streamed = _Heat(LAYERS, rounds), _Heat(LAYERS, few, own_slots=False)
    # At last the steps that are clipped: those who speculate in vain stop it, for a while.
    heats = [[own, _Heat(LAYERS, few, clipped=True)], [streamed]]
    return _compared("hidden step", heats, command, quick=quick, say=say)


def compare_longer(command: str, *, quick: bool, say: Say) -> Comparison:
    """Runs the mode that the target is for, of models of ``LONGER`` blocks. Takes some 12 GiB of host memory."""
    heats = [[_Heat(layers, 2 if quick else 5, own_slots=own)] for layers in LONGER for own in (True, False)]
    return _compared("hidden step of longer models", heats, command, quick=quick, say=say)


def compare_wider(command: str, *, quick: bool, say: Say) -> Comparison:
    """Runs the modes of a model of ``LAYERS`` blocks of more elements each: what a step does once for each block,
    however large that is, is less of it. Those of Llama 3.2 1B have 61M."""
    rounds = 2 if quick else 5
    heats = [[_Heat(LAYERS, rounds)], [_Heat(LAYERS, min(rounds, FEW), own_slots=False)]]
    return _compared("hidden step of wider blocks", heats, command, quick=quick, say=say, wider=WIDER)


def _compared(
    topic: str, heats: Sequence[Sequence[_Heat]], command: str, *, quick: bool, say: Say, wider: int = 1
) -> Comparison:
    """``heats`` of one model each, of blocks that have ``wider`` times as many elements."""
    elements = (1 << 18) if quick else ELEMENTS * wider
    ratio = "seconds of a step over those of forward and backward alone"
    return compared(topic, _QUESTION, ratio, command, lambda: _measured(elements, heats, say), keep=not quick, say=say)


def _measured(elements: int, heats: Sequence[Sequence[_Heat]], say: Say) -> Measured:
    pace = _Pace(elements)
    rows: list[Row] = []
    try:
        for same in heats:
            rows += _heats(elements, same, pace, say)
    finally:
        pace.close()
    lengths = " and ".join(str(layers) for layers in dict.fromkeys(same[0].layers for same in heats))
    return Measured(rows, _setting(elements, lengths, heats[0][0].rounds, pace.threads))


def _setting(elements: int, lengths: str, rounds: int, threads: int) -> str:
    return (
        f"{lengths} layers of {elements / (1 << 20):g}M bf16 parameters with fp32 master and moments on the host; "
        f"forward and backward are timed waits, 1 to 2, of twice the update on all cores, measured anew in each round; "
        f"{rounds} rounds of {STEPS} steps; updates have {threads} of {cores()} cores beside compute"
    )


@dataclass(frozen=True)
class _Heat:
    """``rounds`` of a model of so many ``layers``."""

    layers: int
    rounds: int
    own_slots: bool = True
    clipped: bool = False

    @property
    def shares(self) -> Mapping[str, float]:
        """Of all blocks, those that each mode updates ahead of their step. Of a longer model there is one, which the
        target is for."""
        modes = {"deferred": 0.0, "speculative": AHEAD}
        return modes if self.layers == LAYERS else {"speculative": AHEAD}

    @property
    def first(self) -> bool:
        """Whether what is measured alone is shown of this one."""
        return self.own_slots and not self.clipped

    def named(self, contender: str) -> str:
        """The name of a row."""
        return contender if self.layers == LAYERS else f"{contender}, {self.layers} blocks"


def _heats(elements: int, heats: Sequence[_Heat], pace: _Pace, say: Say) -> list[Row]:
    """Rows of heats that differ in what is clipped."""
    layers, own_slots, shares = heats[0].layers, heats[0].own_slots, heats[0].shares
    parts, base = _Parts(LAYERS, elements), Stepped(layers, elements, None)
    subjects = {mode: _subject(layers, elements, own_slots, share, pace.spared) for mode, share in shares.items()}
    everyone = (base, *subjects.values())
    rows: list[Row] = []
    try:
        for subject in everyone:
            subject.turn(2, NEVER)  # orders are recorded, pages touched, kernels compiled
        _check_losses(subjects)
        for heat in heats:
            updates: list[float] = []
            turns = _turns(base, parts, subjects, clipped=heat.clipped)
            before = subjects["speculative"].speculation()
            begin = partial(_begin, pace, everyone, layers, updates, say)
            seconds = rotated(turns, heat.rounds, WARMUP, say, begin)
            made, taken = (n - m for n, m in zip(subjects["speculative"].speculation(), before, strict=True))
            said = f"{taken} of {made} updates ahead were taken over"
            rows += _rows({**seconds, ALL_CORES: updates[WARMUP:]}, said, heat, pace.threads)
    finally:
        for subject in everyone:
            subject.close()
    return rows


def _begin(pace: _Pace, subjects: Sequence[Stepped], layers: int, updates: list[float], say: Say) -> None:
    """Begins a round."""
    updates.append(pace.measure() * layers)
    for subject in subjects:
        subject.model.pace.spread(updates[-1] / SHARE, layers)
    say(f"  update alone on all cores {updates[-1]:.4f} s: forward and backward take {updates[-1] / SHARE:.4f} s")


@final
class _Pace:
    """A model of ``PACED`` blocks whose updates run on all cores, and nothing beside them. Updates beside compute leave
    ``spared`` cores to others, and have ``threads``."""

    def __init__(self, elements: int) -> None:
        self.spared = _spared()
        self.threads = cores_beside_compute(self.spared)
        self._waiting = _subject(PACED, elements, own_slots=True, share=0.0, spared=self.spared, overlap=False)
        self._waiting.turn(2, NEVER)  # pages touched, kernels compiled

    def measure(self) -> float:
        """Seconds that the update of one block takes, now."""
        return median(self._waiting.update_alone() for _ in range(9)) / PACED

    def close(self) -> None:
        """Gives its memory back."""
        self._waiting.close()


def _spared() -> int:
    """What ``forebay doctor`` finds where a device computes beside updates."""
    device = CpuDevice()
    try:
        return spared_cores(device, replace(CPU_EFFORT, update_dtype="bfloat16"))
    finally:
        device.close()


def _subject(
    layers: int, elements: int, own_slots: bool, share: float, spared: int, *, overlap: bool = True
) -> Stepped:
    def plan(model: TimedModel) -> Plan:
        return plan_by_hand(
            model,
            states=Tier.HOST,
            overlap=overlap,
            speculate=spread(model, share, first=True),
            chunk=CHUNK,
            own_slots=own_slots,
            spared=spared,
        )

    return Stepped(layers, elements, plan)


def _turns(
    base: Stepped, parts: _Parts, subjects: Mapping[str, Stepped], *, clipped: bool
) -> dict[str, Callable[[], float]]:
    speculative, limit = subjects["speculative"], ALWAYS if clipped else NEVER
    turns: dict[str, Callable[[], float]] = {"forward + backward": lambda: base.turn(STEPS)}
    if "deferred" in subjects:
        deferred = subjects["deferred"]
        turns |= {
            "update alone": deferred.update_alone,
            "fetches alone": parts.fetches,
            "landings alone": parts.landings,
            "norms alone": parts.norms,
            "plain": lambda: deferred.turn(STEPS, limit, settle=True),
            "deferred": lambda: deferred.turn(STEPS, limit),
        }
    return {**turns, "speculative": lambda: speculative.turn(STEPS, limit)}


def _check_losses(subjects: Mapping[str, Stepped]) -> None:
    """Equal steps give equal losses, to the last bit, if each forward saw the parameters of the step before."""
    expected = subjects["speculative"].losses
    for name, subject in subjects.items():
        if subject.losses != expected or len(set(expected)) < 2:
            raise BenchmarkError(f"{name} has losses {subject.losses} and speculative has {expected}")


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
        w, c, g = self.forward_backward, self.fetches, self.landings
        u = self.update + (c / cores if clipped else 0.0)
        if mode == "plain":
            return w + u + (g + c) / layers
        if mode == "speculative" and not clipped:
            return max(w + (g + u + c) / layers, u, (threads * u + fetches * c + g + self.norms) / cores)
        hidden = max(w / 3 + (u + c) / layers, max(u, (threads * u + c) / cores) + w / 3 / layers)
        return 2 * w / 3 + g / layers + hidden


_WHAT: Final = {
    "forward + backward": "PyTorch, no step",
    ALL_CORES: "from step() to the last write, nothing beside it",
    "update alone": "the same on the cores that updates have beside compute",
    "fetches alone": "all parameters copied once, on one core",
    "landings alone": "all gradients copied once, on one core",
    "norms alone": "of all gradients, on one core",
    "plain": "the update is waited for",
    "deferred": "the next forward waits for each block",
    "speculative": "2 of 3 blocks updated into a second copy under backward",
}


def _rows(seconds: Mapping[str, list[float]], speculated: str, heat: _Heat, threads: int) -> list[Row]:
    """Those of one heat, in which ``threads`` update beside compute."""
    base = seconds["forward + backward"]
    alone = [name for name in seconds if name.endswith(" alone")]
    rounds = [Parts(*each) for each in zip(base, *(seconds[name] for name in alone), strict=True)] if alone else []
    rows = []
    for name, what in _WHAT.items():
        if name not in seconds:
            continue
        taken = seconds[name]
        ratios = tuple(own / least for own, least in zip(taken, base, strict=True))
        if name in alone or name in (ALL_CORES, "forward + backward"):
            if heat.first:
                rows.append(Row(heat.named(name), what, tuple(taken), ratios))
            continue
        over = median(own - least for own, least in zip(taken, base, strict=True))
        said = [f"{1e3 * over:.1f} ms over forward and backward"]
        if rounds:
            said.append(f"floor {_floor(rounds, name, heat, threads):.3f}")
        if name == "speculative":
            said.append(speculated)
        # What every step is clipped to is known when backward has ended: the floor is above the target then.
        target = TARGET if name == "speculative" and not heat.clipped else None
        full = f"{'' if heat.own_slots else 'streamed '}{name}, {'always' if heat.clipped else 'never'}"
        rows.append(Row(heat.named(full), what, tuple(taken), ratios, target, note=", ".join(said)))
    return rows


def _floor(rounds: Sequence[Parts], mode: str, heat: _Heat, threads: int) -> float:
    """The median over the rounds of the least seconds, over those of forward and backward."""
    fetches = 1 if heat.own_slots else 2 - SHARED_SLOTS / LAYERS

    def floor(parts: Parts) -> float:
        return parts.floor(mode, clipped=heat.clipped, fetches=fetches, layers=LAYERS, cores=cores(), threads=threads)

    return median(floor(parts) / parts.forward_backward for parts in rounds)
