"""The head of a causal language model whose loss is computed in pieces (``cross_entropy``). The model stays as it is.

A language model of transformers calls its head, a linear layer, and hands what that returns to its ``loss_function``,
which it lets users replace. In training on a batch with labels, hooks on the head give it no tokens at all and remember
the hidden state that it was called with. The ``loss_function`` put here calls the head a second time, with that hidden
state and the index of the entries asked for, upon which a hook computes their log-probabilities in pieces. So the
parameters are used inside the head's forward, like any other use of them. The rest of the loss is torch's own.

The model's output then holds logits of no tokens, with which nobody can compute (``no_logits``). Evaluation,
generation, and passes without labels, without gradients or under autocast are as they were.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional as F

from forebay.errors import ModelError
from forebay.runtime.cross_entropy import picked_log_probabilities
from forebay.runtime.no_logits import REMEDY, NoLogits
from forebay.runtime.pretrained import is_pretrained
from forebay.runtime.tiled_loss import picked_from_tiles
from forebay.runtime.tiles import TiledLinear

__all__ = ["ChunkedHead", "Recognised", "recognise"]

INDEX = "forebay_index"
"""The keyword by which the loss tells the hooks of the head what to compute."""


@final
@dataclass(frozen=True)
class Recognised:
    """A causal language model, its head, and the place of ``labels`` among the arguments of its forward."""

    model: Any
    head: nn.Linear | TiledLinear
    place: int

    def trains_on(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Whether the model is called with labels."""
        given = args[self.place] if len(args) > self.place else kwargs.get("labels")
        return given is not None


def recognise(model: nn.Module) -> Recognised | str:
    """The language model, ``model`` itself or a module of it, whose loss can be computed in pieces; or, in words, why
    there is none. Whether its logits reach the loss as the head made them shows when it runs."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    if losses is None:
        return "the model is none of transformers"
    found = [(m, head) for m in model.modules() if (head := _head_of(m)) is not None]
    if len(found) != 1:
        return f"there are {len(found)} language models with a linear head in the model"
    whole, head = found[0]
    accepted = list(inspect.signature(whole.forward).parameters)
    if "labels" not in accepted:
        return "the model's forward takes no labels"
    if not any(map(_asks_for_loss, type(whole).__mro__)):
        return "the model computes its loss itself, where nobody can put another one"
    if whole.loss_function is not losses.ForCausalLMLoss:
        return "the model's loss is not transformers' standard one for causal language models"
    if head._forward_hooks or head._forward_pre_hooks or head._backward_hooks or head._backward_pre_hooks:
        return "the model's head has hooks, which would see no logits"
    return Recognised(whole, head, accepted.index("labels"))


def _asks_for_loss(kind: type) -> bool:
    """Whether the forward of a model's class has ``loss_function`` compute the loss, which every model has. (T5 and
    others do without.)"""
    forward = kind.__dict__.get("forward")
    wrapped = None if forward is None else inspect.unwrap(forward)
    return isinstance(wrapped, FunctionType) and "loss_function" in wrapped.__code__.co_names


def _head_of(module: Any) -> nn.Linear | TiledLinear | None:
    head = module.get_output_embeddings() if is_pretrained(module) else None
    # Exactly this class: what is made of one (adapters, quantised weights) computes something else.
    return head if type(head) is nn.Linear or isinstance(head, TiledLinear) else None


def _is_flattened(head: Any, hidden: torch.Tensor) -> bool:
    """Whether torch's linear layer computes all tokens as one matrix product (``aten/src/ATen/native/Linear.cpp``)."""
    return head.bias is None or hidden.is_contiguous()


@final
class ChunkedHead:
    """The hooks on one model. ``piece`` is the most bytes of logits at a time.

    To be made after the hooks that see to the head's parameters: these are there when those here are called.
    """

    def __init__(self, found: Recognised, piece: int) -> None:
        self._model = weakref.ref(found.model)
        self._head = weakref.ref(found.head)
        self._place = found.place
        self._piece = piece
        self._plain = found.model.loss_function
        # A model that comes in evaluation mode, as ``from_pretrained`` leaves it, may be trained in it: some loops
        # never call ``train()``. Once it was in training mode, evaluation mode means what it says.
        self._is_told_modes: bool = found.model.training
        self.losses = 0
        # What is under way in a forward: the threads in which one for the loss runs (several may take turns, but not
        # between head and loss); what the head was called with, by the hidden state and, of its second call, the
        # index; what it returned for each hidden state.
        self._active: set[int] = set()
        self._call: tuple[torch.Tensor, torch.Tensor | None] | None = None
        self._waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._handles = [
            found.model.register_forward_pre_hook(self._before_model, with_kwargs=True),
            found.model.register_forward_hook(self._after_model, always_call=True),
            # After the hooks that were there before, and in front of them: inside of all.
            found.head.register_forward_pre_hook(self._before_head, with_kwargs=True),
            found.head.register_forward_hook(self._after_head, prepend=True),
        ]
        found.model.loss_function = self._loss

    def remove(self) -> None:
        """Leaves the model as it was."""
        for handle in self._handles:
            handle.remove()
        model = self._model()
        if model is not None:
            model.loss_function = self._plain
        self._forget()

    def _forget(self) -> None:
        self._active.discard(threading.get_ident())
        self._call = None
        self._waiting.clear()

    # Hooks.

    def _before_model(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._forget()
        head = self._head()
        self._is_told_modes = self._is_told_modes or module.training
        evaluates = self._is_told_modes and not module.training
        if head is None or evaluates or not torch.is_grad_enabled():
            return
        given = Recognised(module, head, self._place).trains_on(args, kwargs)
        if given and not torch.is_autocast_enabled(next(head.parameters()).device.type):
            self._active.add(threading.get_ident())

    def _after_model(self, module: nn.Module, args: Any, output: Any) -> None:
        unused = bool(self._waiting) and output is not None
        head = self._head()
        if head is not None and self._is_active() and isinstance(output, MutableMapping):
            for name, value in output.items():
                if type(value) is torch.Tensor and not value.numel() and value.shape[-1:] == (head.out_features,):
                    output[name] = value.as_subclass(NoLogits)
        self._forget()
        if unused:
            raise ModelError(f"the model's head was called and its logits did not go to the model's loss; {REMEDY}")

    def _is_active(self) -> bool:
        return threading.get_ident() in self._active

    def _before_head(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if INDEX in kwargs:
            hidden, index = args[0], kwargs[INDEX]
        elif self._is_active() and len(args) == 1 and not kwargs and _is_flattened(module, args[0]):
            hidden, index = args[0], None
        else:
            return None
        self._call = hidden, index
        # Not a view: the graph of what the head returns would keep the hidden state.
        return (hidden.new_empty((*hidden.shape[:-2], 0, hidden.shape[-1])),), {}

    def _after_head(self, module: Any, args: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self._call is None:
            return None
        (hidden, index), self._call = self._call, None
        if index is not None:
            if isinstance(module, TiledLinear):
                return picked_from_tiles(module, hidden, index, self._piece)
            return picked_log_probabilities(hidden, module.weight, module.bias, index, self._piece)
        logits = output.detach()
        self._waiting.append((hidden, logits))
        return logits

    # The loss.

    def _loss(self, logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the model calls as its ``loss_function``."""
        if not self._waiting:
            loss: torch.Tensor = self._plain(logits, *args, **kwargs)
            return loss
        hidden = next((given for given, returned in self._waiting if returned is logits), None)
        if hidden is None:
            raise ModelError(f"the model changes its logits between its head and its loss; {REMEDY}")
        self._waiting = [pair for pair in self._waiting if pair[1] is not logits]
        self.losses += 1
        return self._of_hidden(hidden, *args, **kwargs)

    def _of_hidden(
        self,
        hidden: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        """``transformers.loss.loss_utils.ForCausalLMLoss`` of the logits of ``hidden``."""
        head = self._head()
        if head is None or head.out_features != vocab_size:
            raise ModelError(f"the model's loss is over {vocab_size} entries, not over those of its head; {REMEDY}")
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()
        target = shift_labels.view(-1).to(hidden.device)
        tokens = hidden.numel() // hidden.shape[-1]
        if len(target) != tokens:
            raise ModelError(f"the batch has {len(target)} labels for {tokens} tokens; give one for each")
        ignored = target == ignore_index
        picked = head(hidden, **{INDEX: torch.where(ignored, 0, target)[:, None]})
        # Of each token there is one class now, number 0: the sum over tokens is torch's own.
        classes = torch.where(ignored, -100, 0)
        if num_items_in_batch is None:
            return F.nll_loss(picked, classes)
        total = F.nll_loss(picked, classes, reduction="sum")
        if isinstance(num_items_in_batch, torch.Tensor):
            num_items_in_batch = num_items_in_batch.to(total.device)
        return total / num_items_in_batch
