"""Blocks whose activations are dropped in forward and made again in backward.

torch's non-reentrant checkpoint, driven from a forward pre-hook and a forward hook as
``torch.distributed._composable.checkpoint_activation`` does it: module and forward stay as they are. Random number
generators and autocast are restored, and the recomputation stops as soon as it has made what backward needs. The order
of things inside one call of a block's module is

    parameters exposed, region opened, the user's pre-hooks, forward, region closed, the user's hooks, parameters hidden

so that what the region replays begins with the arguments that the caller gave, and the checkpoint's saved-tensor hooks
are the innermost ones in between. The recomputation is an ordinary call of the module: it exposes and hides
the parameters again, and what it saves of them holds a lease of the slot until backward has read it.

Ops of the block that the plan names do not run again (``selective.py``): the region sees them in forward, and gives
what they made to the recomputation. A forward must do the same things twice; where it is seen not to, backward ends
with a ``ModelError`` that names the block. Buffers and attributes, and what is inside of these and of objects among its
arguments, are what they were (``surroundings.py``); what it does beside that, such as printing, it does twice.

A block inside a checkpoint of the model's own is left to that one: its hooks are the innermost then. A checkpoint
inside the block nests: same numbers, but the block is computed once more; choose one of the two.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import (
    CheckpointError,
    _checkpoint_without_reentrant_generator,
    _Holder,
    _StopRecomputationError,
    noop_context_fn,
)
from torch.utils.hooks import RemovableHandle

from forebay.device.base import Watch
from forebay.device.compiling import outside_of_graphs
from forebay.errors import ModelError
from forebay.runtime.backward_end import when_backward_ends
from forebay.runtime.inside import has_inside
from forebay.runtime.saved import SavedTensors
from forebay.runtime.selective import Choice, Mover, Record, Replay, not_the_same
from forebay.runtime.surroundings import Surroundings
from forebay.treatments import Treatment

__all__ = ["Recomputation"]

Around = Callable[[str, Callable[[], Any]], None]
Region = Generator[None, None, None]

CACHES = frozenset({"layer_past", "past_key_value", "past_key_values"})
"""Arguments that a layer's forward changes: it appends its keys and values to them. So it does with a cache of
transformers' own (``CACHE``), by whatever name it is called: that is another from one release to the next."""

CACHE = "transformers.cache_utils", "Cache"
"""Module and name of the class that all of these are of. It is not imported: models need no transformers."""


@final
class Recomputation:
    """The regions of one model whose activations are recomputed.

    ``comes`` is called when backward asks for what a block saved, ``around`` with the block's name and the function
    that computes it again. What named ops make and stays on the device is told to ``watch``; ``mover`` takes what does
    not (None: it stays, too).
    """

    def __init__(
        self, saved: SavedTensors, comes: Callable[[], None], around: Around, watch: Watch, mover: Mover | None
    ) -> None:
        self._saved = saved
        self._comes = comes
        self._around = around
        self._watch = watch
        self._mover = mover
        # Modules whose forward is running, innermost last, each with its region (None: not recomputed this time).
        self._open: list[tuple[nn.Module, Region | None]] = []
        # Recomputations under way, innermost last: the module, and what is given out of the forward's record from its
        # call on (None: nothing, or it has begun).
        self._again: list[tuple[nn.Module, Replay | None]] = []

    def attach(
        self,
        block: str,
        module: nn.Module,
        treatments: Sequence[Treatment] = (),
        beside: Sequence[nn.Module] = (),
        *,
        compiled: bool = False,
    ) -> list[RemovableHandle]:
        """Puts the hooks on ``module``; ``compiled``: it is, and stays so. To be followed by the pre-hook that exposes
        its parameters, prepended. ``beside``: as for ``Surroundings``."""
        accepted = inspect.signature(module.forward).parameters
        caches = {name: place for place, name in enumerate(accepted) if name in CACHES}
        choice = Choice(block, treatments, compiled=compiled)
        surroundings = Surroundings(block, module, self._watch, beside, compiled=compiled)
        before: Any = partial(self._before, choice, surroundings, caches)
        after: Any = self._after
        if compiled:
            before, after = outside_of_graphs(before), outside_of_graphs(after)
        return [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            # always_call: an exception in forward must take the saved-tensor hooks off too.
            module.register_forward_hook(after, prepend=True, always_call=True),
        ]

    def abandon(self) -> None:
        """Closes what an interrupt left open, the innermost first: saved-tensor hooks are a stack."""
        while self._open:
            _, region = self._open.pop()
            if region is not None:
                region.close()

    def _before(
        self,
        choice: Choice,
        surroundings: Surroundings,
        caches: Mapping[str, int],
        module: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> None:
        region: Region | None = None
        if self._again and self._again[-1][0] is module:
            # From here on, as in forward: what exposed the parameters is not the block's.
            replay = self._again[-1][1]
            self._again[-1] = module, None
            region = replay.running() if replay is not None else None
        elif torch.is_grad_enabled() and self._saved.innermost():
            region = self._region(choice, surroundings, module, _rewindable(args, kwargs, caches))
        if region is not None:
            next(region)
        self._open.append((module, region))

    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._open or self._open[-1][0] is not module:
            return  # its pre-hook did not come as far as opening
        _, region = self._open.pop()
        if region is not None:
            # Ends the region after a forward that failed, too; the graph that would be recomputed is gone with it.
            next(region, None)

    def _region(
        self, choice: Choice, surroundings: Surroundings, module: nn.Module, arguments: tuple[Any, Any]
    ) -> Region:
        leaves, spec = tree_flatten(arguments)
        # As positions, keyword arguments included: those go through the saved-tensor hooks around the region, and
        # their devices are the ones whose random number generators are restored.
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[i] for i in places]
        for i in places:
            leaves[i] = None
        found = surroundings.begin([one for one in leaves if has_inside(one) and not isinstance(one, _Cache)])
        record = Record(choice, self._watch, self._mover, lambda: bool(self._again), found)
        holders: list[weakref.ref[_Holder]] = []

        def again(*unpacked: torch.Tensor) -> None:
            filled = list(leaves)
            for i, tensor in zip(places, unpacked, strict=True):
                filled[i] = tensor
            args, kwargs = _rewound(tree_unflatten(filled, spec))
            _let_go_at_the_end(holders)
            with found.again(), self._replaying(module, Replay(record)), _as_they_are_now(self._saved):
                self._around(choice.block, lambda: module(*args, **kwargs))

        checkpoint: Region = _checkpoint_without_reentrant_generator(
            again, True, noop_context_fn, "default", False, True, *tensors
        )
        next(checkpoint)
        try:
            with _explained(choice.block, record, holders, self._comes):
                yield from record.running()
            found.end()
            next(checkpoint, None)
        finally:
            checkpoint.close()

    @contextmanager
    def _replaying(self, module: nn.Module, replay: Replay) -> Iterator[None]:
        """The next call of ``module`` is the recomputation that ``replay`` is for."""
        depth = len(self._open), len(self._again)
        self._again.append((module, replay))
        try:
            yield
            replay.ended(early=False)
        except _StopRecomputationError:
            replay.ended(early=True)
            raise
        finally:
            # After an interrupt no after-hook was called.
            while len(self._open) > depth[0]:
                _, region = self._open.pop()
                if region is not None:
                    region.close()
            del self._again[depth[1] :]


@contextmanager
def _explained(
    block: str, record: Record, holders: list[weakref.ref[_Holder]], comes: Callable[[], None]
) -> Iterator[None]:
    """The checkpoint's own saved-tensor hooks, with every save noted in ``record``, what stands for it in ``holders``,
    with ``comes`` called when one is asked for, and with errors for users."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def noted(tensor: torch.Tensor) -> Any:
        record.saved()
        holder: _Holder = pack(tensor)
        holders.append(weakref.ref(holder))
        return holder

    def explained(packed: Any) -> Any:
        comes()  # here, where gradients are on only if backward is differentiated: around ``again`` they always are
        try:
            return unpack(packed)
        except CheckpointError as error:
            raise ModelError(not_the_same(block, _first_line(error))) from error

    with saved_tensors_hooks(noted, explained):
        yield


def _let_go_at_the_end(holders: Sequence[weakref.ref[_Holder]]) -> None:
    """What is made again in this backward and nobody asks for, as with ``backward(inputs=...)`` or where it raises,
    goes with its end, and not with the graph: it may be a view of a slot. A later backward of the same graph makes it
    again."""
    backward = torch._C._current_graph_task_id()

    def let_go() -> None:
        for reference in holders:
            holder = reference()
            if holder is not None:
                holder.handles.pop(backward, None)

    if backward != -1:
        when_backward_ends(let_go)


@contextmanager
def _as_they_are_now(saved: SavedTensors) -> Iterator[None]:
    """The saved-tensor hooks of a recomputation. They keep a frozen parameter as the object that it is, and that points
    elsewhere when its block is hidden, before backward reads it: so they are given its present tensor. What compiled
    code saves is told to ``saved``."""
    pack, unpack = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def present(tensor: torch.Tensor) -> Any:
        saved.unseen.saved(tensor)
        return pack(tensor.detach() if isinstance(tensor, nn.Parameter) else tensor)

    with saved_tensors_hooks(present, unpack):
        yield


def _first_line(error: CheckpointError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:4]).removeprefix("torch.utils.checkpoint: ")


# Caches. A layer appends to its cache, so that running it a second time needs the cache as it was before the first.


@final
class _Cache:
    """A cache as it was: its structure copied, its tensors remembered and not kept. Keeping them would keep the keys
    and values of every layer, which is what the recomputation is there to avoid; a layer reads its own only. Single
    numbers (the width of a window) are kept: a layer reads those before it has any keys, and the loop may have let go
    of the cache by then."""

    def __init__(self, cache: object) -> None:
        with _Weaken():
            self._copy = copy.deepcopy(cache)

    def value(self) -> Any:
        """The cache again. A tensor that is gone is a tensor without values, which no computation passes for one."""
        return copy.deepcopy(self._copy)


@final
class _Remembered:
    """The place of a tensor in a ``_Cache``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._number = tensor if _is_number(tensor) else None  # held, and so there
        self._absent = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        tensor = self._tensor()
        return self._absent if tensor is None else tensor


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a single number, and no view of anything larger."""
    return tensor.numel() == 1 and tensor.untyped_storage().nbytes() == tensor.element_size()


@final
class _Weaken(TorchFunctionMode):
    """Makes a deep copy remember tensors in the place of copying them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__:
            return _Remembered(args[0])
        return func(*args, **(kwargs or {}))


def _rewindable(args: Any, kwargs: Any, caches: Mapping[str, int]) -> tuple[Any, Any]:
    """The arguments, with a ``_Cache`` in the place of every cache."""
    places = set(caches.values())
    held = tuple(_remember(a) if place in places or _is_cache(a) else a for place, a in enumerate(args))
    return held, {name: _remember(a) if name in caches or _is_cache(a) else a for name, a in kwargs.items()}


def _is_cache(value: object) -> bool:
    return any((kind.__module__, kind.__name__) == CACHE for kind in type(value).__mro__)


def _remember(value: object) -> object:
    # Tuples of tensors, as older models have them, cannot be changed; tensors in them are ordinary arguments.
    return value if value is None or isinstance(value, torch.Tensor | tuple) else _Cache(value)


def _rewound(arguments: tuple[Any, Any]) -> tuple[Any, Any]:
    args, kwargs = arguments
    return (
        tuple(a.value() if isinstance(a, _Cache) else a for a in args),
        {n: a.value() if isinstance(a, _Cache) else a for n, a in kwargs.items()},
    )
