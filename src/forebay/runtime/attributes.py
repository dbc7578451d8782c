"""What the forward of a recomputed block finds in the attributes of modules, so that its second run finds the same.

A mask that is made once, a count of calls, the state of the step before, the losses that layers add to a list: what
the forward has set to something else, in the attributes or inside of them (``inside.py``), is in the second run what it
was, and after it what it was in front of it. So is what others have set since: the mask of the next batch.

Of a tensor that no op of the first forward that finds it reads, a stand-in without values is kept: such a forward has
replaced it before (``torch.nn.utils.weight_norm`` does so with the weight), and it may be much.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, Final, final

import torch
from torch import nn

from forebay.runtime.inside import OF_TORCH, Content, Inside, attributes_of, has_inside, look_inside

__all__ = ["Attributes", "FoundAttributes", "beside_blocks", "storage_key", "version_of"]

_ABSENT: Final = object()
"""In the place of an attribute that is not there."""

_Values = dict[str, Any]
"""Attributes by name."""

_Reads = dict[tuple[int, str], bool | None]
"""Whether forwards read the tensor that they find in an attribute, by its place and name. None: it was no tensor yet,
or nobody has looked."""


def beside_blocks(root: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Modules of ``root`` that are in none of ``blocks``, and have neither parameters nor modules of their own: a table
    of positions, say, which every layer is handed and calls."""
    inside = {module for block in blocks for module in block.modules()}
    return [m for m in root.modules() if m not in inside and not m._modules and not any(True for _ in m.parameters())]


@final
class Attributes:
    """Those of ``modules``, and those and the buffers of the ones ``beside`` them, as they are now, and what is
    ``inside`` of them. ``compiled``: they have no ops to be seen."""

    def __init__(self, modules: Sequence[nn.Module], beside: Sequence[nn.Module], *, compiled: bool) -> None:
        self._now: Sequence[_Values] = [
            *(module.__dict__ for module in modules),
            *(values for module in beside for values in (module.__dict__, module._buffers)),
        ]
        self._modules = (*modules, *beside)
        self._compiled = compiled
        self._reads: dict[tuple[bool, ...], _Reads] = {}  # by the modes of the modules
        self.inside = Inside((), ())

    def look_inside(self) -> None:
        """Finds ``inside`` anew: what the attributes hold now."""
        self.inside = look_inside(value for module in self._modules for value in attributes_of(module))

    def begin(self, modes: tuple[bool, ...], arguments: Sequence[Any]) -> FoundAttributes:
        """A forward begins, in ``modes``. ``arguments``: what it is called with that may have something inside."""
        reads = self._reads.get(modes)
        if reads is None:
            self.look_inside()
            reads = self._reads[modes] = {
                (place, name): None
                for place, values in enumerate(self._now)
                for name, value in values.items()
                if isinstance(value, torch.Tensor)
            }
        inside = self.inside.joined(look_inside(arguments)) if arguments else self.inside
        return FoundAttributes(self, self._now, reads, inside, looks=not self._compiled)


@final
class FoundAttributes:
    """What one forward found in those that are ``now`` what they are, and ``inside`` of them and of its arguments.
    ``reads`` is what is known of forwards in the same modes; with ``looks`` this one finds out the rest."""

    def __init__(
        self, attributes: Attributes, now: Sequence[_Values], reads: _Reads, inside: Inside, *, looks: bool
    ) -> None:
        self._attributes = attributes
        self._now = now
        self._reads = reads
        self._then: Sequence[_Values] = [values.copy() for values in now]
        self._unneeded: set[tuple[int, str]] = set()
        # What the forward has changed, once it is over.
        self._changed: dict[tuple[int, str], None] = {}
        self._changed_inside: list[Content] = []
        self._inside = [Content.of(container) for container in inside.containers]
        self.generators = inside.generators
        self.has_new_generators = False
        self._versions = [(tensor, version_of(tensor)) for tensor in (*self._own_tensors(), *inside.tensors)]
        self.writes_in_place = False
        unknown = [key for key, read in reads.items() if read is None] if looks else []
        found = {(place, name): self._then[place].get(name) for place, name in unknown}
        self._unread = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}

    @property
    def looks(self) -> bool:
        """Whether it is to be told what ops of the forward read."""
        return bool(self._unread)

    def read(self, tensor: torch.Tensor) -> None:
        """An op of the forward reads ``tensor``."""
        storage = storage_key(tensor)
        for key in [key for key, found in self._unread.items() if storage_key(found) == storage]:
            del self._unread[key]
            self._reads[key] = True

    def end(self) -> None:
        """The forward is over."""
        self._reads |= dict.fromkeys(self._unread, False)
        self._unread = {}
        self._changed, self._changed_inside = self._differing(), self._differing_inside()
        self.writes_in_place = self.are_written()
        self._versions = [(tensor, version_of(tensor)) for tensor in self._own_tensors()]
        for key in self._changed:
            self._reads.setdefault(key, None)
        self._let_go()
        set_to = (self._now[place].get(name) for place, name in self._changed)
        if any(map(has_inside, (*set_to, *(one for content in self._changed_inside for one in content.held())))):
            self._attributes.look_inside()
            self.has_new_generators = not set(self._attributes.inside.generators) <= set(self.generators)

    def _let_go(self) -> None:
        """Of tensors that forwards do not read, those that this one has changed need no values, and others are nothing
        to it."""
        for (place, name), read in self._reads.items():
            then = self._then[place]
            value = then.get(name)
            if read is False and isinstance(value, torch.Tensor):
                if (place, name) in self._changed:
                    then[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                else:
                    del then[name]
                    self._unneeded.add((place, name))

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within this they are what the forward found, whoever has changed them since."""
        # What the forward has changed it changes again, though now it may be what it was.
        keys = self._changed | self._differing()
        put = [(self._now[place], {name: self._then[place].get(name, _ABSENT)}) for place, name in keys]
        before = [(now, {name: now.get(name, _ABSENT) for name in then}) for now, then in put]
        inside = list(dict.fromkeys((*self._changed_inside, *self._differing_inside())))
        before_inside = [content.now() for content in inside]
        try:
            for now, then in put:
                _set(now, then)
            for content in inside:
                content.put_back()
            yield
        finally:
            for now, wanted in before:
                _set(now, wanted)
            for content in before_inside:
                content.put_back()

    def are_written(self) -> bool:
        """Whether a tensor that the forward found was changed in place: while it ran, or once it is over since then, if
        it is one of those that forwards read."""
        return any(version_of(tensor) != then for tensor, then in self._versions)

    def _own_tensors(self) -> list[torch.Tensor]:
        """Those of attributes, but for the ones that forwards are known to leave unread."""
        found = (self._then[place].get(name) for (place, name), read in self._reads.items() if read is not False)
        return [value for value in found if isinstance(value, torch.Tensor)]

    def _differing(self) -> dict[tuple[int, str], None]:
        """Those that are something else now, by place and name, in order."""
        return {
            (place, name): None
            for place, (then, now) in enumerate(zip(self._then, self._now, strict=True))
            if not _is_same(then, now)
            for name in {**then, **now}
            if then.get(name, _ABSENT) is not now.get(name, _ABSENT)
            and name not in OF_TORCH  # buffers and modes are put back elsewhere
            and (place, name) not in self._unneeded
        }

    def _differing_inside(self) -> list[Content]:
        return [content for content in self._inside if content.is_changed()]


def _is_same(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    return len(then) == len(now) and all(map(is_, then.values(), now.values()))


def _set(values: _Values, wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if value is _ABSENT:
            values.pop(name, None)
        else:
            values[name] = value


def version_of(tensor: torch.Tensor) -> int:
    """torch's count of changes in place; 0 of one that it does not count."""
    return 0 if tensor.is_inference() else tensor._version


def storage_key(tensor: torch.Tensor) -> int | None:
    """Which storage that of ``tensor`` is; None if it has none of its own."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None
