"""Sees every op of a step and writes down what it is given, what it makes, and what is gone after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from forebay.device.schema import is_mutable, written_by
from forebay.errors import CaptureFailed, ModelError
from forebay.memory import Kind
from forebay.profiler.guesses import Guess
from forebay.profiler.originals import Originals
from forebay.profiler.parameter_uses import ParameterUses
from forebay.profiler.position import Position, has_storage
from forebay.profiler.roots import Handle, Root, Roots
from forebay.profiler.run_again import RunAgain
from forebay.profiler.unlike import TrueResults
from forebay.profiler.values import LIFTS, Unknown, Values, is_fake
from forebay.profiler.work import Works, is_view, made_by, tensors_in
from forebay.profiler.written_views import WrittenViews
from forebay.runtime.uncounted import updated_uncounted
from forebay.trace import CONSTANT, Phase

__all__ = ["RawOp", "Recorder"]

aten, prim = torch.ops.aten, torch.ops.prim


@final
@dataclass(slots=True)
class RawOp:
    """An op as it was seen; tensors by their number in ``Roots.made``. ``call`` is that of the block's module."""

    work: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    block: str
    call: int
    phase: Phase
    gradients: list[tuple[int, int]] = field(default_factory=list)


@final
class Recorder(TorchDispatchMode):
    """The dispatch mode, on top of the ``FakeTensorMode``. ``at`` is where in the model the step is."""

    def __init__(self, device: torch.device, guess: Guess, originals: Originals) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._originals = originals
        self._device = device
        self.roots = Roots()
        self.works = Works()
        self.values = Values(self.roots, guess)
        self._true = TrueResults()
        self._unreadable: dict[int, str] = {}
        self.ops: list[RawOp] = []
        self.backward_begins = 0
        self.op_failed = self.asked_by = ""
        self._quiet = False
        self.parameters = ParameterUses(self.roots)
        self.again = RunAgain()
        self._views = WrittenViews()
        self.at = Position(self.roots, self.parameters, self.again)
        # Each with its root and torch's count of changes as it came.
        self._buffers: list[tuple[torch.Tensor, Root, int]] = []
        # By the number of their root: what was there before the step and ops have written to, what ops of the forward
        # have read, and what they have updated uncounted.
        self._written = set[int]()
        self._read = set[int]()
        self._updated = set[int]()
        # Blocks whose forward changes in place what some module keeps to itself.
        self.changes_own = set[str]()
        # Of what was saved and is asked for before the forward is over: the roots, by number, and the blocks.
        self.asked_early = set[int]()
        self.differentiates = set[str]()

    def begin_backward(self) -> None:
        """Forward and loss are done."""
        self.at.begin_backward()
        self.parameters.forward_ends()
        self.backward_begins = len(self.ops)

    # What is there before the step, and what comes of it.

    def source(self, tensor: torch.Tensor, kind: Kind, name: str) -> None:
        """``tensor`` is a parameter, buffer or input."""
        root = self.roots.add(tensor, source=kind, name=name)
        if kind is Kind.BUFFER:
            self._buffers.append((tensor, root, tensor._version))

    @property
    def changed_buffers(self) -> tuple[str, ...]:
        """Names of the buffers that hold something else now: ops have written to them, torch has counted a change, or
        they have another storage. Those that are updated uncounted are among them if the forward reads them, too
        (``runtime/surroundings.py``)."""
        written = self._written | (self._read & self._updated)
        return tuple(
            root.name
            for tensor, root, version in self._buffers
            if root.number in written or tensor._version != version or self._has_moved(tensor, root)
        )

    def _has_moved(self, tensor: torch.Tensor, root: Root) -> bool:
        """Whether ``tensor``, which was ``root``, is somewhere else now: its ``data`` was set."""
        found = self.roots.find(tensor)
        return found is None or found[0] is not root

    def refuse_reads(self, tensor: torch.Tensor, why: str) -> None:
        """From now on no op may read ``tensor``, which the step has made: ``ModelError`` says ``why``."""
        if self.roots.find(tensor) is not None:
            self._unreadable[self._root_of(tensor)] = why

    def _root_of(self, tensor: torch.Tensor) -> int:
        return self.roots.made[self.roots.number(tensor)].root.number

    def _writes(self, written: Sequence[torch.Tensor]) -> None:
        """An op is about to write to tensors: of those that were there before the step keeps what is in real ones, and
        notes which they are, and the block that changes one of its own."""
        if self.at.phase is Phase.FORWARD:
            self.parameters.write(written)
        for tensor in written:
            found = self.roots.find(tensor)
            if found is None or found[0].source is None:
                continue
            self._written.add(found[0].number)
            if not is_fake(tensor):
                self._originals.keep(tensor)
            if self.at.phase is Phase.FORWARD and found[0].name.startswith(CONSTANT):
                self.changes_own.add(self.at.place[0])

    def _follow_buffers(self, func: Any, args: Any, numbers: tuple[int, ...]) -> None:
        """Notes what an op of the forward reads and what it updates uncounted."""
        updated = {self._root_of(tensor) for tensor in updated_uncounted(func, args)}
        self._updated |= updated
        self._read |= {self.roots.made[number].root.number for number in numbers} - updated

    def _expect_readable(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            why = self._unreadable.get(self.roots.made[number].root.number)
            if why is not None:
                raise ModelError(why)

    def gradient(self, parameter: torch.Tensor) -> None:
        """The gradient of ``parameter`` is complete; it is noted and taken off."""
        made = parameter.grad
        if made is None:
            return
        number = self._number(made)
        root = self.roots.made[number].root
        root.gradient = root.source is None
        if self.ops:
            self.ops[-1].gradients.append((self.parameters.number_of(parameter), number))
        parameter.grad = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """For ``saved_tensors_hooks``: a handle that keeps no storage alive.

        What counts is that it is called at all: torch ends a recomputation when it comes to the last call that it has
        seen in forward, whatever is saved there, and before the op if that is one of its arguments
        (``torch.utils.checkpoint``, ``_recomputation_hook``).
        """
        self.at.saves(len(self.ops))
        handle = self.roots.pack(tensor, with_values=not is_fake(tensor)) if has_storage(tensor) else None
        if handle is None:
            self.roots.asked.add(self.roots.call)  # nothing will tell
            return tensor if tensor.grad_fn is None else tensor.detach()
        return handle

    def unpack(self, packed: Any) -> torch.Tensor:
        """For ``saved_tensors_hooks``: a tensor that stands for what was saved."""
        if not isinstance(packed, Handle):
            kept: torch.Tensor = packed
            return kept
        tensor: torch.Tensor
        if packed.values is not None:
            with _disable_current_modes():
                tensor = packed.restored()
        else:
            self._quiet = True
            try:
                how = {"dtype": packed.dtype, "device": self._device}
                tensor = self.values.alike.run(aten.empty_strided.default, (packed.shape, packed.stride), how)
            finally:
                self._quiet = False
        self.roots.alias(tensor, packed)
        if self.at.phase is Phase.FORWARD:
            self.asked_early.add(packed.root.number)
            self.differentiates.update(self.at.began.get(packed.call, ())[:1])
        return tensor

    # Ops.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._quiet:
            return func(*args, **kwargs)
        if func is prim.device.default:
            return args[0].fake_device if isinstance(args[0], FakeTensor) else args[0].device
        inputs = [*tensors_in(args), *tensors_in(list(kwargs.values()))] if kwargs else tensors_in(args)
        # Deaths up to here came after the op before; what follows belongs to this one.
        self.roots.now = len(self.ops)
        # What a lifted constant is lifted from lies on the host: no source of the step.
        lifted = func in LIFTS
        numbers = () if lifted else tuple(dict.fromkeys([self._number(t) for t in inputs]))
        if self._unreadable:
            self._expect_readable(numbers)
        written = tensors_in(written_by(func, args, kwargs)) if is_mutable(func) else []
        self._writes(written)
        self._views.read(tensor for tensor in inputs if not any(tensor is one for one in written))
        for tensor in written:
            self._views.write(self._root_of(tensor))
        if kwargs.get("generator") is not None:
            self._originals.keep_generator(kwargs["generator"])
        result = self._run(func, args, kwargs, inputs)
        outputs = made_by(func, args, kwargs, result)
        if numbers and is_view(func):
            self._views.make(func, self.roots.made[numbers[0]].root.number, outputs)
        # Before the silent ones are left out: what views a weight is about to read it.
        if self.at.phase is Phase.BACKWARD and outputs:
            if not self.at.running and not is_view(func):  # a checkpoint detaches what it saves
                self.again.goes_on()
            self.parameters.read_again(inputs)
        if self._is_silent(func, outputs):
            self.roots.now = max(len(self.ops) - 1, 0)
            return result
        made = tuple(dict.fromkeys([self._output(t, lifted or is_view(func)) for t in outputs]))
        self.values.follow(outputs)
        if self.at.phase is Phase.FORWARD:
            self.parameters.read(numbers, self.at.running)
            self._follow_buffers(func, args, numbers)
        work = self.works.add(func, args, kwargs, result)
        self.ops.append(RawOp(work, numbers, made, *self.at.place_of_op(), self.at.phase))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see device/ledger.py: torch would wrap the method above in a switch that is not needed here

    def _run(self, func: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> Any:
        decided = self.values.decided
        try:
            result = self._true.of(func, args, kwargs, self.values.run(func, args, kwargs, inputs))
            if self.values.decided > decided:
                self.asked_by = self._asking_now(func)
            return result
        except Unknown:
            self.asked_by = self._asking_now(func)
            raise CaptureFailed(self.undecided) from None
        except Exception:
            if not self.op_failed:
                self.op_failed = str(func)
            raise

    def _asking_now(self, func: Any) -> str:
        return f"{func} {f'in {self.at.module}' if self.at.module else 'outside of the blocks'}"

    @property
    def undecided(self) -> str:
        """Why a step cannot be recorded that goes on by values which nobody has, as ``asked_by`` asks for them."""
        return (
            f"the model's forward depends on the values of a tensor: {self.asked_by} asks for what follows from floats "
            f"and is not known without computing it; control flow may follow from integers (token ids, masks, routes), "
            f"or take one of two ways by what floats say"
        )

    def _is_silent(self, func: Any, outputs: list[torch.Tensor]) -> bool:
        """Ops that make nothing new: another Python object for a tensor that is known, a question about shapes."""
        if not outputs:
            return func is not aten._local_scalar_dense.default
        return is_view(func) and all(self.roots.knows(t) for t in outputs)

    def _number(self, tensor: torch.Tensor) -> int:
        """The number of an op's argument."""
        if self.roots.find(tensor) is None:
            # Neither parameter, buffer nor input, and no op made it: a tensor that some module keeps to itself.
            return self.roots.add(tensor, source=Kind.BUFFER, name=f"{CONSTANT}{len(self.roots.roots)}").base
        return self.roots.number(tensor)

    def _output(self, tensor: torch.Tensor, takes_nothing: bool) -> int:
        if self.roots.find(tensor) is None:
            # A lifted constant (``torch.tensor(3.0)``) is in no device's account.
            return self.roots.add(tensor, nbytes=0 if takes_nothing else None).base
        return self.roots.number(tensor)
