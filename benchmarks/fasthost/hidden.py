"""How much of the optimizer step is hidden, with a norm that is clipped to.

The model of ``timed`` has forward and backward that take twice as long as its update alone, which is measured first.
Contenders: the same forward and backward without any step, in plain PyTorch, which is what ratios are taken to; and
steps with ``torch.nn.utils.clip_grad_norm_`` before them, in three modes:

``plain``        The update is waited for.
``deferred``     The next forward waits for each block's update when it comes to the block.
``speculative``  Three of four blocks are updated into a second copy as soon as their gradients have landed; the next
                 forward waits for the others. They are spread over all blocks: so both the updates under backward and
                 those under forward have time until the next one.

*never* has a norm that nothing is clipped to, *always* one that every step is. While every step is clipped no update
can begin before backward has ended: then a step takes backward and the longer of forward and update at the least
(``floor``). A turn is timed from the beginning of its second step to the beginning of the one after its last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, final

import torch

from benchmarks.case import BenchmarkError
from benchmarks.fasthost.record import Comparison, Row
from benchmarks.fasthost.run import Measured, Say, compared, rotated
from benchmarks.fasthost.timed import AMPLE, TimedModel, plan_by_hand, spread
from forebay import api
from forebay.memory import Tier
from forebay.plans import Plan

__all__ = ["Stepped", "compare"]

LAYERS: Final = 16
ELEMENTS: Final = 8 << 20
STEPS: Final = 6
TARGET: Final = 1.05
SHARE: Final = 0.5
"""Update alone to forward and backward."""

NEVER: Final = 1e9
ALWAYS: Final = 1e-3
CHUNK: Final = 1 << 20
AHEAD: Final = 3 / 4
"""Of all blocks, those that are updated under backward, into a second copy.

With ``u`` the seconds of all updates, forward and backward take ``u / SHARE = 2 u``, backward two thirds of that. So
``4/3 u`` fit under backward and ``2/3 u`` under the next forward: a share from 1/3 to 1, as long as an update from one
copy into another takes no longer than one in place. 3/4 leaves both some time. Every fourth block is left, and forward
wants it when it has computed three others."""


@final
class Stepped:
    """A ``TimedModel`` that steps under ``plan`` (None: in plain PyTorch, forward and backward only)."""

    def __init__(self, layers: int, elements: int, plan: Callable[[TimedModel], Plan] | None) -> None:
        self.model = TimedModel(layers, elements)
        self._x = torch.zeros(1, TimedModel.WIDTH)
        self._optimizer: torch.optim.Optimizer | None = None
        if plan is not None:
            given = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            made = plan(self.model)
            disk = None if made.budget.disk is None else made.budget.disk.path
            _, self._optimizer = api.prepare(self.model, given, plan=made, device_memory=AMPLE, disk=disk, device="cpu")
        self.losses: list[float] = []

    def step(self, max_norm: float | None, *, settle: bool = False) -> None:
        """One step; ``settle`` waits for its update."""
        loss = self.model(self._x)
        loss.backward()
        if self._optimizer is None:
            self.model.zero_grad()
            return
        self.losses.append(float(loss.detach()))
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        self._optimizer.step()
        if settle:
            api.synchronize(self.model)
        self._optimizer.zero_grad()

    def turn(self, steps: int, max_norm: float | None = None, *, settle: bool = False) -> float:
        """Seconds of a step among ``steps`` that follow each other; see the module's docstring."""
        self.settle()
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
        if self._optimizer is not None:
            api.synchronize(self.model)

    def speculation(self) -> str:
        """What became of the updates ahead of their step, in words."""
        counters = api.report(self.model).timeline.counters
        return f"{counters['committed']} of {counters['speculated']} updates ahead were taken over"

    def close(self) -> None:
        if self._optimizer is not None:
            api.close(self.model)


def compare(command: str, *, quick: bool, say: Say) -> Comparison:
    """Runs all modes. Takes some 14 GiB of host memory."""
    elements = (1 << 20) if quick else ELEMENTS
    return compared(
        "hidden step",
        "What does a step cost beside its forward and backward, with clipping, where the update alone takes half as "
        "long as both?",
        "seconds of a step over those of forward and backward alone",
        command,
        lambda: _measured(elements, 2 if quick else 9, say),
        keep=not quick,
        say=say,
    )


def _measured(elements: int, rounds: int, say: Say) -> Measured:
    subjects = _subjects(elements)
    try:
        for subject in subjects.values():
            subject.turn(2, NEVER)  # orders are recorded, pages touched, kernels compiled
        _check_losses(subjects)
        update = min(subjects["deferred"].update_alone() for _ in range(5))
        for subject in subjects.values():
            subject.model.pace.spread(update / SHARE, LAYERS)
        say(f"  update alone {update:.4f} s: forward and backward take {update / SHARE:.4f} s")
        seconds = rotated(_turns(subjects), rounds, 1, say)
        notes = {name: subjects[name].speculation() for name in ("speculative", "speculative, always")}
    finally:
        for subject in subjects.values():
            subject.close()
    return Measured(_rows(seconds, notes), _setting(elements, rounds))


def _setting(elements: int, rounds: int) -> str:
    return (
        f"{LAYERS} layers of {elements >> 20}M bf16 parameters with fp32 master and moments on the host, parameters "
        f"streamed; forward and backward are timed waits, 1 to 2; {rounds} rounds of {STEPS} steps"
    )


def _subjects(elements: int) -> dict[str, Stepped]:
    def deferred(model: TimedModel) -> Plan:
        return plan_by_hand(model, states=Tier.HOST, overlap=True, chunk=CHUNK)

    def speculative(model: TimedModel) -> Plan:
        ahead = spread(model, AHEAD, first=True)
        return plan_by_hand(model, states=Tier.HOST, overlap=True, speculate=ahead, chunk=CHUNK)

    return {
        "base": Stepped(LAYERS, elements, None),
        "deferred": Stepped(LAYERS, elements, deferred),
        "speculative": Stepped(LAYERS, elements, speculative),
        # One of its own: what is clipped every time stops to speculate, for a while that other turns would fall into.
        "speculative, always": Stepped(LAYERS, elements, speculative),
    }


def _turns(subjects: dict[str, Stepped]) -> dict[str, Callable[[], float]]:
    base, deferred = subjects["base"], subjects["deferred"]
    return {
        "forward + backward": lambda: base.turn(STEPS),
        "update alone": deferred.update_alone,
        "plain, never": lambda: deferred.turn(STEPS, NEVER, settle=True),
        "plain, always": lambda: deferred.turn(STEPS, ALWAYS, settle=True),
        "deferred, never": lambda: deferred.turn(STEPS, NEVER),
        "deferred, always": lambda: deferred.turn(STEPS, ALWAYS),
        "speculative, never": lambda: subjects["speculative"].turn(STEPS, NEVER),
        "speculative, always": lambda: subjects["speculative, always"].turn(STEPS, ALWAYS),
    }


def _check_losses(subjects: dict[str, Stepped]) -> None:
    """Equal steps give equal losses, to the last bit, if each forward saw the parameters of the step before."""
    expected = subjects["deferred"].losses
    for name, subject in subjects.items():
        if name != "base" and (subject.losses != expected or len(set(expected)) < 2):
            raise BenchmarkError(f"{name} has losses {subject.losses} and deferred has {expected}")


_WHAT: Final = {
    "forward + backward": "PyTorch, no step",
    "update alone": "from step() to the last write, nothing beside it",
    "plain": "the update is waited for",
    "deferred": "the next forward waits for each block",
    "speculative": "3 of 4 blocks updated into a second copy under backward",
}


def _rows(seconds: dict[str, list[float]], notes: dict[str, str]) -> list[Row]:
    base = seconds["forward + backward"]
    rows = []
    for name, taken in seconds.items():
        mode, _, clipped = name.partition(", ")
        ratios = tuple(own / alone for own, alone in zip(taken, base, strict=True))
        # What every step is clipped to is known when backward has ended: the floor is above the target then.
        target = TARGET if clipped == "never" and mode == "speculative" else None
        note = notes.get("speculative" if name == "speculative, never" else name, "")
        rows.append(Row(name, _WHAT.get(name, _WHAT[mode]), tuple(taken), ratios, target, note=note))
    floors = tuple(2 * b / 3 + max(b / 3, u) for b, u in zip(base, seconds["update alone"], strict=True))
    ratios = tuple(floor / alone for floor, alone in zip(floors, base, strict=True))
    rows.append(Row("floor, always", "backward, then the longer of forward and update", floors, ratios))
    return rows
