"""Where in the model a step is: which modules run, in which call of which block, and whose node of backward."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from forebay.profiler.attributes import Held
from forebay.profiler.parameter_uses import ParameterUses
from forebay.profiler.roots import Roots
from forebay.profiler.run_again import RunAgain
from forebay.runtime.passes import part_by_itself
from forebay.runtime.recompute import CACHES
from forebay.trace import Phase

__all__ = ["Position", "has_storage"]

Place = tuple[str, int]
"""A block, and the number of the call of its module: what a checkpoint around the module would recompute as one."""

OUTSIDE: Place = ("", 0)
"""The place of what runs in no block."""

Saving = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Hooks for saved tensors: what packs one, what unpacks it."""


@final
class Position:
    """Follows a step through the modules of its model. ``phase`` is the half of the step that runs."""

    def __init__(self, roots: Roots, parameters: ParameterUses, again: RunAgain) -> None:
        self._roots = roots
        self._parameters = parameters
        self._again = again
        self.phase = Phase.FORWARD
        self.module_failed = ""
        self._passes = False
        self._handles: list[RemovableHandle] = []
        # Modules whose forward is running, innermost last, each with its place.
        self._running: list[tuple[str, Place]] = []
        self._calls = 0
        # The module that runs again, for which hooks for saved tensors are on.
        self._saving: str | None = None
        # By call: how many ops of the step had run when the last tensor was saved in it.
        self.saved_last: dict[int, int] = {}
        # By call: the block, and the module of it that was called.
        self.began: dict[int, tuple[str, str]] = {}
        # By call: numbers of the tensors that own the storages of its arguments.
        self.given: dict[int, list[int]] = {}
        # By call: bytes of what was there before the step and it has put other tensors in the place of. By calls that
        # are not over: what their modules held.
        self.replaced: dict[int, int] = {}
        self._held: dict[int, Held] = {}
        # Which place it was when autograd made the nodes from a sequence number on.
        self._since: list[int] = [0]
        self._places: list[Place] = [OUTSIDE]
        self._latest = OUTSIDE

    # Hooks.

    def follow_root(self, root: nn.Module) -> None:
        """Hooks ``root``, so that it is known whether a part of it is called by itself."""

        def before(module: nn.Module, args: Any) -> None:
            self._passes |= torch.is_grad_enabled()

        self._handles.append(root.register_forward_pre_hook(before, prepend=True))

    def follow_modules(self, modules: Mapping[str, tuple[nn.Module, str]], saving: Saving) -> None:
        """Hooks ``modules`` (by name: the module and its block), so that ops are known by the block they run in.
        ``saving`` sees what is saved in one that runs again in backward."""
        for name, (module, block) in modules.items():
            self._handles.append(
                module.register_forward_pre_hook(self._enter(name, block, saving), prepend=True, with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(self._leave(name), always_call=True))

    def follow_askers(self, modules: Mapping[str, nn.Module]) -> None:
        """Hooks ``modules``, by name all that ask for a block, so that it is known whether one of them runs."""
        self._handles.extend(self._parameters.follow(modules))

    def remove_hooks(self) -> None:
        """Takes the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, name: str, block: str, saving: Saving) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.module_failed = ""
            if not self._passes and torch.is_grad_enabled():
                raise part_by_itself(module)
            if self._running and self._running[-1][1][0] == block:
                place = self._running[-1][1]  # a module inside that of the block: part of the same call
            else:
                place = self._call(name, block, module, args, kwargs)
            self._running.append((name, place))
            self._turn(place)
            self._save_again(name, saving)

        return enter

    def _call(self, name: str, block: str, module: nn.Module, args: Any, kwargs: Any) -> Place:
        """A new call of a block: its place."""
        if self._running:
            self._parameters.outside.add(block)  # a layer calls a module that is not inside of it
        if self.phase is Phase.BACKWARD:
            self._again.called(block)
        self._calls += 1
        self.given[self._calls] = self._arguments(args, kwargs)
        self.began[self._calls] = block, name
        if self.phase is Phase.FORWARD:
            self._held[self._calls] = Held(module)
        return block, self._calls

    def _save_again(self, name: str, saving: Saving) -> None:
        """A module that is run again in backward by a reentrant checkpoint saves what it saves by way of hooks, too, as
        it does under a plan (``runtime/saving_scope.py``)."""
        backward = self.phase is Phase.BACKWARD and torch.is_grad_enabled()
        if backward and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            torch._C._autograd._push_saved_tensors_default_hooks(*saving)
            self._saving = name

    def _leave(self, name: str) -> Any:
        # Called after an exception too: a checkpoint ends its recomputation with one.
        def leave(module: nn.Module, args: Any, output: Any) -> None:
            if output is None and not self.module_failed:
                self.module_failed = name
            if self._saving == name:
                torch._C._autograd._pop_saved_tensors_default_hooks()
                self._saving = None
            if self._running and self._running[-1][0] == name:
                self._left(self._running.pop()[1][1])
            self._turn(self.place)

        return leave

    def _left(self, call: int) -> None:
        """A module of ``call`` has returned, which may be the one that was called."""
        if call in self._held and not (self._running and self._running[-1][1][1] == call):
            found = [self._roots.find(one) for one in self._held.pop(call).replaced() if has_storage(one)]
            roots = {place[0].number: place[0] for place in found if place is not None}
            self.replaced[call] = sum(root.nbytes for root in roots.values() if root.source is not None)

    def _arguments(self, args: Any, kwargs: Any) -> list[int]:
        # Not what a cache holds: a recomputation remembers that and does not keep it (``runtime/recompute.py``).
        leaves = tree_leaves((args, {name: value for name, value in kwargs.items() if name not in CACHES}))
        found = [self._roots.find(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and has_storage(leaf)]
        return [place[0].base for place in found if place is not None]

    # Places.

    def _turn(self, place: Place) -> None:
        self._roots.call = place[1]
        if self._places[-1] != place:
            self._since.append(_get_sequence_nr())
            self._places.append(place)

    @property
    def running(self) -> list[str]:
        """The modules that run, of those that own parameters or are blocks, innermost last."""
        return [name for name, _ in self._running]

    @property
    def module(self) -> str:
        """The innermost of them; "" outside of all."""
        return self._running[-1][0] if self._running else ""

    @property
    def place(self) -> Place:
        """Where the step is now: the place of the innermost module, or in backward that of the node's forward."""
        if self._running:
            return self._running[-1][1]
        if self.phase is Phase.FORWARD:
            return OUTSIDE
        node: Any = torch._C._current_autograd_node()  # None between nodes, whatever its annotation says
        if node is None:
            return OUTSIDE
        number = node._sequence_nr()
        if number >= _get_sequence_nr():  # accumulation into .grad: part of what ran before it
            return self._latest
        return self._places[bisect_right(self._since, number) - 1]

    def place_of_op(self) -> Place:
        """The place of an op that has just run."""
        self._latest = place = self.place
        if self.phase is Phase.BACKWARD:
            # A recomputation inside backward makes nodes of its own, which belong to the block that is recomputed.
            self._turn(place)
        return place

    def saves(self, ops: int) -> None:
        """Autograd saves a tensor; ``ops`` of the step have run."""
        if self._running:
            self.saved_last[self._running[-1][1][1]] = ops

    def begin_backward(self) -> None:
        """Forward and loss are done."""
        self._running.clear()
        self.phase = Phase.BACKWARD


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether it is of a kind whose storage can be followed."""
    return type(tensor) in (FakeTensor, nn.Parameter, torch.Tensor) and tensor.layout is torch.strided
