"""A small Llama on real text, exactly and with updates that change the numbers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Final

from benchmarks.losses.record import EXACT, Comparison, Course
from benchmarks.losses.text import byte_llama, files, losses, text_of
from benchmarks.provenance import provenance

if TYPE_CHECKING:
    import torch

    from forebay.data.text import Windows
    from forebay.plans import Plan

__all__ = ["SEEDS", "TASKS", "WAYS", "Task", "compare", "quick"]

SEEDS: Final = (0, 1, 2)
BATCH, SEQ = 8, 64
EVERY = 20
"""Steps whose mean loss is a point of a curve."""

WINDOWS = 512
"""Of unseen text."""


@dataclass(frozen=True)
class Way:
    """How states are updated: the ``policy`` that plans it; of ``smart-infinity-compressed`` the share of the elements
    of a gradient that is sent, of ``angel-ptm-lock-free`` the steps of a round."""

    policy: str
    density: float | None = None
    every: int = 1

    @property
    def name(self) -> str:
        """What the record calls it."""
        if self.every > 1:
            return f"{self.policy}, rounds of {self.every}"
        return self.policy if self.density is None else f"{self.policy}, {100 * self.density:g} % sent"

    def of(self, plan: Plan) -> Plan:
        """``plan``, one of ``start``, in this way."""
        if self.every > 1:
            turns = replace(plan.streaming, update_every=self.every, overlap_update=True)
            return replace(plan, planner=self.policy, streaming=turns, changes_numbers=("blocks take turns",))
        # What is sent of a chunk has its place in the cells, which are on the host.
        sent = replace(plan.streaming, gradient_density=self.density)
        return replace(plan, streaming=sent, host=2 * plan.host)

    @property
    def start(self) -> str | None:
        """The policy whose plan is changed for it; None: the plan is that of ``policy`` itself."""
        if self.every > 1:
            return "zero-infinity"  # everything streams, however small the model is
        return None if self.density is None else self.policy


DELAYED: Final = Way("zero-offload-delayed")
IN_TURNS: Final = tuple(Way("angel-ptm-lock-free", every=every) for every in (2, 4))
SENT: Final = tuple(Way("smart-infinity-compressed", share) for share in (0.1, 0.05, 0.02, 0.01))


@dataclass(frozen=True)
class Task:
    """What is trained: ``first`` steps in plain PyTorch at ``first_lr`` on other text (0: from nothing), then ``steps``
    at ``lr`` in each of ``ways``, exactly too."""

    name: str
    first: int
    first_lr: float
    steps: int
    lr: float
    ways: tuple[Way, ...]


TASKS: Final = (
    Task("fine-tuned", 1000, 3e-3, 200, 3e-4, (*SENT, DELAYED, *IN_TURNS)),
    Task("from nothing", 0, 0.0, 2000, 1e-3, (DELAYED, *IN_TURNS, SENT[-1])),
)
"""Fine-tuning is what the paper of SmartComp reports the accuracy of; a long run from nothing is what that of the
delayed update does."""

WAYS: Final = (EXACT, *dict.fromkeys(way.name for task in TASKS for way in task.ways))
"""All ways by name."""

UNSEEN: Final = 4
"""Speeches that nobody is trained on, the last ones; of the same number before them models are fine-tuned."""

READ: Final = 60
"""Speeches before those, for the first steps, and for what is trained from nothing."""


def compare(task: Task, seed: int, ways: Collection[str], command: str, say: Callable[[str], None]) -> Comparison:
    """Trains ``task`` in those of its ways, and exactly, that are among ``ways``."""
    origin, courses = provenance(command), []
    weights = _weights(task, seed)
    before = {f"{task.name} {seed}": _judged(weights, seed)}
    for way in (None, *task.ways):
        if _name(way) in ways:
            course = _course(task, way, seed, weights)
            courses.append(course)
            say(
                f"{task.name}, seed {seed}, {course.way}: loss {course.losses[-1]:.4f}, unseen "
                f"{course.unseen_loss:.4f}, {course.unseen_accuracy:.2%} of its bytes guessed"
            )
    return Comparison(**origin, courses=tuple(courses), before=before)


def quick(task: Task) -> Task:
    """The same with few steps: whether it works."""
    return replace(task, first=min(task.first, 2 * EVERY), steps=2 * EVERY)


def _name(way: Way | None) -> str:
    return EXACT if way is None else way.name


def _texts() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Text for the first steps, for fine-tuning, and unseen."""
    there = files()
    read, tuned = there[-READ - 2 * UNSEEN : -2 * UNSEEN], there[-2 * UNSEEN : -UNSEEN]
    return text_of(read), text_of(tuned), text_of(there[-UNSEEN:])


def _windows(text: torch.Tensor, seed: int) -> Windows:
    from forebay.data.text import Windows

    return Windows(text, batch=BATCH, seq=SEQ, seed=seed)


def _weights(task: Task, seed: int) -> Mapping[str, torch.Tensor]:
    """What the model is before the courses begin."""
    import torch

    model = byte_llama(seed)
    if task.first:
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.first_lr, fused=True)
        losses(model, optimizer, _windows(_texts()[0], seed), task.first)
    return model.state_dict()


def _course(task: Task, way: Way | None, seed: int, weights: Mapping[str, torch.Tensor]) -> Course:
    """One run; ``way`` None: in plain PyTorch, whose numbers every exact policy has."""
    import torch

    import forebay

    model = byte_llama(seed)
    model.load_state_dict(weights)
    windows = _windows(_texts()[1] if task.first else _texts()[0], seed)
    made: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=way is None)
    if way is None:
        found = losses(model, made, windows, task.steps)
        unseen = _judged(model.state_dict(), seed)
    else:
        with tempfile.TemporaryDirectory() as folder:
            budgets = {"device_memory": "256MiB", "disk": f"{folder}:64MiB", "device": "cpu"}
            batch = windows.batch(0)
            plan = None
            if way.start is not None:
                model, made = forebay.prepare(model, made, batch, policy=way.start, **budgets)
                plan = way.of(forebay.report(model).plan)
                forebay.close(model)
                made = torch.optim.AdamW(model.parameters(), lr=task.lr)
            model, optimizer = forebay.prepare(model, made, batch, policy=way.policy, plan=plan, **budgets)
            found = losses(model, optimizer, windows, task.steps)
            forebay.close(model)
            unseen = _judged(model.state_dict(), seed)
    points = tuple(mean(found[first : first + EVERY]) for first in range(0, task.steps, EVERY))
    return Course(task.name, _name(way), seed, task.steps, EVERY, points, *unseen)


def _judged(weights: Mapping[str, torch.Tensor], seed: int) -> tuple[float, float]:
    """Loss (nats a byte) and share of bytes that are guessed, of a model with ``weights`` on unseen text."""
    import torch
    from torch.nn.functional import cross_entropy

    model = byte_llama(seed)
    model.load_state_dict(weights)
    model.eval()
    text = _texts()[2]
    rows = text[: min(WINDOWS, text.numel() // SEQ) * SEQ].view(-1, SEQ)
    with torch.no_grad():
        logits = model(input_ids=rows).logits[:, :-1].reshape(-1, 256)
    wanted = rows[:, 1:].reshape(-1)
    guessed = (logits.argmax(-1) == wanted).double().mean()
    return float(cross_entropy(logits, wanted)), float(guessed)
