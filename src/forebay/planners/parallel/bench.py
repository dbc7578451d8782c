"""What the stages of a model take of the devices of a server."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from forebay.errors import CannotServe, ConfigError, DoesNotFit
from forebay.memory import Tier
from forebay.planners.bench import Bench
from forebay.planners.states.drafting import cannot_serve, expect_trace
from forebay.remedies import Remedy
from forebay.servers import Server
from forebay.simulation.stages import Stage, block_stages, stages_of
from forebay.units import format_apart, format_enough

__all__ = ["ServerBench"]


@final
class ServerBench:
    """Sizes the stages of the model of ``bench``, whose problem is that of one device of ``server`` and of a
    micro-batch, with the host's limit for all. Each device has ``each`` micro-batches in a step: so many pass a
    pipeline for each of its devices.

    Bytes are those of the trace itself, with balanced routes. Raises ``ConfigError`` without a batch, and for no
    micro-batch.
    """

    def __init__(self, bench: Bench, server: Server, each: int) -> None:
        expect_trace(bench, "for several devices", "what each block makes and how long it takes")
        if each < 1:
            raise ConfigError(f"each device has one micro-batch or more, got {each}")
        self.bench = bench
        self.server = server
        self.each = each
        self.costs = bench.costs
        self.layers = block_stages(self.costs)
        self._blocks = {block.name: block for block in bench.model.blocks}
        profile = None if bench.liveness is None else bench.liveness.profile()
        self._live: tuple[int, ...] = () if profile is None else profile.during
        # Outputs of the pass before are on the device that has the end of the model.
        self._with_outputs: tuple[int, ...] = () if profile is None else profile.with_outputs
        self._levels: list[int] = (
            [] if profile is None else [sum(kinds) for kinds in zip(*profile.levels.values(), strict=True)]
        )

    @property
    def micro_batches(self) -> int:
        """Of a step, on all devices together."""
        return self.each * self.server.devices

    @property
    def limit(self) -> int:
        """Bytes that each device may hold."""
        return self.bench.problem.limit(Tier.DEVICE)

    def expect_several(self, policy: str, why: str, alone: str) -> None:
        """Raises ``CannotServe`` for one device: ``policy`` does ``why``; ``alone`` says what would do for one."""
        if self.server.devices < 2:
            more = Remedy("devices", 0, 0, f"{policy} on two devices or more (--devices 2)")
            raise cannot_serve(policy, f"{why}, and there is one device", alone, more)

    def stages(self, policy: str, count: int) -> tuple[Stage, ...]:
        """The model in ``count`` stages. Raises ``CannotServe`` where it has fewer blocks."""
        if count > len(self.layers):
            raise self._too_few(policy, count)
        return stages_of(self.costs, count)

    def _too_few(self, policy: str, count: int) -> CannotServe:
        blocks = len(self.layers)
        fewer = Remedy("devices", 0, 0, f"{blocks} devices or fewer (--devices {blocks})")
        return cannot_serve(
            policy,
            f"has a stage of a block or more on each of {count} devices, and the model has {blocks}",
            "tmo, whose devices have all of the model each",
            fewer,
        )

    def standing(self, stage: Stage) -> int:
        """Bytes of parameters, gradients, optimizer states and buffers, of a stage that stays."""
        states = sum(self.costs.states(self._blocks[name]) for name in stage.blocks)
        return stage.parameters + stage.gradients + states + self.beside

    @property
    def beside(self) -> int:
        """Bytes of buffers and workspaces, and of the inputs of a micro-batch, wherever they are used."""
        return self.costs.trace.outside_nbytes

    def saved(self, stage: Stage, before: Stage | None) -> int:
        """Bytes of a micro-batch that are held from the forward of ``stage`` to its backward, with what it is given by
        the one ``before``."""
        first, end = stage.spans[0]
        return self._levels[end] - self._levels[first] + (0 if before is None else before.handed)

    def passing(self, stage: Stage) -> int:
        """The most bytes that a pass of ``stage`` takes beside what is saved: temporaries, gradients of activations.

        What is live in the step of the whole model, without what the stages before have saved there, and, in backward,
        without what those behind have left (results of the model, which are on the last device), but for the gradient
        that this one is given.
        """
        (first, end), (begin, last) = stage.spans
        of = self._with_outputs if end == self.layers[-1].spans[0][1] else self._live
        left = max(0, self._levels[begin] - self._levels[end])
        forward = max(of[first:end], default=0) - self._levels[end]
        backward = max(of[begin:last], default=0) - self._levels[end] - left + min(left, stage.handed)
        return max(0, forward, backward)

    def host_states(self) -> int:
        """Bytes of the host that all parameters, gradients and states take at home."""
        blocks = self.bench.model.blocks
        return sum(b.nbytes + b.gradient_nbytes + self.costs.states(b) for b in blocks)

    def expect_host(self, policy: str, needed: int) -> None:
        """Raises ``DoesNotFit`` where the host has no room for ``needed`` bytes."""
        limit = self.bench.problem.limit(Tier.HOST)
        if needed > limit:
            raise self.refusal(policy, Tier.HOST, needed, limit, "for all that is at home there")

    def refusal(self, policy: str, tier: Tier, needed: int, limit: int, where: str, *more: str) -> DoesNotFit:
        """``policy`` needs so many bytes of a tier, ``where`` says for what; ``more`` would do too."""
        words, allowed = format_apart(needed, limit)
        remedies = [Remedy(tier.value, needed, limit, f"{tier.value}_memory {format_enough(needed)}")]
        remedies += [Remedy("policy", 0, 0, one) for one in more]
        instead = "; or ".join(remedy.words for remedy in remedies)
        text = f"{tier.value} memory: policy {policy} needs {words} {where}, and {allowed} are allowed"
        return DoesNotFit(
            f"{text}. What would fit: {instead}", tier=tier.value, needed=needed, allowed=limit, nearest=tuple(remedies)
        )

    def parts(self, stages: Iterable[Stage]) -> list[tuple[Stage, ...]]:
        """The single blocks of each of ``stages``, which are all of the model."""
        found, at = [], 0
        for stage in stages:
            found.append(self.layers[at : at + len(stage.blocks)])
            at += len(stage.blocks)
        return found
