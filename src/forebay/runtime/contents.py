"""What is at home in a prepared model, by plain PyTorch name: parameters, gradients, the optimizer's states.

Read and written one parameter at a time, whatever tier it is in; the interface, ``state_dict``, loading and the
optimizer's own state go through here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import nn
from torch.autograd.graph import increment_version

from forebay.errors import OptimizerError, SessionClosed
from forebay.layout import MASTER, RESIDUAL, in_order
from forebay.model import Model, Parameter
from forebay.plans import Update
from forebay.runtime.blockstate import BlockState
from forebay.runtime.gradients import host_copy
from forebay.runtime.sparse import forget
from forebay.runtime.stepping import Stepping
from forebay.runtime.store import Store
from forebay.runtime.tensors import alone, flat, shaped, state_flat, state_shaped
from forebay.scheduling.slots import SlotPool
from forebay.states import Masters, form_of, plain_name

__all__ = ["Contents", "LazyTensors"]


@final
class Contents:
    """The values of a session. ``settle`` waits for every transfer and update; ``unwritten`` are the parameters that
    have no values yet (the model came on the meta device)."""

    def __init__(
        self,
        model: Model,
        parameters: Mapping[str, nn.Parameter],
        store: Store,
        pool: SlotPool,
        stepping: Stepping,
        settle: Callable[[], None],
    ) -> None:
        self._parameters = parameters
        self._store = store
        self._pool = pool
        self._stepping = stepping
        self._settle = settle
        self._block_of = {p.name: b.name for b in model.blocks for p in b.parameters}
        self.spec_of = {p.name: p for b in model.blocks for p in b.parameters}
        self.unwritten = set[str]()
        self._process = os.getpid()

    def expect_here(self) -> None:
        """Raises ``SessionClosed`` in a forked child: it has no threads, and no pages of an arena (``tiers.pages``)."""
        if os.getpid() != self._process:
            raise SessionClosed(
                f"the model was prepared in process {self._process}, and its parameters are not in this one, which was "
                f"forked from that; use it there, and give other processes copies that were made there, of what "
                f"model.state_dict() has, say"
            )

    def expect_written(self) -> None:
        """Raises ``SessionClosed`` while a parameter has no values."""
        if self.unwritten:
            name = min(self.unwritten)
            raise SessionClosed(
                f"{len(self.unwritten)} parameters have no values yet ({name}, ...): the model was prepared on the "
                f"meta device, or a checkpoint was not read to its end; call forebay.load(model, folder), "
                f"forebay.initialize(model) or forebay.resume(...) first"
            )

    def state(self, name: str) -> BlockState:
        """The block of a parameter: its homes and its gradients. Raises ``SessionClosed`` when these are gone."""
        self.expect_here()
        state = self._store.blocks.get(self._block_of[name])
        if state is None:
            raise SessionClosed(f"the model was closed, and its parameters are its own again: read {name} there")
        return state

    def full_precision(self, name: str) -> torch.Tensor:
        """A copy of a parameter on the host, its fp32 master if it has one."""
        self._expect_readable(name)
        return self._store.full_precision(self._block_of[name], self.spec_of[name])

    def full_precision_parts(self, name: str) -> Iterator[torch.Tensor]:
        """``full_precision`` in the order of its elements, part by part (1-D), each to be used before the next one is
        asked for. All of it is one where the elements do not lie in order."""
        self._expect_readable(name)
        spec = self.spec_of[name]
        if in_order(spec):
            yield from self._store.full_precision_parts(self._block_of[name], spec)
        else:
            yield self._store.full_precision(self._block_of[name], spec)

    def _expect_readable(self, name: str) -> None:
        """Before states are looked at. Raises where the block is between two steps."""
        self._stepping.in_backward.expect_whole()
        if self.state(name).placement.update is Update.STORAGE:
            # They are looked at in the memory through which updates of other blocks pass: none may be under way.
            self._settle()

    def value(self, name: str) -> torch.Tensor:
        """A parameter in its own dtype, as it is at home: the bytes themselves unless they are on disk."""
        self.expect_here()
        return alone(self._store.value(self._block_of[name], self.spec_of[name]))

    def gradient(self, name: str) -> torch.Tensor | None:
        """A copy of a parameter's gradient on the host; None if it has none."""
        gradient = self._parameters[name].grad
        return None if gradient is None else host_copy(gradient)

    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Sets parameters (plain names; shape of the parameter) at home, block by block. Values may be read when they
        are asked for (``LazyTensors``): each is, once."""
        self._stepping.in_backward.expect_whole()
        self._settle()
        names = frozenset(values)
        self._changed(names)
        self.unwritten |= names  # until all are there: where one cannot be read, its block has some of each
        for block in dict.fromkeys(self._block_of[name] for name in values):
            self._pool.invalidate(block)
            self._stepping.speculation.drop(self._store.blocks[block])
            self._store.fill(block, names, lambda p: values[p.name])
        self.unwritten -= names

    @contextmanager
    def replacing(self) -> Iterator[Mapping[str, BlockState]]:
        """Has every parameter and state replaced at home: gives all blocks. They have no values until the end, and none
        at all where that is not reached."""
        self._settle()
        self._stepping.forget()
        self.unwritten |= set(self._parameters)
        for block, state in self._store.blocks.items():
            self._pool.invalidate(block)
            self._stepping.speculation.drop(state)
            state.settle_save()
            if state.target is not state.current:
                state.turn()  # a checkpoint has the current copy; what is written is the other one, whole
        self._changed(self._parameters)
        yield self._store.blocks
        self.unwritten.clear()

    def _changed(self, names: Iterable[str]) -> None:
        """Parameters have other values now: what forward has read is not there any more for a backward that comes."""
        increment_version([self._parameters[name] for name in names])

    def whole(self) -> Mapping[str, BlockState]:
        """All blocks, when every update that was asked for is queued. Raises ``SessionClosed`` while a parameter has no
        values, and ``GradientUsedUp`` while some blocks are updated and others are not."""
        self.expect_written()
        self._stepping.in_backward.expect_whole()
        self._stepping.show()
        for state in self._store.blocks.values():
            state.queue_deferred()
        return self._store.blocks

    def complete(self) -> Mapping[str, BlockState]:
        """``whole``, when every update is at home, to be read there before the next step."""
        self.expect_written()
        self._stepping.in_backward.expect_whole()
        self._settle()
        return self.whole()

    def read_states(self, name: str) -> dict[str, torch.Tensor]:
        """Copies of the states of one parameter, with ``step``; empty before its first step. Those with a value for
        every element are in the parameter's shape, codes and scales in one dimension. What no update has had of its
        gradient, where that does not go whole, is among them."""
        self._expect_readable(name)
        self._stepping.show()
        state, spec = self.state(name), self.spec_of[name]
        steps = state.steps.get(name, 0)
        if not steps:
            return {}
        streams = {}
        for stream, values in state.gathered(state.streams_of(spec), spec).items():
            streams[plain_name(stream)] = state_shaped(values, stream, spec)
        if name in state.residuals:
            streams[RESIDUAL] = shaped(state.residuals[name], spec).clone()
        return {"step": torch.tensor(float(steps), dtype=torch.float32, device="cpu"), **streams}

    def write_states(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replaces the states of the parameters named; an empty mapping stands for "no step yet". Raises
        ``OptimizerError`` for what of a gradient no update has had where gradients go whole, or of another shape."""
        for name, saved in states.items():
            self._expect_residual(name, saved.get(RESIDUAL))
        self._stepping.in_backward.expect_whole()
        self._settle()
        self._stepping.show()
        for block in dict.fromkeys(self._block_of[name] for name in states):
            state = self._store.blocks[block]
            self._stepping.speculation.drop(state)
            if state.layout.masters is Masters.LOWER:
                self._pool.invalidate(block)  # of a master that is given the upper half is the parameter
            self._store.write_apart(state)
            named = [spec for spec in state.block.parameters if spec.trainable and spec.name in states]
            with state.upper_halves_edited() as upper:
                state.write_streams({spec.name: _streams(state, spec, states[spec.name]) for spec in named}, upper)
            for spec in named:
                _write_beside(state, spec, states[spec.name])

    def _expect_residual(self, name: str, saved: torch.Tensor | None) -> None:
        if saved is None:
            return
        if name not in self.state(name).residuals:
            raise OptimizerError(
                f"the saved states of {name} have what of its gradients no update has had yet ({RESIDUAL}), and under "
                f"this plan they go whole; prepare the model with policy='smart-infinity-compressed', or leave that out"
            )
        if tuple(saved.shape) != self.spec_of[name].shape:
            shapes = tuple(saved.shape), self.spec_of[name].shape
            raise OptimizerError(f"the saved {RESIDUAL} of {name} has shape {shapes[0]}, and the parameter {shapes[1]}")


def _streams(state: BlockState, spec: Parameter, saved: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The streams of ``spec`` that ``saved`` states mean, 1-D."""
    made = {}
    for stream in state.streams_of(spec):
        value = saved.get(plain_name(stream))
        if value is not None:
            made[stream] = state_flat(value, stream, spec)
        elif stream != MASTER:  # a plain optimizer keeps no master: the one made from the parameter stands
            made[stream] = torch.zeros(1, dtype=torch.float32, device="cpu").expand(form_of(stream).count_for(spec))
    return made


def _write_beside(state: BlockState, spec: Parameter, saved: Mapping[str, torch.Tensor]) -> None:
    """Sets what of the ``saved`` states of ``spec`` is in no stream."""
    if spec.name in state.residuals:
        residual = forget(state.residuals[spec.name])
        if RESIDUAL in saved:
            residual.copy_(flat(saved[RESIDUAL], spec))
    # SGD keeps no count; that it has a momentum at all says that it has taken a step.
    state.steps[spec.name] = int(saved["step"]) if "step" in saved else int(bool(saved))


@final
class LazyTensors(Mapping[str, torch.Tensor]):
    """Name to tensor, read when it is asked for: one tensor at a time is in memory."""

    def __init__(self, names: Sequence[str], read: Callable[[str], torch.Tensor | None]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._read(name) if name in self._names else None
        if tensor is None:
            raise KeyError(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
