"""What the forward of a recomputed block finds in its modules, so that its second run in backward finds the same.

Arguments and torch's random numbers are the checkpoint's to bring back. This is about what is in the modules
themselves, and about numbers that are drawn elsewhere:

buffers      a forward that changes a buffer and computes with it (a running mean, a codebook) has to begin again with
             what was there before, so a copy of that is kept until backward has let go of the block. In the first
             forward with a buffer, in the modes that the block is in, ops are seen, and the copy is made in front of
             the first that writes to the buffer. Where it was needed, it is made from then on when a forward begins.
modes        ``train()`` or ``eval()``, module by module, and which parameters require a gradient: in the second run
             they are set as they were, and put back after it.
attributes   those that the forward has set to something else, and what is in lists, dicts and objects among them, are
             in the second run what they were (``attributes.py``).
numbers      of a block that draws from Python's or NumPy's generator, or from one in an attribute, which its first
             forward shows, what these were is kept when a forward begins, and they are put back for the second run.
parameters   their values are not kept. Where they were changed since (by ``optimizer.step()``, by
             ``load_state_dict``), plain PyTorch refuses the backward, and so is it here.

That a buffer was changed is told by the ops that are seen, by torch's own count of changes in place, and by the storage
that it has. The count alone would not do: ``buffer.data`` has one of its own, and ops on lists of tensors
(``torch._foreach_lerp_``) are not counted while ops are seen. The running statistics of a batch norm, which it only
writes and torch does not count either (``uncounted.py``), are copied where some other op of the forward reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from forebay.device.base import Watch
from forebay.device.ledger import plain_tensors
from forebay.errors import ModelError
from forebay.memory import Kind
from forebay.runtime.attributes import Attributes, FoundAttributes, storage_key, version_of
from forebay.runtime.generators import HostNumbers, drawn_so_far
from forebay.runtime.saved import modified
from forebay.runtime.uncounted import updated_uncounted

__all__ = ["Found", "Surroundings"]


@final
@dataclass(slots=True)
class _Buffer:
    """A buffer as a forward found it: ``name`` in the block, the tensor, its ``storage``, torch's count of changes to
    it, and what it held (None: no copy of that). ``then``: another tensor over the same storage, in a forward whose ops
    are seen. ``read``, ``written`` and ``updated``: what ops were seen to do, the last without saying so."""

    name: str
    tensor: torch.Tensor
    storage: int | None
    version: int
    content: torch.Tensor | None
    then: torch.Tensor | None
    read: bool = False
    written: bool = False
    updated: bool = False

    @property
    def is_counted(self) -> bool:
        """Whether torch has counted a change."""
        return version_of(self.tensor) != self.version

    @property
    def is_moved(self) -> bool:
        """Whether it has another storage now (``buffer.data = ...``), and what it held is where it was."""
        return storage_key(self.tensor) != self.storage

    def changed_unseen(self) -> bool:
        """Whether it holds something else than what was copied of it, if it was."""
        return self.content is not None and not torch.equal(self.content, self.tensor)


@final
class Surroundings:
    """Those of one block's module, and of the modules in it; of modules ``beside`` it their attributes alone.
    ``compiled``: it has no ops to be seen, and a buffer of which nothing is known is copied when a forward begins."""

    def __init__(
        self, block: str, module: nn.Module, watch: Watch, beside: Sequence[nn.Module] = (), *, compiled: bool = False
    ) -> None:
        self.block = block
        self.compiled = compiled
        self.parameters = tuple(module.named_parameters())
        self.modules = tuple(module.named_modules())
        self._attributes = Attributes([inner for _, inner in self.modules], beside, compiled=compiled)
        self._watch = watch
        # By the modes of all modules: whether forwards in these have changed a buffer.
        self._changed: dict[tuple[bool, ...], dict[str, bool]] = {}
        # The same, whether they have drawn from Python's or NumPy's generator, or from one of the modules' own.
        self.draws: dict[tuple[bool, ...], bool] = {}

    def begin(self, arguments: Sequence[Any]) -> Found:
        """A forward begins. ``arguments``: what it is called with that may have something inside."""
        modes = tuple([module.training for _, module in self.modules])
        known = self._changed.setdefault(modes, {})
        found = [(m, self._buffers(prefix, m, known)) for prefix, m in self.modules if m._buffers]
        attributes = self._attributes.begin(modes, arguments)
        numbers = HostNumbers(attributes.generators) if self.draws.get(modes, True) else None
        return Found(self, modes, found, known, attributes, numbers)

    def copy(self, buffer: torch.Tensor) -> torch.Tensor:
        """What ``buffer`` holds, to be kept."""
        copy = buffer.detach().clone()
        self._watch.attribute(copy, Kind.ACTIVATION)
        return copy

    def keeps(self, copy: torch.Tensor) -> None:
        """``copy``, of which no account knows, is kept."""
        self._watch.count(copy, Kind.ACTIVATION)

    def _buffers(self, prefix: str, module: nn.Module, known: Mapping[str, bool]) -> dict[str, _Buffer | None]:
        """Those of ``module`` itself, by the name that they have there (None: it is None), with a copy of what is
        ``known`` to change."""
        found: dict[str, _Buffer | None] = {}
        for own, buffer in module._buffers.items():
            if buffer is None:
                found[own] = None
                continue
            name = f"{prefix}.{own}" if prefix else own
            content = self.copy(buffer) if known.get(name, self.compiled) else None
            then = None if name in known else buffer.detach()
            found[own] = _Buffer(name, buffer, storage_key(buffer), version_of(buffer), content, then)
        return found


@final
class Found:
    """What one forward of a block found, in ``modes``: the ``buffers`` of every module that has any, ``attributes``,
    and ``numbers`` (None: forwards in the same modes have drawn none). ``known`` says which buffers these have
    changed."""

    def __init__(
        self,
        surroundings: Surroundings,
        modes: tuple[bool, ...],
        buffers: Sequence[tuple[nn.Module, Mapping[str, _Buffer | None]]],
        known: dict[str, bool],
        attributes: FoundAttributes,
        numbers: HostNumbers | None,
    ) -> None:
        self._around = surroundings
        self._attributes = attributes
        self._numbers = numbers
        self._drawn = drawn_so_far(attributes.generators) if numbers is None else None
        self._unknown_numbers = False
        self._modes = modes
        self._trained = tuple([p.requires_grad for _, p in surroundings.parameters])
        self._versions: tuple[int, ...] | None = None  # None: the forward is not over
        self._buffers = buffers
        self._known = known
        self._lost = set[str]()
        # Whether the ops of the forward are to be seen: nobody knows yet whether they change some buffer, or read some
        # attribute.
        self.looks = not surroundings.compiled and (
            attributes.looks
            or any(b is not None and b.name not in known for _, found in buffers for b in found.values())
        )

    def written(self, tensor: torch.Tensor) -> None:
        """An op of the forward is about to write to ``tensor``."""
        for buffer in self._over(tensor):
            buffer.written = True
            if buffer.content is None:
                buffer.content = self._around.copy(buffer.tensor)

    def runs(self, func: Any, args: Any, kwargs: Any) -> None:
        """An op of a forward that ``looks`` is about to run: notes what it reads, and what it updates uncounted."""
        updated = updated_uncounted(func, args)
        for tensor in plain_tensors((*args, *kwargs.values())):
            self._attributes.read(tensor)
            for buffer in self._over(tensor):
                if not any(tensor is one for one in updated):
                    buffer.read = True
                    continue
                buffer.updated = True
                if buffer.content is None:
                    # No plan knows of it, and nearly always it is gone when the block's forward ends.
                    with _disable_current_modes():
                        buffer.content = buffer.tensor.detach().clone()

    def _over(self, tensor: torch.Tensor) -> Iterator[_Buffer]:
        """The buffers whose storage that of ``tensor`` is."""
        storage = tensor.untyped_storage()._cdata
        for _, buffers in self._buffers:
            for buffer in buffers.values():
                if buffer is not None and buffer.storage == storage:
                    yield buffer

    def end(self) -> None:
        """The forward is over: what it has not changed needs no copy."""
        self._attributes.end()
        self._end_numbers()
        self._versions = tuple([p._version for _, p in self._around.parameters])
        for module, buffers in self._buffers:
            for own, buffer in buffers.items():
                if buffer is not None:
                    self._end_buffer(buffer, replaced=module._buffers.get(own) is not buffer.tensor)

    def _end_buffer(self, buffer: _Buffer, *, replaced: bool) -> None:
        """``replaced``: another tensor has its name now."""
        then, buffer.then = buffer.then, None
        known = self._known.get(buffer.name, False)
        self._known[buffer.name] = known or self._has_changed(buffer)
        if not self._known[buffer.name]:
            # One that was replaced is itself what the forward found, and nobody else's now.
            buffer.content = buffer.tensor if replaced else None
        elif buffer.content is None:
            buffer.content = then if buffer.is_moved else None
            if buffer.content is None and (buffer.is_moved or buffer.is_counted):
                self._lost.add(buffer.name)
        elif buffer.updated and not known:
            self._around.keeps(buffer.content)

    def _has_changed(self, buffer: _Buffer) -> bool:
        """Whether the forward, which is over, has changed what ``buffer`` holds, and may have read it."""
        if buffer.written or (buffer.updated and buffer.read) or buffer.is_counted or buffer.is_moved:
            return True
        return self._around.compiled and buffer.changed_unseen()

    def _end_numbers(self) -> None:
        """Numbers of which no forward has drawn any need not be kept; those of the next one are, where this one has."""
        draws = self._around.draws
        made = self._attributes.has_new_generators  # and so it makes them in its second run
        if self._numbers is None:
            self._unknown_numbers = drawn_so_far(self._attributes.generators) != self._drawn
            draws[self._modes] |= made or self._unknown_numbers
        elif not draws.get(self._modes, False):
            draws[self._modes] = made or HostNumbers(self._attributes.generators) != self._numbers
            self._numbers = self._numbers if draws[self._modes] else None

    @contextmanager
    def again(self) -> Iterator[None]:
        """The block runs again inside this, on copies of the buffers. Raises ``ModelError`` if what the forward found
        is not there any more."""
        self._expect_parameters()
        self._expect_unwritten()
        copies: dict[int, torch.Tensor] = {}  # by the tensor: what is shared stays shared
        buffers = [
            (module, module._buffers, {own: self._copy(buffer, copies) for own, buffer in found.items()})
            for module, found in self._buffers
        ]
        modes = [(m, m.training, then) for (_, m), then in zip(self._around.modules, self._modes, strict=True)]
        trained = [(p, p.requires_grad, t) for (_, p), t in zip(self._around.parameters, self._trained, strict=True)]
        try:
            for module, _, found in buffers:
                module._buffers = found
            _set_modes((module, then) for module, now, then in modes if now is not then)
            _set_trained((parameter, then) for parameter, now, then in trained if now is not then)
            with self._attributes.again(), self._drawn_again():
                yield
        finally:
            for module, own, _ in buffers:
                module._buffers = own
            _set_modes((module, now) for module, now, then in modes if now is not then)
            _set_trained((parameter, now) for parameter, now, then in trained if now is not then)

    def _drawn_again(self) -> AbstractContextManager[None]:
        if self._numbers is not None:
            return self._numbers.again()
        if not self._unknown_numbers:
            return nullcontext()
        raise ModelError(
            f"block {self._around.block} has drawn from Python's or NumPy's random numbers, or from a generator of its "
            f"own, in this forward, and not in those before it: it is not known which, and the forward cannot be run "
            f"again for backward. Forwards from now on keep that: begin this step anew (zero_grad(), forward, "
            f"backward), or prepare with a policy that recomputes nothing ('resident', 'stream')"
        )

    def _copy(self, buffer: _Buffer | None, copies: dict[int, torch.Tensor]) -> torch.Tensor | None:
        if buffer is None:
            return None
        key = id(buffer.tensor)
        if key not in copies:
            copies[key] = self._content(buffer).clone()
        return copies[key]

    def _content(self, buffer: _Buffer) -> torch.Tensor:
        block, name = self._around.block, buffer.name
        if name in self._lost:
            raise ModelError(
                f"block {block} has changed its buffer {name} in this forward, and not in those before it: no copy was "
                f"made of what the buffer held, and the forward cannot be run again for backward. Forwards from now on "
                f"make that copy: begin this step anew (zero_grad(), forward, backward), or prepare with a policy that "
                f"recomputes nothing ('resident', 'stream')"
            )
        if buffer.content is not None:
            return buffer.content
        if version_of(buffer.tensor) != buffer.version:
            raise ModelError(
                f"buffer {name} of block {block} was changed after the block's forward, which is run again for its "
                f"backward: change it before the forward, or after loss.backward()"
            )
        return buffer.tensor

    def _expect_unwritten(self) -> None:
        """Of tensors that are no buffers nobody keeps what was in them."""
        by = "its forward" if self._attributes.writes_in_place else "something since its forward"
        if self._attributes.writes_in_place or (self._versions is not None and self._attributes.are_written()):
            raise ModelError(
                f"block {self._around.block} is to run again for backward, and {by} has changed a tensor in place that "
                f"it holds and that is no buffer: it would find the change. Register the tensor (register_buffer), "
                f"whose content is put back, or give the attribute a new one; or prepare with a policy that recomputes "
                f"nothing ('resident', 'stream')"
            )

    def _expect_parameters(self) -> None:
        if self._versions is None:
            return  # a backward inside of the forward
        for (name, parameter), then in zip(self._around.parameters, self._versions, strict=True):
            if parameter._version != then:
                raise modified(self._around.block, name, parameter._version, then)


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, training in modes:
        module.training = training


def _set_trained(parameters: Iterable[tuple[nn.Parameter, bool]]) -> None:
    for parameter, trained in parameters:
        parameter.requires_grad = trained
