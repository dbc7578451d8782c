"""A few steps of training here, under a plan and as plain PyTorch: what ``forebay compare --measure`` reports.

Every run builds the model anew from the same seed, takes the same batch and gives everything back before the next one
begins: no run is in the memory that another is measured in.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, final

import torch
from torch import nn

from forebay import api
from forebay.budgets import Budget
from forebay.cli.compare import STEPS, WARM_STEPS, steps_of
from forebay.cli.preparing import optimizer_of
from forebay.errors import DoesNotFit, ForebayError
from forebay.plans import Plan
from forebay.profiler.batch import call_arguments, scalar_loss, with_values
from forebay.recipes.tasks import sample
from forebay.reporting.comparison import LINKS, Measured
from forebay.runtime.generators import seed_all
from forebay.testing.plain import PlainOptimizer
from forebay.tiers.host import available_host_memory
from forebay.timeline import typical_seconds
from forebay.units import format_bytes

if TYPE_CHECKING:
    from forebay.cli.plan import PlanSettings
    from forebay.machine import Machine
    from forebay.timeline import Event
    from forebay.trace import Trace

__all__ = ["Trials"]

SEED: Final = 0
LEARNING_RATE: Final = 1e-4

COPIES: Final = 2
"""Of what plain PyTorch takes, how much is free before it is run: its values pass through forebay on their way."""


@final
class Trials:
    """Runs of the model that ``settings`` name on this machine's ``device`` (``cpu`` or ``cuda``)."""

    def __init__(self, settings: PlanSettings, device: str) -> None:
        self._settings = settings
        self._device = device
        self._plain: tuple[float, ...] | None = None

    def run_plain(self, trace: Trace, machine: Machine) -> str:
        """Trains with plain PyTorch, so that ``run`` can hold the losses of policies against it. Returns "" or, where
        that is not possible, why."""
        free = self._free()
        try:
            plan = api.plan(trace, machine, Budget(free // COPIES), "resident")
        except DoesNotFit as refusal:
            needed = f"it takes {format_bytes(refusal.needed)}, {COPIES} times that to set up"
            return f"plain PyTorch was not run: {needed}, and {format_bytes(free)} are free"
        try:
            self._plain = self._run_plain(plan)
        except Exception as error:
            return f"plain PyTorch was not run: {_why(error)}"
        finally:
            gc.collect()
        return ""

    def run(self, plan: Plan, budget: Budget) -> Measured:
        """Trains under ``plan`` within ``budget``. That a run fails, for whatever reason, is an answer too."""
        exact = plan.streaming.delay_after
        if exact is not None and exact > WARM_STEPS:
            # What would be timed are its exact steps, beside a prediction of the delayed ones.
            return Measured(reason=f"its first {exact} steps are exact, and a trial takes {WARM_STEPS + STEPS}")
        try:
            return self._run(plan, budget)
        except Exception as error:
            # The model is the user's and the budget is tight: what stops one policy must not hide the others.
            return Measured(reason=_why(error))
        finally:
            gc.collect()

    def _run(self, plan: Plan, budget: Budget) -> Measured:
        model, batch = self._model()
        optimizer = optimizer_of(self._settings.optimizer, model, LEARNING_RATE)
        model, optimizer = self._prepared(model, optimizer, batch, plan, budget)
        try:
            seed_all(SEED)  # dropout draws the same in every run
            warm, steps = steps_of(plan)
            losses = self._losses(model, optimizer, batch, warm)
            # Nothing is under way at either end, so that what lies between is all that the timed steps moved.
            api.synchronize(model)
            before = _end(api.report(model).timeline.events)
            losses += self._losses(model, optimizer, batch, steps)
            api.synchronize(model)
            report = api.report(model)
        finally:
            api.close(model)
        events = [event for event in report.timeline.events if event.start >= before]
        moved = {lane: sum(event.nbytes for event in events if event.lane is lane) // steps for lane in LINKS}
        return Measured(
            steps=steps,
            step_seconds=typical_seconds(report.timeline.step_seconds[warm:], plan.streaming.update_every),
            peaks=report.measured_peaks(),
            moved=moved,
            losses=losses,
            as_plain=None if self._plain is None else losses[: len(self._plain)] == self._plain,
        )

    def _run_plain(self, plan: Plan) -> tuple[float, ...]:
        model, batch = self._model()
        made = optimizer_of(self._settings.optimizer, model, LEARNING_RATE)
        model, _ = self._prepared(model, made, batch, plan, plan.budget)
        api.close(model)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # out of the arena that holds gradients and states too
        seed_all(SEED)
        optimizer = PlainOptimizer(optimizer_of(self._settings.optimizer, model, LEARNING_RATE))
        return self._losses(model, optimizer, batch, WARM_STEPS + STEPS)

    def _model(self) -> tuple[nn.Module, Any]:
        """The model, its parameters from the seed or still without values, and a batch with values."""
        settings = self._settings
        seed_all(SEED)
        found = sample(settings.model, batch=settings.batch, seq=settings.seq, dtype=settings.dtype, on="cpu")
        return found.model, with_values(found.batch, found.model, self._device, SEED)

    def _prepared(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, plan: Plan, budget: Budget
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        empty = any(parameter.is_meta for parameter in model.parameters())
        made = api.prepare(
            model,
            optimizer,
            batch,
            device_memory=budget.device,
            host_memory=budget.host,
            disk=None if budget.disk is None else self._settings.disk,
            plan=plan,
            device=self._device,
        )
        try:
            if empty:
                api.initialize(made[0], SEED)
        except BaseException:
            api.close(made[0])
            raise
        return made

    def _losses(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | PlainOptimizer, batch: Any, steps: int
    ) -> tuple[float, ...]:
        """The losses of so many steps of a loop as a user would write it."""
        args, kwargs = call_arguments(batch)
        count, losses = self._settings.accumulate, []
        for _ in range(steps):
            if count > 1:
                passes = api.accumulate(model, [batch] * count, _loss)
                losses.append(sum(loss.item() for loss in passes))
            else:
                # The output has a name, as a plan assumes: it lives on while the next forward runs.
                output = model(*args, **kwargs)
                loss = scalar_loss(output).loss
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return tuple(losses)

    def _free(self) -> int:
        if self._device == "cuda":
            return torch.cuda.mem_get_info()[0]
        return available_host_memory().available


def _loss(model: nn.Module, batch: Any) -> torch.Tensor:
    args, kwargs = call_arguments(batch)
    return scalar_loss(model(*args, **kwargs)).loss


def _end(events: Sequence[Event]) -> float:
    return max((event.end for event in events), default=0.0)


def _why(error: Exception) -> str:
    """What went wrong, in a line."""
    if isinstance(error, ForebayError):
        return str(error)
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
