"""``forebay verify``: a model by its name, trained with forebay and in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, final

from pydantic import BaseModel, ConfigDict, Field

from forebay.budgets import Budget
from forebay.cli.plan import PlanSettings, disk_budget, expect_policy
from forebay.cli.preparing import device_of, optimizer_of
from forebay.cli.runfolder import expect_model
from forebay.errors import ConfigError, DoesNotFit, ModelError
from forebay.reporting.verdict import Verdict
from forebay.units import format_bytes, format_count

if TYPE_CHECKING:
    import torch
    from torch import nn

    from forebay.plans import Plan
    from forebay.recipes.tasks import Sample

__all__ = ["USUAL", "Extent", "verify"]

USUAL: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {"step": MappingProxyType({"accumulate": 2, "clip_norm": 1.0}), "backward": MappingProxyType({})}
)
"""What ``verify`` takes, by when blocks are updated, where neither a recipe nor a flag says otherwise: backward leaves
no gradient to add to, or to clip."""

LEARNING_RATE = 1e-4

COPIES = 3
"""Of what plain PyTorch takes, how much is free before both are trained: the plain model, forebay's bytes on the device
and on the host, and what is between them."""

FREE_SHARE = 0.8
"""Of the free memory, what may be taken: the rest of the machine goes on."""

AMPLE = 1 << 62
"""Bytes of a budget that refuses nothing."""


class Extent(BaseModel):
    """How much of a model is trained, for how long and where; see the help of the flag of the same name."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    layers: int | None = Field(default=None, ge=1)
    steps: int = Field(default=3, ge=1)
    seed: int = Field(default=0, ge=0, lt=2**63)
    clip_norm: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    device: Literal["cpu", "cuda"] | None = None
    data: tuple[Path, ...] = ()


def silent(line: str) -> None:
    """Tells nobody."""


def verify(asked: PlanSettings, extent: Extent, tell: Callable[[str], None] = silent) -> Verdict:
    """Trains the model of ``asked`` with forebay and in plain PyTorch, and says what was equal. ``tell`` hears how it
    goes.

    Raises a ``UsageError`` for what cannot be used, and ``DoesNotFit`` where there is no memory for both models, or no
    plan within the budgets.
    """
    import torch

    from forebay.testing.plain import beside_plain

    expect_policy(asked.policy)
    if asked.update == "backward" and (asked.accumulate > 1 or extent.clip_norm is not None):
        flag = "--accumulate" if asked.accumulate > 1 else "--clip-norm"
        raise ConfigError(f"--update: backward uses gradients up as they come; leave {flag} out, or take --update step")
    expect_model(asked.model, weights=True)
    place = torch.device(device_of(extent.device))
    part = _part(asked, extent.layers, place.type)
    tell(part.words)
    with beside_plain(place) as device:
        return _verified(asked, extent, part, place, device, tell)


def _verified(
    asked: PlanSettings,
    extent: Extent,
    part: _Part,
    place: torch.device,
    device: Any,
    tell: Callable[[str], None],
) -> Verdict:
    from forebay import api
    from forebay.testing.comparing import Pair, compare
    from forebay.testing.plain import PlainOptimizer, with_memory

    mine = _Prepared(asked, extent, part, place, device)
    try:
        plan = api.report(mine.model).plan
        plain = with_memory(_sample(asked, part, extent.seed).model, place)
        own = PlainOptimizer(_optimizer(asked, plain))
        tell(f"training both models: {mine.course.micro_batches} micro-batches")
        pair = Pair(mine.model, mine.optimizer, plain, own, mine.batches, alike=mine.alike)
        checks = compare(replace(pair, again=mine.again, folder=mine.folder), mine.course)
    finally:
        api.close(mine.model)
    parameters = format_count(sum(p.numel() for p in plain.parameters()))
    counted = "" if part.cut is None else f", {part.layers} of its {part.of} layers"
    peaks = [f"{format_bytes(n)} of {tier.value}" for tier, n in plan.peaks().items() if n]
    return Verdict(
        f"{asked.model}{counted}: {parameters} parameters in {asked.dtype} on {place}",
        plan.planner,
        checks,
        plan.changes_numbers,
        (*mine.notes, f"plan by {plan.planner}: {', '.join(peaks)}", *_held(plan)),
    )


def _held(plan: Plan) -> list[str]:
    """That what is on disk had checksums, if something was there."""
    there = plan.streaming.checksums and any(p.on_disk for p in plan.placements)
    return ["every read of parameters and states on disk was held against its checksums"] if there else []


# How much of the model there is memory for


@dataclass(frozen=True)
class _Part:
    """What of a model is trained: ``layers`` of ``of`` (None: they cannot be counted), of which plain PyTorch takes
    ``needs`` bytes, a ``share`` of what it would take for all of them. ``room`` are the bytes that both models may
    take."""

    layers: int | None
    of: int | None
    needs: int
    share: float
    room: int

    @property
    def cut(self) -> int | None:
        """As many layers as the model gets; None: all."""
        return None if self.layers == self.of else self.layers

    @property
    def words(self) -> str:
        """What is trained, in words."""
        counted = "all of it" if self.cut is None else f"{self.layers} of {self.of} layers"
        return (
            f"trained twice: {counted}, {format_bytes(self.needs)} in plain PyTorch, with {format_bytes(self.room)} "
            f"free for both models"
        )


def _part(asked: PlanSettings, wanted: int | None, kind: str) -> _Part:
    """As many layers as are ``wanted``, or else as many as the free memory has room for. Raises ``DoesNotFit``, and
    ``ConfigError`` for layers that the model does not have."""
    from forebay.recipes.tasks import depth

    of, room = depth(asked.model), _room(kind)
    if wanted is not None and (of is None or wanted > of):
        has = "layers that nobody has counted" if of is None else f"{of} layers"
        raise ConfigError(f"--layers {wanted}: {asked.model} has {has}; leave it out or give less")
    if of is None:
        part = _Part(None, None, _needs(asked, None, kind), 1.0, room)
    else:
        # Layers are alike: what the second one adds, each further one adds.
        first = _needs(asked, 1, kind)
        further = _needs(asked, 2, kind) - first if of > 1 else 0
        fitting = of if further <= 0 else 1 + (room // COPIES - first) // further
        layers = min(of, max(1, fitting)) if wanted is None else wanted
        needs, whole = (first + (count - 1) * further for count in (layers, of))
        part = _Part(layers, of, needs, needs / whole, room)
    if COPIES * part.needs > room:
        needed = COPIES * part.needs
        raise DoesNotFit(
            f"two models, one with forebay and one in plain PyTorch, take {format_bytes(needed)} together and "
            f"{format_bytes(room)} are free for them; lower --batch or --seq, or give --layers",
            tier="host" if kind == "cpu" else "device",
            needed=needed,
            allowed=room,
        )
    return part


def _needs(asked: PlanSettings, layers: int | None, kind: str) -> int:
    """Bytes that plain PyTorch takes to train the model with so many layers."""
    from forebay import api
    from forebay.profiler.capture import capture
    from forebay.profiler.here import this_machine
    from forebay.recipes.tasks import sample

    found = sample(asked.model, batch=asked.batch, seq=asked.seq, dtype=asked.dtype, layers=layers)
    try:
        trace = capture(found.model, found.batch, asked.optimizer, kind).trace
    except ModelError as error:
        raise ModelError(f"{asked.model}: {error}") from None
    return api.plan(trace, this_machine(kind)[0], Budget(AMPLE, AMPLE), "resident").device


def _room(kind: str) -> int:
    """Bytes that both models may take, of the device and as many of the host."""
    import torch

    from forebay.tiers.host import available_host_memory

    free = available_host_memory().available
    if kind == "cuda":
        free = min(free, torch.cuda.mem_get_info()[0])
    return int(FREE_SHARE * free)


# The model under forebay


def _sample(asked: PlanSettings, part: _Part, seed: int) -> Sample:
    """The model, the same every time, and a batch; both may be without values."""
    from forebay.recipes.tasks import sample
    from forebay.runtime.generators import seed_all

    seed_all(seed)
    return sample(asked.model, batch=asked.batch, seq=asked.seq, dtype=asked.dtype, on="cpu", layers=part.cut)


def _text_batches(asked: PlanSettings, extent: Extent, found: Sample, count: int) -> list[dict[str, Any]]:
    """``count`` micro-batches out of the text of ``--data``. Raises ``ConfigError`` for a model that does not read it,
    and what tokenising it raises."""
    from forebay.data.text import Windows, tokenize
    from forebay.data.tokenizers import find_tokenizer
    from forebay.recipes.kinds import CAUSAL, in_training
    from forebay.recipes.sources import find
    from forebay.recipes.tasks import names_function

    if found.kind is not CAUSAL or found.seq is None:
        raise ConfigError(f"--data: {asked.model} is not a causal language model, which reads text; leave --data out")
    tokenizer = find_tokenizer(None if names_function(asked.model) else find(asked.model).folder)
    tokens, beside = tokenize(extent.data, tokenizer), in_training(found.model)
    windows = Windows(tokens, batch=asked.batch, seq=found.seq, seed=extent.seed, beside=beside)
    config: Any = found.model.config
    windows.check_range(tokenizer.name, config.get_text_config().vocab_size)
    return [windows.batch(number) for number in range(count)]


def _optimizer(asked: PlanSettings, model: nn.Module) -> torch.optim.Optimizer:
    return optimizer_of(asked.optimizer, model, LEARNING_RATE)


@final
class _Prepared:
    """The model under a plan with its values, its data, and what has to be said about them.

    ``device`` is that of forebay, at ``place``. ``course`` is what the plan has room for; ``alike``: it came with
    values, the same every time. Whoever makes one closes its ``model``.
    """

    def __init__(self, asked: PlanSettings, extent: Extent, part: _Part, place: torch.device, device: Any) -> None:
        from forebay import api
        from forebay.profiler.batch import moved_to, with_values
        from forebay.testing.promises import Course

        self._asked, self._part, self._place, self._device = asked, part, place, device
        self.notes: list[str] = []
        disk = disk_budget(asked)
        self.folder = None if disk is None else Path(disk.folders[0].path)
        self.course = Course(extent.steps, asked.accumulate, extent.clip_norm, extent.seed, resumed=True)
        found = _sample(asked, part, extent.seed)
        self.model = found.model
        count = self.course.micro_batches
        if extent.data:
            texts = _text_batches(asked, extent, found, count)
            self.batches: list[Any] = [moved_to(batch, place) for batch in texts]
            self._data = f"text of {', '.join(map(str, extent.data))}, in an order from seed {extent.seed}"
        else:
            numbers = range(extent.seed, extent.seed + count)
            self.batches = [with_values(found.batch, self.model, place, number) for number in numbers]
            self._data = f"made-up data from seed {extent.seed}"
        self.alike = not any(parameter.is_meta for parameter in self.model.parameters())
        self.optimizer = self._within_budgets()
        try:
            self._expect_room_to_save()
            if not self.alike:
                self._fill()
        except BaseException:
            api.close(self.model)
            raise

    def again(self, plan: Plan) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model another time under ``plan``, with other values if it has any, or none."""
        model = _sample(self._asked, self._part, self.course.seed).model
        return model, self._prepared(model, self._memory, 1, plan)

    def _expect_room_to_save(self) -> None:
        """Leaves the resume out, and says so, where there is no room for what is saved."""
        from tempfile import gettempdir

        from forebay.safekeeping import checkpoint_size

        folder = self.folder or Path(gettempdir())
        short = checkpoint_size(self.model).shortage(folder)
        if short is not None:
            self.course = replace(self.course, resumed=False)
            self.notes.append(
                f"resuming was not looked at: a checkpoint takes {format_bytes(short.needed)} and "
                f"{format_bytes(short.free)} are free in {folder}; name a folder on another disk with --disk"
            )

    def _fill(self) -> None:
        """Gives the model its values: those of its folder, or random ones."""
        from forebay import api
        from forebay.recipes.sources import find
        from forebay.recipes.tasks import names_function

        seed = self.course.seed
        source = None if names_function(self._asked.model) else find(self._asked.model)
        if source is not None and source.weights and source.folder is not None:
            api.load(self.model, str(source.folder))
            self.notes.append(f"weights of {source.folder}, {self._data}")
        else:
            api.initialize(self.model, seed)
            self.notes.append(f"random weights and {self._data}")

    def _within_budgets(self) -> torch.optim.Optimizer:
        """Puts forebay under the model: with the budgets that were asked for, in proportion to the layers that are
        trained, or with half of what plain PyTorch takes on the device. A device budget that nobody gave as it is grows
        to the least that has a plan. Micro-batches pass the model together where a plan has room for that."""
        given, part = self._asked.device_memory, self._part
        memory = part.needs // 2 if given is None else max(1, int(given * part.share))
        fixed = given is not None and part.cut is None
        together = self.course.accumulate > 1
        while True:
            try:
                optimizer = self._prepared(self.model, memory, self.course.accumulate if together else 1)
                break
            except (DoesNotFit, ConfigError) as refusal:
                least = refusal.needed if isinstance(refusal, DoesNotFit) and refusal.tier == "device" else 0
                if not fixed and least > memory:
                    memory = least
                elif together:
                    together = False
                else:
                    raise
        if not fixed:
            why = "half of what plain PyTorch takes" if given is None else "in proportion to the layers"
            self.notes.append(f"device budget {format_bytes(memory)}: {why}, or the least that has a plan")
        self.course, self._memory = replace(self.course, together=together), memory
        return optimizer

    def _prepared(
        self, model: nn.Module, memory: int, micro_batches: int, plan: Plan | None = None
    ) -> torch.optim.Optimizer:
        from forebay import api

        asked, part = self._asked, self._part
        host = None if asked.host_memory is None else max(1, int(asked.host_memory * part.share))
        if host is None and self._place.type == "cpu":
            # What is free now is the plain model's too, and on the cpu the device is host memory.
            host = part.room - part.needs - min(memory, part.needs)
        _, optimizer = api.prepare(
            model,
            _optimizer(asked, model),
            self.batches[0],
            device_memory=memory,
            host_memory=host,
            disk=None if disk_budget(asked) is None else asked.disk,
            policy=asked.policy,
            loss=asked.loss,
            compress=asked.compress,
            plan=plan,
            device=self._device,
            micro_batches=micro_batches,
            update=asked.update,
            checksums=asked.checksums,
        )
        return optimizer
