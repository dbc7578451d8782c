"""Sees every op of a step and writes down what it is given, what it makes, and what is gone after it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from forebay.device.schema import is_mutable, written_by
from forebay.errors import CaptureFailed, ModelError
from forebay.memory import Kind
from forebay.profiler.attributes import Held
from forebay.profiler.guesses import Guess
from forebay.profiler.originals import Originals
from forebay.profiler.parameter_uses import ParameterUses
from forebay.profiler.roots import Handle, Root, Roots
from forebay.profiler.run_again import RunAgain
from forebay.profiler.unlike import TrueResults
from forebay.profiler.values import LIFTS, Unknown, Values, is_fake
from forebay.profiler.work import Works, is_view, tensors_in
from forebay.runtime.passes import part_by_itself
from forebay.runtime.recompute import CACHES
from forebay.runtime.uncounted import updated_uncounted
from forebay.trace import CONSTANT, Phase

__all__ = ["RawOp", "Recorder"]

aten, prim = torch.ops.aten, torch.ops.prim


OUTSIDE = ("", 0)
"""The place of what runs in no block: see ``Recorder.place``."""


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
    """The dispatch mode, on top of the ``FakeTensorMode``, and the hooks that tell it where in the model it is."""

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
        self.phase = Phase.FORWARD
        self.backward_begins = 0
        self.op_failed = self.module_failed = self.asked_by = ""
        self._quiet = self._passes = False
        self._handles: list[RemovableHandle] = []
        # Modules whose forward is running, innermost last, each with its place.
        self._running: list[tuple[str, tuple[str, int]]] = []
        self._calls = 0
        # The module that runs again, for which hooks for saved tensors are on.
        self._saving: str | None = None
        self.parameters = ParameterUses(self.roots)
        # Each with its root and torch's count of changes as it came.
        self._buffers: list[tuple[torch.Tensor, Root, int]] = []
        # By the number of their root: what was there before the step and ops have written to, what ops of the forward
        # have read, and what they have updated uncounted.
        self._written = set[int]()
        self._read = set[int]()
        self._updated = set[int]()
        self.again = RunAgain()
        # Blocks whose forward changes in place what some module keeps to itself.
        self.changes_own = set[str]()
        # Of what was saved and is asked for before the forward is over: the roots, by number, and the blocks.
        self.asked_early = set[int]()
        self.differentiates = set[str]()
        # By call: how many ops of the step had run when the last tensor was saved in it.
        self.saves: dict[int, int] = {}
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
        self._places: list[tuple[str, int]] = [OUTSIDE]

    # Where the step is.

    def follow_root(self, root: nn.Module) -> None:
        """Hooks ``root``, so that it is known whether a part of it is called by itself."""

        def before(module: nn.Module, args: Any) -> None:
            self._passes |= torch.is_grad_enabled()

        self._handles.append(root.register_forward_pre_hook(before, prepend=True))

    def follow_modules(self, modules: Mapping[str, tuple[nn.Module, str]]) -> None:
        """Hooks ``modules`` (by name: the module and its block), so that ops are known by the block they run in."""
        for name, (module, block) in modules.items():
            self._handles.append(
                module.register_forward_pre_hook(self._enter(name, block), prepend=True, with_kwargs=True)
            )
            self._handles.append(module.register_forward_hook(self._leave(name), always_call=True))

    def follow_askers(self, modules: Mapping[str, nn.Module]) -> None:
        """Hooks ``modules``, by name all that ask for a block, so that it is known whether one of them runs."""
        self._handles.extend(self.parameters.follow(modules))

    def remove_hooks(self) -> None:
        """Takes the hooks off again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, name: str, block: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.module_failed = ""
            if not self._passes and torch.is_grad_enabled():
                raise part_by_itself(module)
            if self._running and self._running[-1][1][0] == block:
                place = self._running[-1][1]  # a module inside that of the block: part of the same call
            else:
                if self._running:
                    self.parameters.outside.add(block)  # a layer calls a module that is not inside of it
                if self.phase is Phase.BACKWARD:
                    self.again.called(block)
                self._calls += 1
                place = (block, self._calls)
                self.given[self._calls] = self._arguments(args, kwargs)
                self.began[self._calls] = block, name
                if self.phase is Phase.FORWARD:
                    self._held[self._calls] = Held(module)
            self._running.append((name, place))
            self._turn(place)
            self._save_again(name)

        return enter

    def _save_again(self, name: str) -> None:
        """A module that is run again in backward by a reentrant checkpoint saves what it saves by way of hooks, too, as
        it does under a plan (``runtime/saving_scope.py``)."""
        backward = self.phase is Phase.BACKWARD and torch.is_grad_enabled()
        if backward and torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self.pack, self.unpack)
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
            found = [self.roots.find(one) for one in self._held.pop(call).replaced() if _has_storage(one)]
            roots = {place[0].number: place[0] for place in found if place is not None}
            self.replaced[call] = sum(root.nbytes for root in roots.values() if root.source is not None)

    def _arguments(self, args: Any, kwargs: Any) -> list[int]:
        # Not what a cache holds: a recomputation remembers that and does not keep it (``runtime/recompute.py``).
        leaves = tree_leaves((args, {name: value for name, value in kwargs.items() if name not in CACHES}))
        found = [self.roots.find(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and _has_storage(leaf)]
        return [place[0].base for place in found if place is not None]

    def _turn(self, place: tuple[str, int]) -> None:
        self.roots.call = place[1]
        if self._places[-1] != place:
            self._since.append(_get_sequence_nr())
            self._places.append(place)

    @property
    def place(self) -> tuple[str, int]:
        """The block that runs and the number of the call of its module: those of the innermost module, or in backward
        those of the node's forward. A call is what a checkpoint around the block's module would recompute as one."""
        if self._running:
            return self._running[-1][1]
        if self.phase is Phase.FORWARD:
            return OUTSIDE
        node: Any = torch._C._current_autograd_node()  # None between nodes, whatever its annotation says
        if node is None:
            return OUTSIDE
        number = node._sequence_nr()
        if number >= _get_sequence_nr():  # accumulation into .grad: part of what ran before it
            return (self.ops[-1].block, self.ops[-1].call) if self.ops else OUTSIDE
        return self._places[bisect_right(self._since, number) - 1]

    @property
    def module(self) -> str:
        """The innermost module that runs, of those that own parameters or are blocks."""
        return self._running[-1][0] if self._running else ""

    def begin_backward(self) -> None:
        """Forward and loss are done."""
        self._running.clear()
        self.parameters.forward_ends()
        self.phase = Phase.BACKWARD
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
        if self.phase is Phase.FORWARD:
            self.parameters.write(written)
        for tensor in written:
            found = self.roots.find(tensor)
            if found is None or found[0].source is None:
                continue
            self._written.add(found[0].number)
            if not is_fake(tensor):
                self._originals.keep(tensor)
            if self.phase is Phase.FORWARD and found[0].name.startswith(CONSTANT):
                self.changes_own.add(self.place[0])

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
        if self._running:
            self.saves[self._running[-1][1][1]] = len(self.ops)
        handle = self.roots.pack(tensor, with_values=not is_fake(tensor)) if _has_storage(tensor) else None
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
        if self.phase is Phase.FORWARD:
            self.asked_early.add(packed.root.number)
            self.differentiates.update(self.began.get(packed.call, ())[:1])
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
        if kwargs.get("generator") is not None:
            self._originals.keep_generator(kwargs["generator"])
        result = self._run(func, args, kwargs, inputs)
        outputs = tensors_in(result)
        # Before the silent ones are left out: what views a weight is about to read it.
        if self.phase is Phase.BACKWARD and outputs:
            if not self._running and not is_view(func):  # a checkpoint detaches what it saves
                self.again.goes_on()
            self.parameters.read_again(inputs)
        if self._is_silent(func, outputs):
            self.roots.now = max(len(self.ops) - 1, 0)
            return result
        made = tuple(dict.fromkeys([self._output(t, lifted or is_view(func)) for t in outputs]))
        self.values.follow(outputs)
        if self.phase is Phase.FORWARD:
            self.parameters.read(numbers, [name for name, _ in self._running])
            self._follow_buffers(func, args, numbers)
        work = self.works.add(func, args, kwargs, result)
        self.ops.append(RawOp(work, numbers, made, *self._noted_place(), self.phase))
        return result

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see device/ledger.py: torch would wrap the method above in a switch that is not needed here

    def _noted_place(self) -> tuple[str, int]:
        place = self.place
        if self.phase is Phase.BACKWARD:
            # A recomputation inside backward makes nodes of its own, which belong to the block that is recomputed.
            self._turn(place)
        return place

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
        return f"{func} {f'in {self.module}' if self.module else 'outside of the blocks'}"

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


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in (FakeTensor, nn.Parameter, torch.Tensor) and tensor.layout is torch.strided
