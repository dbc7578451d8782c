"""Updates ahead of their step: a block is updated while backward still runs, into its spare copy.

When the last gradient of a block has landed, everything that its update reads is there, but nobody knows yet whether
the update will be wanted: the gradients may still be clipped, the step skipped, another backward may follow. So the
update leaves the current copy of parameters and states as it is and writes the *spare* one (``store.BlockState``).
``optimizer.step()`` compares what it is asked for with what was done. Where they agree, the spare copy becomes the
current one; where they do not, the spare copy means nothing and the block is updated as it would have been.

Which gradient is the last is a forecast: a block's gradients land in a step as often as they did in the step before.
A forecast that fails costs time and changes no number, since only the comparison decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import final

from forebay.device.base import Completion
from forebay.errors import ConfigError
from forebay.runtime.applying import Task
from forebay.runtime.blockstate import BlockState
from forebay.runtime.updates import Updater

__all__ = ["Speculation", "SpeculationPolicy"]


@dataclass(frozen=True)
class SpeculationPolicy:
    """When a block stops to speculate, and when it tries again.

    After ``give_up`` speculations in a row that had to be redone it stops, and tries again ``retry`` steps later; a
    try that has to be redone stops it again at once.
    """

    give_up: int = 3
    retry: int = 50

    def __post_init__(self) -> None:
        for name, steps in (("give_up", self.give_up), ("retry", self.retry)):
            if steps < 1:
                raise ConfigError(f"{name} must be 1 step or more, got {steps}")


@dataclass(frozen=True)
class _Ahead:
    """An update into the spare copy: what it took for granted, and the completions at which it is over."""

    tasks: Mapping[str, Task]
    versions: Mapping[str, int]
    ends: tuple[Completion, ...]


@final
class _Record:
    """What is known of one block: the landings by parameter of its last step, how many speculations in a row had to be
    redone, and the step from which it speculates."""

    def __init__(self, state: BlockState) -> None:
        self.landings = dict.fromkeys(state.gradients, 1)
        self.misses = 0
        self.resume = 0


@final
class Speculation:
    """The updates ahead of their step, of all blocks that have a spare copy.

    ``speculated`` counts those that were queued, ``committed`` those that a step took over, ``redone`` those that a
    step did not. What is in none of the two was never asked for: a step that was skipped, values that were loaded.
    """

    def __init__(self, blocks: Iterable[BlockState], updater: Updater, policy: SpeculationPolicy) -> None:
        self._updater = updater
        self._policy = policy
        self._records = {state.block.name: _Record(state) for state in blocks if state.spare is not None}
        self._ahead: dict[str, _Ahead] = {}
        self._steps = 0
        self.speculated = 0
        self.committed = 0
        self.redone = 0

    def landed(self, state: BlockState, tasks_of: Callable[[BlockState], Mapping[str, Task]]) -> None:
        """A gradient of ``state`` has landed. If it was the last one of its step, as far as the step before tells, the
        update is queued. ``tasks_of`` says what a step would ask for if it came now."""
        record = self._records.get(state.block.name)
        if record is None or self._steps < record.resume:
            return
        if any(buffer.landings != record.landings[name] for name, buffer in state.gradients.items()):
            return
        tasks = tasks_of(state)
        self.drop(state)
        end = self._updater.submit(state, tasks, state.spare) if tasks and state.spare is not None else None
        if end is None or state.spare is None:
            return
        written = (state.spare.parameters.written, state.spare.states.written)
        # In memory all of them are one.
        ends = tuple(dict.fromkeys((end, *(completion for completion in written if completion is not None))))
        versions = {name: state.gradients[name].version for name in tasks}
        self._ahead[state.block.name] = _Ahead(tasks, versions, ends)
        self.speculated += 1

    def raise_failed(self, states: Mapping[str, BlockState]) -> None:
        """Raises the first error of the updates that have failed already. The current copies stand, all of them, and a
        step that is tried again works on them."""
        errors = []
        for name, ahead in tuple(self._ahead.items()):
            try:
                for end in ahead.ends:
                    if end.done():
                        end.wait()
            except BaseException as error:  # a lane's job may raise anything; it is the same for whoever waits
                self.drop(states[name])
                errors.append(error)
        if errors:
            raise errors[0]

    def commit(self, state: BlockState, tasks: Mapping[str, Task]) -> bool:
        """Whether the step that ``tasks`` describe has been made ahead; if so, its outcome is the current copy now."""
        record, ahead = self._records.get(state.block.name), self._ahead.get(state.block.name)
        if record is None or ahead is None:
            return False
        if ahead.tasks == tasks and all(state.gradients[n].version == v for n, v in ahead.versions.items()):
            del self._ahead[state.block.name]
            state.exchange()
            self.committed += 1
            record.misses = 0
            return True
        self.drop(state)
        self.redone += 1
        record.misses += 1
        if record.misses >= self._policy.give_up:
            record.resume = self._steps + 1 + self._policy.retry
        return False

    def drop(self, state: BlockState) -> None:
        """What was made ahead for ``state``, if anything, means nothing any more."""
        if self._ahead.pop(state.block.name, None) is not None and state.spare is not None:
            # Its writers may still run. Nobody waits for them, not even the next ones: those are on the same lanes, and
            # must not fail because these did.
            state.spare.parameters.written = state.spare.states.written = None

    def end_step(self, states: Mapping[str, BlockState]) -> None:
        """An optimizer step has been taken: the landings until now are those of a step."""
        self._steps += 1
        for name, record in self._records.items():
            gradients = states[name].gradients
            # A second step over the same gradients tells nothing about how often they land.
            if any(buffer.landings for buffer in gradients.values()):
                record.landings = {n: buffer.landings for n, buffer in gradients.items()}
            for buffer in gradients.values():
                buffer.landings = 0
