"""Ops of a recomputed block that do not run again: what they made in forward waits where the plan says.

A pair of dispatch modes around the two runs of the block's forward, in the manner of torch's selective checkpoint
(``torch.utils.checkpoint.create_selective_checkpoint_contexts``), which knows ops by their overload and can only keep.

named op     an op that the plan names, by overload and occurrence (``treatments.Treatment``)
record       what the named ops of one forward made. It lives as long as the graph that may ask for it.
content      what one named op made: tensors, kept on the device or treated by the stash (``stash.Stash``: moved, or
             as codes), and anything else, kept as it is. It is given out once; then the op is one that runs again.
trail        a hash over the calls so far of all overloads of which some occurrence is named, with the shapes and dtypes
             of their arguments. Equal trails mean that an occurrence is the same op in both runs.

An op without content runs again, and that is always right; it is done so for ops that return what they are given, that
write to an argument, or whose result is changed in place afterwards, for those after the last tensor that the block
saves, and in a second backward over a graph that was retained.

Generators. The recomputation begins with the generators as the forward did. A named op that draws from one does not
draw again, so its record holds the generator's state after it (5,056 bytes on the host for that of ``cpu``, 16 for one
of CUDA), which is set in its place. So it is with generators that an op is given. Where these are found
(``surroundings.py``) they are brought back, too; whether each is where it was then is looked for in all recomputations
where ops are named, and else in a block's first one: a block that draws from one which nobody has brought back is
refused.

torch.compile. Compiled code has no ops to be named, and PyTorch compiles nothing under a dispatch mode: the compiled
modules of a block run as they are written, in forward and again (``device/compiling.py``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
from torch.utils._pytree import tree_map

from forebay.device.base import Watch
from forebay.device.ledger import plain_tensors
from forebay.device.modes import OpMode
from forebay.errors import ModelError
from forebay.memory import Kind
from forebay.runtime.generators import LeftBehind, place_of
from forebay.runtime.opnames import OpCounter, OpNames, roots_made, roots_treated
from forebay.runtime.surroundings import Found
from forebay.scheduling.activations import described
from forebay.treatments import Treatment

__all__ = ["Choice", "Mover", "Record", "Replay", "Ticket", "not_the_same"]


class Ticket(Protocol):
    """Stands for the bytes of one storage that was treated (``stash.Ticket``)."""

    def tensor(self) -> torch.Tensor:
        """The bytes on the device again, 1-D uint8."""
        ...


class Mover(Protocol):
    """Moves what named ops made, or makes codes of it (``stash.Stash``)."""

    def treat(self, tensor: torch.Tensor, treatment: Treatment, what: str) -> Ticket | None:
        """Begins to do so with the storage of ``tensor``; None: it stays on the device as it is."""
        ...


@final
@dataclass(frozen=True, slots=True)
class _Traits:
    """What is known of an overload: whether some occurrence of it is named, whether it draws from a generator, which
    arguments it writes to (position and name)."""

    counted: bool
    draws: bool
    writes: tuple[tuple[int, str], ...]

    @property
    def ignored(self) -> bool:
        """Whether nothing about it matters to a record."""
        return not self.counted and not self.writes and not self.draws


_PLAIN = _Traits(False, False, ())


@final
class Choice:
    """The ops of one block that a plan names, and what is known of overloads: thousands pass in a step. A ``compiled``
    block has no ops to be seen."""

    def __init__(self, block: str, treatments: Iterable[Treatment], *, compiled: bool = False) -> None:
        self.block = block
        self.named = {(t.op, t.occurrence): t for t in treatments}
        # Whether every op of a recomputation is looked at: of the first one, and of all where ops are named.
        self.looks = not compiled
        self.names = OpNames(op for op, _ in self.named)
        self._traits: dict[Any, _Traits] = {}

    def ran_again(self) -> None:
        """The block has run again as it should."""
        self.looks = bool(self.named)

    def traits(self, func: Any) -> _Traits:
        """What is known of ``func``."""
        known = self._traits.get(func)
        if known is None:
            known = self._traits[func] = self._look_up(func)
        return known

    def _look_up(self, func: Any) -> _Traits:
        if not isinstance(func, torch._ops.OpOverload):
            return _PLAIN  # an operator of higher order: what it runs inside is not seen
        arguments = enumerate(func._schema.arguments)
        writes = [(i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write]
        return _Traits(self.names.of(func) is not None, torch.Tag.nondeterministic_seeded in func.tags, tuple(writes))


@final
@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that stays on the device, and torch's count of in-place changes to it (None: it keeps none)."""

    tensor: torch.Tensor
    version: int | None

    @property
    def unchanged(self) -> bool:
        return self.version is None or self.tensor._version == self.version


@final
@dataclass(frozen=True, slots=True)
class _Treated:
    """A tensor whose storage was treated; ``offset`` and ``stride`` in elements."""

    ticket: Ticket
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def restored(self) -> torch.Tensor:
        whole = self.ticket.tensor()
        empty = torch.empty(0, dtype=self.dtype, device=whole.device)
        return empty.set_(whole.untyped_storage(), self.offset, self.shape, self.stride)


@final
@dataclass(slots=True)
class _Made:
    """A named op of a forward, and its content: ``held`` is what it returned, with ``_Kept`` and ``_Treated`` in the
    place of tensors. ``storages`` are those that the op made."""

    name: tuple[str, int]
    trail: int
    held: Any
    generator: LeftBehind | None
    storages: Sequence[weakref.ref[torch.UntypedStorage]]
    present: bool = True

    def forget(self) -> None:
        self.held, self.generator, self.storages, self.present = None, None, (), False


@final
class Record:
    """The named ops of one forward. ``quiet`` says that ops belong to something else: to a recomputation. ``found`` is
    told of what ops are about to write to."""

    def __init__(
        self, choice: Choice, watch: Watch, mover: Mover | None, quiet: Callable[[], bool], found: Found
    ) -> None:
        self.choice = choice
        self._found = found
        self.made: list[_Made] = []
        # As of the last tensor that the forward has saved, which is where a recomputation ends.
        self.needed = 0
        self.needed_trail = 0
        # Of every draw from a generator that an op was given: where that was.
        self.drawn: list[int] = []
        self._watch = watch
        self._mover = mover
        self._quiet = quiet
        self._counter = OpCounter(choice.names)
        self.trail = 0

    def running(self) -> Generator[None, None, None]:
        """Forward runs between the two halves of this."""
        looks = self.choice.looks or self.choice.named or self._found.looks
        with OpMode(self._run).on() if looks else nullcontext():
            yield
        for late in self.made[self.needed :]:
            late.forget()

    def saved(self) -> None:
        """Forward has saved a tensor for backward."""
        if not self._quiet():
            self.needed, self.needed_trail = len(self.made), self.trail

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        traits = self.choice.traits(func)
        if self._found.looks and not self._quiet():
            self._found.runs(func, args, kwargs)
        if traits.ignored or self._quiet():
            return func(*args, **kwargs)
        written = [args[i] if i < len(args) else kwargs.get(name) for i, name in traits.writes]
        for tensor in plain_tensors(written):
            self._found.written(tensor)
        if traits.draws and kwargs.get("generator") is not None:
            self.drawn.append(place_of(kwargs["generator"]))
        result = func(*args, **kwargs)
        self._overwritten(written)
        if traits.counted and (name := self._counter.name(func)) is not None:
            self.trail = _follow(self.trail, func, args, kwargs)
            treatment = self.choice.named.get(name)
            if treatment is not None:
                self.made.append(self._note(name, treatment, traits, args, kwargs, result))
        return result

    def _overwritten(self, written: Any) -> None:
        """What is changed in place is not what a recomputation needs at that point: its op runs again then."""
        keys = {tensor.untyped_storage()._cdata for tensor in plain_tensors(written)}
        for made in self.made:
            storages = [s() for s in made.storages]
            if any(storage is not None and storage._cdata in keys for storage in storages):
                made.forget()

    def _note(
        self, name: tuple[str, int], treatment: Treatment, traits: _Traits, args: Any, kwargs: Any, result: Any
    ) -> _Made:
        roots = {root.untyped_storage()._cdata: root for root in roots_made(result, args, kwargs)}
        made = _Made(name, self.trail, None, None, [weakref.ref(r.untyped_storage()) for r in roots.values()])
        if traits.writes or any(t.untyped_storage()._cdata not in roots for t in plain_tensors(result)):
            made.forget()
            return made
        tickets: dict[int, Ticket] = {}
        if self._mover is not None and treatment.changes_bytes:
            for number, root in roots_treated(roots.values(), treatment):
                ticket = self._mover.treat(root, treatment, described(self.choice.block, *name, number))
                if ticket is not None:
                    tickets[root.untyped_storage()._cdata] = ticket
        made.held = tree_map(lambda leaf: self._hold(leaf, tickets), result)
        if traits.draws:
            made.generator = LeftBehind.by(result, kwargs.get("generator"))
        return made

    def _hold(self, leaf: Any, tickets: dict[int, Ticket]) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if next(plain_tensors(leaf), None) is not None:
            ticket = tickets.get(leaf.untyped_storage()._cdata)
            if ticket is not None:
                place = int(leaf.storage_offset()), tuple(leaf.shape), tuple(leaf.stride())
                return _Treated(ticket, leaf.dtype, *place)
            self._watch.attribute(leaf, Kind.ACTIVATION)
        # Detached: autograd makes ``leaf`` itself the result of a node, which must not be held by what the node saves.
        # Beneath autograd a view has no part in its base's version counter, unless this key is let in, as in
        # ``torch.utils.checkpoint`` (whose function for it has another name in each release).
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            detached = leaf.detach()
        return _Kept(detached, None if leaf.is_inference() else leaf._version)


@final
class Replay:
    """One recomputation of the forward of ``record``."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._counter = OpCounter(record.choice.names)
        self._next = 0
        self._trail = 0
        self._drawn = 0
        # Asked for here: inside an op it seems to be off. A recomputation casts anew what its forward found cast.
        self._autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

    def running(self) -> Generator[None, None, None]:
        """The forward runs again between the two halves of this."""
        with OpMode(self._run).on() if self._record.choice.looks else nullcontext():
            yield

    def ended(self, *, early: bool) -> None:
        """It came to the last tensor that forward saved (``early``), or to its end. Raises ``ModelError`` if it did not
        go the same way."""
        record = self._record
        until = record.needed if early else len(record.made)
        if self._next < until or self._trail != (record.needed_trail if early else record.trail):
            missing = record.made[self._next : until]
            what = f"{_shown(missing[0].name)} did not run again" if missing else "it ended after other ops"
            raise self._differs(what)
        record.choice.ran_again()

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        choice = self._record.choice
        traits = choice.traits(func)
        own = kwargs.get("generator") if traits.draws else None
        is_there = own is None or self._is_where_it_was(own)
        if traits.counted and (name := self._counter.name(func)) is not None:
            self._trail = _follow(self._trail, func, args, kwargs)
            if name in choice.named:
                made = self._expected(name)
                if made.present:
                    generator = made.generator if is_there else None
                    given, result = _give(made)
                    if given:
                        if generator is not None:
                            generator.put_back(own)
                        return result
        if not is_there:
            raise self._differs(f"{func} draws from a generator of its own, which is not where it was then")
        return func(*args, **kwargs)

    def _is_where_it_was(self, own: torch.Generator) -> bool:
        """Whether ``own``, which is about to be drawn from, is where it was for this draw in forward."""
        self._drawn += 1
        return self._record.drawn[self._drawn - 1 : self._drawn] == [place_of(own)]

    def _expected(self, name: tuple[str, int]) -> _Made:
        made = self._record.made
        if self._next == len(made):
            raise self._differs(f"{_shown(name)} ran, which did not run then")
        if made[self._next].name != name:
            raise self._differs(f"{_shown(name)} ran where {_shown(made[self._next].name)} had")
        if made[self._next].trail != self._trail:
            raise self._differs(f"{_shown(name)} ran after other ops, or on tensors of other shapes")
        self._next += 1
        return made[self._next - 1]

    def _differs(self, what: str) -> ModelError:
        message = not_the_same(self._record.choice.block, what)
        if self._autocast:
            message += ". Under torch.autocast, open a context for each pass: it keeps casts of weights until it ends"
        return ModelError(message)


def not_the_same(block: str, what: str) -> str:
    """The message for a block whose forward did not do the same twice: ``what`` was seen, in words."""
    return (
        f"block {block} computed something else when it was run again for its backward: {what}. Its forward must be a "
        f"function of its arguments and parameters alone. Leave the block out of recomputation: prepare with "
        f"plan=dataclasses.replace(plan, recompute=..., activations=...), both without {block!r}, or with a policy "
        f'that recomputes nothing ("resident", "stream")'
    )


def _follow(trail: int, func: Any, args: Any, kwargs: Any) -> int:
    given = [(t.shape, t.dtype) for t in plain_tensors((*args, *kwargs.values()))]
    return hash((trail, func, *given))


def _shown(name: tuple[str, int]) -> str:
    return f"{name[0]}#{name[1]}"


def _give(made: _Made) -> tuple[bool, Any]:
    """Whether ``made`` still has its content unchanged, and what its op returned; it has none afterwards."""
    held = made.held
    made.forget()
    intact = True

    def give(leaf: Any) -> Any:
        nonlocal intact
        if isinstance(leaf, _Kept):
            intact = intact and leaf.unchanged
            return leaf.tensor
        return leaf.restored() if isinstance(leaf, _Treated) else leaf

    result = tree_map(give, held)
    return intact, result
