"""The byte ledger of the ``cpu`` device: every storage that a step makes, counted when it is made and when it dies.

torch's CPU allocator keeps no account, so a budget on ``cpu`` would mean nothing without one. A dispatch mode sees
every op, backward included; a storage that an op makes is charged under a key (``_cdata``) and discharged by a
finalizer on the storage object, which torch keeps alive exactly as long as the bytes. What lives only inside one
kernel escapes the account. (design.md, mechanism 6.)
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor

from forebay.device.base import Watch
from forebay.device.history import History
from forebay.device.modes import BesideCompiled, Mode, OpMode
from forebay.errors import BudgetExceeded, ParameterReleased
from forebay.memory import Kind, Ledger

__all__ = ["StorageLedger", "plain_tensors"]

_OWN_STORAGE = frozenset({torch.Tensor, torch.nn.Parameter, FakeTensor})
# Ops that look at what a tensor is and not at its values; ``_has_compatible_shallow_copy_type`` is how ``param.data =
# ...`` asks, in inference mode.
_READ_NO_VALUES = frozenset(
    {
        torch.ops.aten.detach.default,
        torch.ops.aten._has_compatible_shallow_copy_type.default,
        *(getattr(torch.ops.aten, f"{like}_like").default for like in ("empty", "zeros", "ones", "full")),
        *(getattr(torch.ops.aten, f"{like}_like").default for like in ("rand", "randn")),
        *(getattr(torch.ops.aten, f"new_{like}").default for like in ("empty", "zeros", "ones", "full")),
    }
)
# Ops that return a storage of their input although their schema does not say so.
_SILENT_ALIASES = frozenset({torch.ops.aten._unsafe_view.default, torch.ops.aten.lift_fresh.default})


def plain_tensors(values: Any) -> Iterator[torch.Tensor]:
    """The plain tensors among an op's arguments or results: tensors, and lists or tuples of them."""
    if isinstance(values, torch.Tensor):
        # A subclass stands for bytes that are elsewhere: it has no storage of its own to count. A sparse tensor is
        # made of strided ones, which were counted when they were made.
        # On the meta device there are no bytes.
        if type(values) in _OWN_STORAGE and values.layout is torch.strided and values.device.type != "meta":
            yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from plain_tensors(value)


@final
class StorageLedger(Watch):
    """Charges ``ledger`` with every storage that ops make while active.

    ``where`` says in words what is running (the current block), for the message when the budget is exceeded.
    ``beside_compiled``: what torch.compile was applied to runs compiled.
    """

    def __init__(
        self,
        ledger: Ledger,
        where: Callable[[], str] = lambda: "",
        history: History | None = None,
        *,
        beside_compiled: bool = False,
    ) -> None:
        self.ledger = ledger
        self._history = history or History()
        self._where = where
        self._active = False
        self._mode: Mode = BesideCompiled(self.through) if beside_compiled else OpMode(self.through)
        self._counted: dict[int, _Entry] = {}
        self._known: dict[int, _Adopted] = {}
        self._released: dict[int, str] = {}
        self._traits: dict[Any, _Traits] = {}

    def install(self) -> None:
        self._mode.put_behind()

    def uninstall(self) -> None:
        self._active = False
        self._mode.take_off()

    def close(self) -> None:
        self._active = False
        self._mode.end()

    def activate(self, active: bool) -> None:
        self._active = active

    def adopt(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        self._known[key] = _Adopted(storage, self._disown, key)

    def mark_released(self, tensor: torch.Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        self._released[storage._cdata] = name
        self.adopt(storage)
        weakref.finalize(storage, self._released.pop, storage._cdata, None).atexit = False

    def attribute(self, tensor: torch.Tensor, kind: Kind) -> None:
        if not self._counted:
            return  # as in a step that is not looked at
        key = tensor.untyped_storage()._cdata
        entry = self._counted.get(key)
        if entry is not None and entry.kind is not kind:
            self.ledger.move(entry.kind, kind, entry.nbytes)
            entry.kind = kind

    def count(self, tensor: torch.Tensor, kind: Kind) -> None:
        for plain in plain_tensors(tensor):
            self._note(plain, kind.value)
            self.attribute(plain, kind)

    def found(self, tensor: torch.Tensor, kind: Kind) -> None:
        # An interrupt may leave saved-tensor hooks on that ask this: of a session that is over they charge nothing.
        if self._active:
            self.count(tensor, kind)

    def through(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an op: refuses one that would read a released parameter, charges the storages that it makes.

        Thousands of ops a step pass here, most of them views that make nothing: what can be known of an op is known
        once.
        """
        traits = self._traits.get(func)
        if traits is None:
            traits = self._traits[func] = _Traits.of(func)
        if traits.reads and self._released:
            self._refuse_released(func, traits, args)
        result = func(*args, **kwargs) if kwargs else func(*args)
        if traits.makes and self._active:
            for tensor in plain_tensors(result):
                self._note(tensor, func)
        return result

    def _refuse_released(self, func: Any, traits: _Traits, args: Any) -> None:
        for place, argument in enumerate(args):
            for tensor in plain_tensors(argument):
                name = self._released.get(tensor.untyped_storage()._cdata)
                if name is not None:
                    raise _written(func, name) if place in traits.written else _read(func, name)

    def _note(self, tensor: torch.Tensor, maker: Any) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        counted = self._counted.get(key)
        # A dead entry is one whose finalizer has not run yet, in another thread; its address is this storage's now.
        if (counted is not None and counted() is not None) or key in self._known:
            return
        nbytes = storage.nbytes()
        if nbytes == 0:
            return
        where = self._where()
        try:
            self.ledger.charge(Kind.TEMPORARY, nbytes)
        except BudgetExceeded:
            what = f"{where}the result {tuple(tensor.shape)} of {maker}"
            # The error has no name here: its traceback has this frame, and the two would hold what the step has made.
            raise self._history.told(self.ledger.exceeded(Kind.TEMPORARY, nbytes, what), nbytes, maker, where) from None
        self._counted[key] = _Entry(storage, self._forget, key, nbytes, self._history.made(nbytes, maker, where))

    def _disown(self, adopted: _Adopted) -> None:
        if self._known.get(adopted.key) is adopted:
            del self._known[adopted.key]

    def _forget(self, entry: _Entry) -> None:
        if self._counted.get(entry.key) is entry:
            del self._counted[entry.key]
        self.ledger.discharge(entry.kind, entry.nbytes)
        self._history.gone(entry.address)


def _read(func: Any, name: str) -> ParameterReleased:
    other = ""
    if func is torch.ops.aten._to_copy.default:
        other = "; before the model is given another dtype or device (model.to(...)), forebay.close(model)"
    return ParameterReleased(
        f"{func} read parameter {name} while its bytes are not on the device; inside the model, use it in the forward "
        f"of the module that owns it, or give prepare() a batch, with which it sees who else reads it; outside, read "
        f"forebay.parameters(model)[{name!r}]{other}"
    )


def _written(func: Any, name: str) -> ParameterReleased:
    return ParameterReleased(
        f"{func} would write parameter {name} while its bytes are not on the device; write parameters before "
        f"prepare(), or with model.load_state_dict({{{name!r}: values}}, strict=False)"
    )


@final
@dataclass(frozen=True, slots=True)
class _Traits:
    """What is known of an op: whether it ``reads`` the values of its arguments, whether it ``makes`` storages, and the
    places of the arguments that are ``written``."""

    reads: bool
    makes: bool
    written: frozenset[int]

    @classmethod
    def of(cls, func: Any) -> _Traits:
        fresh = any(returned.alias_info is None for returned in func._schema.returns)
        reads, makes = not func.is_view and func not in _READ_NO_VALUES, fresh and func not in _SILENT_ALIASES
        given = enumerate(func._schema.arguments)
        return cls(reads, makes, frozenset(n for n, a in given if a.alias_info is not None and a.alias_info.is_write))


@final
class _Entry(weakref.ref[torch.UntypedStorage]):
    """A counted storage: what it is charged as, and where the history has it. A bare weak reference and no
    ``weakref.finalize``, because one is made for every op's result."""

    __slots__ = ("address", "key", "kind", "nbytes")

    def __new__(
        cls, storage: torch.UntypedStorage, died: Callable[[_Entry], None], key: int, nbytes: int, address: int
    ) -> _Entry:
        return super().__new__(cls, storage, died)

    def __init__(
        self, storage: torch.UntypedStorage, died: Callable[[_Entry], None], key: int, nbytes: int, address: int
    ) -> None:
        super().__init__(storage, died)  # type: ignore[call-arg]
        self.address = address
        self.key = key
        self.kind = Kind.TEMPORARY
        self.nbytes = nbytes


@final
class _Adopted(weakref.ref[torch.UntypedStorage]):
    """A storage that others count. Bare, like ``_Entry``: one is made for every lease of a slot."""

    __slots__ = ("key",)

    def __new__(cls, storage: torch.UntypedStorage, died: Callable[[_Adopted], None], key: int) -> _Adopted:
        return super().__new__(cls, storage, died)

    def __init__(self, storage: torch.UntypedStorage, died: Callable[[_Adopted], None], key: int) -> None:
        super().__init__(storage, died)  # type: ignore[call-arg]
        self.key = key
