"""What the host takes for one op of a training step beside its kernel, and what streaming adds to that.

Measured on a model so small that its kernels take next to nothing: Python of the modules, autograd, torch's
dispatcher; streamed, forebay's hooks and the handing over to lanes; where a block runs again, the hooks of its
checkpoint; where ops of it are treated, the mode that sees every op; and where activations move, more that is handed
over. On ``cpu`` all of it lies between the kernels; a GPU hides it as long
as its queue is full.

Copies as small as those of this model are otherwise made by who asks for them (``device.cpu.BRIEF``). Here they go the
way that larger ones go, as those of a model do that is worth streaming: to the lanes' threads, or inline where
``CpuDevice`` says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import nn
from torch.nn import functional

from forebay.budgets import Budget
from forebay.device.cpu import BRIEF, CpuDevice
from forebay.layout import MOVED_LEAST
from forebay.memory import Tier
from forebay.opening import open_session
from forebay.optim.reading import read_optimizer
from forebay.plans import Placement, Plan, Streaming
from forebay.profiler.capture import capture
from forebay.profiler.effort import Effort
from forebay.profiler.stopwatch import Stopwatch
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import Attachment, session_of
from forebay.trace import Phase
from forebay.treatments import Fate, Selection, Treatment
from forebay.units import MiB

__all__ = ["MOVED", "MOVING", "TINY", "Layers", "Overhead", "attached", "close", "host_overhead", "stream"]

WARM, STEPS_PER_ROUND = 3, 4
CHUNK = 4 * MiB
"""Elements."""

ROOM = 512 * MiB
"""Bytes on device and host: far more than the model takes."""

WINDOW = MiB
"""Bytes of activations on the host, and under way in each direction."""


@dataclass(frozen=True)
class Overhead:
    """Seconds per op of a step: ``launch`` in plain PyTorch, ``watch`` more when every block streams, ``replay`` more
    for an op that runs again, ``treat`` more for each op in the forward of a block of which any is treated and every op
    is seen (``treatments.seen_by_op``), run for the first time or again. ``handover`` are those for each transfer of an
    activation, to the host or back. Those of transfers are for such as are not small."""

    launch: float = 0.0
    watch: float = 0.0
    handover: float = 0.0
    replay: float = 0.0
    treat: float = 0.0


@dataclass(frozen=True)
class Layers:
    """A stack of transformer layers: width and heads, how many, and the tokens of its batch."""

    width: int
    heads: int
    layers: int
    tokens: int

    def model(self) -> nn.Module:
        """The stack, with parameters at random; the user's random numbers are not touched."""
        with torch.random.fork_rng(devices=[]):
            return nn.Sequential(*(_Layer(self.width, self.heads) for _ in range(self.layers)))

    def batch(self) -> torch.Tensor:
        """What the model is called with, shape (1, tokens, width)."""
        return torch.ones(1, self.tokens, self.width, dtype=torch.float32)


TINY = Layers(width=16, heads=2, layers=6, tokens=8)

MOVING = replace(TINY, tokens=MOVED_LEAST // (4 * TINY.width))
"""The same with activations that are just large enough to move."""

MOVED = tuple(Treatment("aten.addmm.default", linear, Fate.OFFLOAD) for linear in (0, 1, 2, 4, 5))
"""Of the linear layers in a layer those whose results are saved for backward."""

KEPT = tuple(replace(treatment, fate=Fate.KEEP) for treatment in MOVED)


@final
class _Layer(nn.Module):
    """A transformer layer as model libraries write them: many small modules."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        dtype = torch.float32  # whatever a program has made its default
        self.heads = heads
        self.before = nn.LayerNorm(width, dtype=dtype)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, dtype=dtype) for _ in range(4))
        self.after = nn.LayerNorm(width, dtype=dtype)
        self.gate, self.up, self.down = (nn.Linear(width, width, dtype=dtype) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.before(x)
        shape = (*rows.shape[:-1], self.heads, rows.shape[-1] // self.heads)
        query, key, value = (p(rows).view(shape).transpose(1, 2) for p in (self.query, self.key, self.value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = torch.add(x, self.out(mixed.transpose(1, 2).reshape(rows.shape)))
        rows = self.after(x)
        gated: torch.Tensor = self.down(functional.silu(self.gate(rows)) * self.up(rows))
        return torch.add(x, gated)


def host_overhead(stopwatch: Stopwatch, effort: Effort) -> Overhead:
    """Measures all of it on the ``cpu`` device, in turns."""
    counts = _Counts.of(TINY)
    with ExitStack() as opened:
        cases = {
            "plain": _Case(TINY.model(), TINY.batch()),
            "streamed": _streamed(opened, TINY),
            "replayed": _streamed(opened, TINY, again=True),
            "treated": _streamed(opened, TINY, KEPT, again=True),
            "staying": _streamed(opened, MOVING),
            "moving": _streamed(opened, MOVING, MOVED),
        }
        taken: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(WARM + STEPS_PER_ROUND * effort.rounds):
            for name, case in cases.items():
                taken[name].append(stopwatch.seconds(case.forward_and_backward))
                case.end_step()
    # The fastest quarter: whatever else the machine does only ever adds.
    least = {name: sorted(seconds[WARM:])[len(seconds) // 4] for name, seconds in taken.items()}
    return counts.overhead(least)


@dataclass(frozen=True)
class _Counts:
    """Ops of a step of layers: all of them, those of the forward, and those that run again where all layers do."""

    ops: int
    forward: int
    again: int

    @classmethod
    def of(cls, layers: Layers) -> _Counts:
        trace = capture(layers.model(), (layers.batch(),), "sgd").trace
        forward = [trace.segments[visit.segment] for visit in trace.visits if visit.phase is Phase.FORWARD]
        again = sum(max(0, segment.saves_until) for segment in forward)
        return cls(sum(1 for _ in trace.ops()), sum(len(segment.ops) for segment in forward), again)

    def overhead(self, seconds: Mapping[str, float]) -> Overhead:
        """What follows from the ``seconds`` of a step of every case."""
        launch = seconds["plain"] / self.ops
        replay = max(0.0, (seconds["replayed"] - seconds["streamed"]) / self.again - launch)
        # The ops that are kept do not run again.
        kept, transfers = len(KEPT) * TINY.layers, 2 * len(MOVED) * MOVING.layers
        more = seconds["treated"] - seconds["replayed"] + kept * (launch + replay)
        treat = max(0.0, more) / (self.forward + self.again - kept)
        return Overhead(
            launch,
            watch=max(0.0, seconds["streamed"] - seconds["plain"]) / self.ops,
            handover=max(0.0, seconds["moving"] - seconds["staying"]) / transfers,
            replay=replay,
            treat=treat,
        )


@final
class _Case:
    """A model that is passed again and again; ``optimizer`` None: it is plain, and takes no step."""

    def __init__(self, model: nn.Module, batch: torch.Tensor, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model = model
        self._batch = batch
        self._optimizer = optimizer

    def forward_and_backward(self) -> None:
        self._model(self._batch).sum().backward()

    def end_step(self) -> None:
        self._model.zero_grad()
        if self._optimizer is None:
            return
        # As in training, where the ledger looks at one step in many: without a step all passes would be its first.
        self._optimizer.step()
        # Between steps it looks at all that this thread does, at the passes of others too.
        attached(self._model).session.watch.uninstall()


def _streamed(opened: ExitStack, layers: Layers, treated: tuple[Treatment, ...] = (), *, again: bool = False) -> _Case:
    """``layers`` streaming, with no copy taken for a small one, until ``opened`` is closed."""
    model = layers.model()
    model, optimizer = stream(model, torch.optim.SGD(model.parameters(), lr=0.0), treated, again=again, brief=0)
    opened.callback(close, model)
    return _Case(model, layers.batch(), optimizer)


def stream(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    treated: tuple[Treatment, ...] = (),
    *,
    again: bool = False,
    brief: int = BRIEF,
    window: int = WINDOW,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Puts every layer at home on the host, with three slots to stream through; ``treated`` are ops of each, of which
    what goes to the host too is little enough for windows of ``window`` bytes. ``again``: all layers run again in
    backward. ``brief``: see ``CpuDevice``."""
    bound = find_blocks(model)
    blocks = bound.model.blocks
    largest = max(block.nbytes for block in blocks)
    streaming = Streaming(
        slots=(largest,) * 3, prefetch_distance=2, gradient_window=largest, update_chunk=CHUNK, overlap_update=False
    )
    if any(treatment.fate is Fate.OFFLOAD for treatment in treated):
        streaming = replace(streaming, offload_window=window, reload_window=window, host_activations=window)
    placements = tuple(Placement(block.name, Tier.HOST, Tier.HOST, Tier.HOST) for block in blocks)
    names = tuple(block.name for block in blocks)
    plan = Plan(
        "overhead",
        Budget(ROOM, ROOM),
        placements,
        streaming,
        device=ROOM,
        host=ROOM,
        disk=0,
        recompute=names if again else (),
        activations=(Selection(names, treated),) if treated else (),
    )
    device = CpuDevice(ROOM, brief=brief)
    try:
        return open_session(model, optimizer, bound, read_optimizer(optimizer), plan, device, owns_device=True)
    except BaseException:
        device.close()
        raise


def attached(model: nn.Module) -> Attachment:
    """What ``stream`` put on ``model``. Raises ``RuntimeError`` if there is nothing."""
    attachment = session_of(model)
    if attachment is None:
        raise RuntimeError("this model does not stream")
    return attachment


def close(model: nn.Module) -> None:
    """Ends what ``stream`` began."""
    attachment = attached(model)
    attachment.session.synchronize()
    attachment.detach()
    attachment.session.close()
