"""One training step of a model under fake tensors: forward, the loss, and backward.

It runs under torch's ``FakeTensorMode``, which computes shapes and no values, with a dispatch mode on top that writes
down every op (``recorder``). Saved-tensor hooks around forward and loss give autograd handles instead of tensors
(``roots``), so that a storage dies when its last other holder lets go, and its saved handles separately. Integers stay
real, because control flow may ask for their values (``values``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_unflatten

from forebay.device.compiling import as_written
from forebay.errors import CaptureFailed, ForebayError, ModelError
from forebay.memory import Kind
from forebay.profiler import remarks
from forebay.profiler.alike import blank
from forebay.profiler.arrays import Arrays
from forebay.profiler.attributes import Attributes, attributes_put_back
from forebay.profiler.batch import Scalar, integers_for, scalar_loss
from forebay.profiler.guesses import Guess
from forebay.profiler.guessing import Undecided
from forebay.profiler.host_draws import steer
from forebay.profiler.originals import Originals
from forebay.profiler.quiet import quiet_torch
from forebay.profiler.recorder import Recorder
from forebay.runtime.autocasting import autocast_dtype
from forebay.runtime.blocks import BoundModel, at_every_place
from forebay.runtime.generators import drawn_from
from forebay.runtime.head import ChunkedHead, Recognised
from forebay.runtime.inside import own_generators
from forebay.runtime.losses import LossFunction, expect_loss
from forebay.runtime.no_logits import NO_LOGITS, REMEDY
from forebay.runtime.passes import argument_name

__all__ = ["FakeStep", "Losing", "Loss", "losing_of"]


@final
@dataclass(frozen=True)
class Loss:
    """The loss of a step, and what the loop keeps beside it (``kept``)."""

    scalar: Scalar
    kept: Any = None


Losing = Callable[[nn.Module, Any, Any], Loss]
"""Calls a model with arguments and keywords, and makes the loss."""


def losing_of(batch: Any, loss_fn: LossFunction | None) -> Losing:
    """What the loop does with ``batch``, which the arguments are made of (``call_arguments``)."""

    def named(model: nn.Module, args: Any, kwargs: Any) -> Loss:
        output = model(*args, **kwargs)
        return Loss(scalar_loss(output), output)

    def by(function: LossFunction, model: nn.Module, args: Any, kwargs: Any) -> Loss:
        whole = kwargs if isinstance(batch, Mapping) else args if isinstance(batch, tuple | list) else args[0]
        return Loss(Scalar(expect_loss(function(model, whole), "the batch")))

    return named if loss_fn is None else partial(by, loss_fn)


@final
class _Whole(nn.Module):
    """Stands around the model, so that ``functional_call`` puts the fakes in its place for backward too: a
    checkpointed block reads its parameters again there."""

    def __init__(self, model: nn.Module, run: Callable[[], None]) -> None:
        super().__init__()
        self.model = model
        self._run = run

    def forward(self) -> None:
        self._run()


@final
class FakeStep:
    """One run of a model's step under fake tensors."""

    def __init__(
        self,
        model: nn.Module,
        bound: BoundModel,
        device: torch.device,
        guess: Guess,
        head: Recognised | None,
        loss_piece: int,
    ) -> None:
        self._model = model
        self._head = head
        self._loss_piece = loss_piece
        self._bound = bound
        self._device = device
        self._guess = guess
        self._originals = Originals()
        self.recorder = Recorder(device, guess, self._originals)
        self.arrays = Arrays()
        self.changes_modules = False
        self.held_nbytes = 0
        self.unseen_nbytes = 0
        self.remarks = dict[str, None]()
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)

    def run(self, losing: Losing, args: Any, kwargs: Any) -> None:
        """Forward, the loss that ``losing`` makes, and backward. Raises ``CaptureFailed`` when the model cannot run
        so."""
        recorder, own = self.recorder, own_generators(self._model.modules())
        with as_written(), drawn_from(0, own), self._mode:
            has_drawn = steer(self._guess.draw)
            state = self._state()
            inputs, keywords = self._inputs(args, kwargs)
            chunked = None if self._head is None else ChunkedHead(self._head, self._loss_piece)
            seen = [self._model.register_forward_hook(self._see)]
            if self._head is not None:  # it may be inside of the model, which reads its output
                seen.append(self._head.model.register_forward_hook(self._refuse_logits))
            try:
                with quiet_torch():
                    whole = _Whole(self._model, lambda: self._recorded(losing, inputs, keywords))
                    fakes = {f"model.{name}": tensor for name, tensor in at_every_place(self._model, state).items()}
                    # Each place once. With tie_weights a module that occurs twice would be given its fakes by both of
                    # its names, and keep, as what was there before, those that came first.
                    functional_call(whole, fakes, (), tie_weights=False)
                if chunked is not None and not chunked.losses:
                    raise ModelError(f"the loss cannot be computed in pieces: the model computed none; {REMEDY}")
            except ForebayError:
                raise
            except Exception as error:
                # What fails behind a value that was made up may fail by it.
                if recorder.values.decided:
                    raise Undecided(recorder.undecided, tuple(reversed(recorder.values.decided_at))) from error
                raise CaptureFailed(self._why(error)) from error
            finally:
                self._originals.put_back()
                recorder.values.drawn |= has_drawn()
                for handle in seen:
                    handle.remove()
                if chunked is not None:
                    chunked.remove()
                recorder.at.remove_hooks()

    def _refuse_logits(self, model: nn.Module, args: Any, output: Any) -> None:
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and not tensor.numel():
                self.recorder.refuse_reads(tensor, NO_LOGITS)

    def _see(self, model: nn.Module, args: Any, output: Any) -> None:
        # Looked through, not asked: transformers warns whoever asks for the other of the two names.
        if isinstance(output, Mapping) and any(n in remarks.CACHES and c is not None for n, c in output.items()):
            self.remarks[remarks.KEEPS_CACHE] = None

    def _recorded(self, losing: Losing, args: Any, kwargs: Any) -> None:
        """The step, behind the forward of another one where the guess says so."""
        recorder = self.recorder
        with attributes_put_back(self._model):
            if self._guess.later:
                # Its own recorder has integers remain real, which the model may keep and ask for.
                with Recorder(self._device, self._guess, self._originals), Arrays(), _autocast_on(self._device):
                    losing(self._model, args, kwargs)
                torch.clear_autocast_cache()  # as behind the forward that counts
            recorder.at.follow_modules(self._modules(), (recorder.pack, recorder.unpack))
            askers = {name for block in self._bound.model.blocks for name in block.modules}
            recorder.at.follow_root(self._model)  # behind its modules, so that it comes first where it is one of them
            recorder.at.follow_askers({name: self._model.get_submodule(name) for name in sorted(askers)})
            # The hooks are in the modules' attributes, too.
            before = Attributes(self._model)
            with recorder, self.arrays:
                self._forward_and_backward(losing, args, kwargs)
            self.changes_modules = before.are_changed() or self._originals.any

    def _forward_and_backward(self, losing: Losing, args: Any, kwargs: Any) -> None:
        recorder = self.recorder
        with _autocast_on(self._device), torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
            made = losing(self._model, args, kwargs)
        self.unseen_nbytes = made.scalar.unseen_nbytes
        if made.scalar.is_sum:
            self.remarks[remarks.SUMMED] = None
        # A loop leaves autocast before backward, which frees the copies of parameters that autocast keeps.
        torch.clear_autocast_cache()
        recorder.begin_backward()
        # In this thread: that of a card numbers the nodes that it makes from 0 on, and by their numbers it is known of
        # which block a node is.
        with torch.autocast(self._device.type, enabled=False), torch.autograd.set_multithreading_enabled(False):
            made.scalar.loss.backward()
        # A loop that names the model's output (``output = model(...)``) holds it while the next forward runs.
        self.held_nbytes = recorder.roots.live_nbytes()
        del made

    def _fake(self, tensor: torch.Tensor) -> torch.Tensor:
        return blank(self._mode, tensor, self._device)

    def _real(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the step's device: an op in place must not reach what the caller owns."""
        with _disable_current_modes():
            # Of what is expanded (positions of one sequence for all) a single one: torch does not write to the others.
            single = tensor.detach()[tuple(slice(1 if stride == 0 else None) for stride in tensor.stride())]
            made = torch.empty_strided(single.shape, single.stride(), dtype=tensor.dtype, device=self._device)
            made.copy_(single)
            return made if made.shape == tensor.shape else made.expand(tensor.shape)

    def _state(self) -> dict[str, torch.Tensor]:
        """Fake parameters and buffers by name, registered as sources in the order that the trace wants."""
        state = {}
        for block in self._bound.model.blocks:
            for spec in block.parameters:
                real = self._bound.parameters[spec.name]
                made = state[spec.name] = self._fake(real).requires_grad_(real.requires_grad)
                self.recorder.parameters.add(made, spec.name, block)
                if spec.trainable:
                    made.register_post_accumulate_grad_hook(self.recorder.gradient)
        for name, buffer in self._model.named_buffers():
            known = not buffer.is_meta and not buffer.is_floating_point() and not buffer.is_complex()
            made = state[name] = self._real(buffer) if known else self._fake(buffer)
            self.recorder.source(made, Kind.BUFFER, name)
        return state

    def _inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        leaves, spec = tree_flatten_with_path((args, kwargs))
        made = []
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                name = argument_name(path)
                known = not leaf.is_floating_point() and not leaf.is_complex()
                given = self._real(integers_for(name, leaf, self._model)) if known else self._fake(leaf)
                self.recorder.source(given, Kind.INPUT, name)
                made.append(given)
            else:
                made.append(leaf)
        inputs, keywords = tree_unflatten(made, spec)
        return inputs, keywords

    def _modules(self) -> dict[str, tuple[nn.Module, str]]:
        """The modules that say which block runs. A block that encloses others is none of them: it is there all the
        time, and what runs between the others is outside of all."""
        found: dict[int, tuple[str, nn.Module, str]] = {}
        for block in self._bound.model.blocks:
            for name in block.modules:
                if block.held:
                    continue
                module = self._model.get_submodule(name)
                own = name == block.name or name.startswith(f"{block.name}.")
                if id(module) not in found or own:
                    found[id(module)] = (name, module, block.name)
        return {name: (module, block) for name, module, block in found.values()}

    def _why(self, error: Exception) -> str:
        recorder = self.recorder
        where = f" in {recorder.at.module_failed}" if recorder.at.module_failed else ""
        what = recorder.op_failed or "Python code"
        reason = next(iter(str(error).strip().splitlines()), "") or "no message"
        half = recorder.at.phase.value
        return (
            f"the model's {half} cannot run under fake tensors: {what}{where}: {type(error).__name__}: {reason[:200]}"
        )


@contextlib.contextmanager
def _autocast_on(device: torch.device) -> Iterator[None]:
    """Autocast as the caller has set it, on the device that the fakes are on."""
    dtype = autocast_dtype(device.type)
    with contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype):
        yield
