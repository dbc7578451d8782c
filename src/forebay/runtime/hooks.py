"""The hooks on the user's model: what torch tells forebay, and nothing else.

module, before and after forward   parameters of its blocks are exposed and hidden again; what it computes is timed
                                   and, where the plan says so, recomputed (recompute.py) or moved (offloading.py)
root, before and after forward     a pass begins and ends
parameter, after accumulation      a gradient lands
module, state_dict and its load    plain names and plain values, wherever they live (plain_names.py)
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, SupportsIndex, final

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.hooks import RemovableHandle

from forebay.arguments import expect
from forebay.device.base import NoWatch
from forebay.errors import ForebayError, UsageError
from forebay.model import Block
from forebay.runtime.attributes import beside_blocks
from forebay.runtime.compiled_modules import CompiledModules
from forebay.runtime.forward_order import Passing
from forebay.runtime.forward_writes import lost
from forebay.runtime.gradients import host_copy, is_gone
from forebay.runtime.offloading import Offloading
from forebay.runtime.open_blocks import OpenBlocks
from forebay.runtime.passes import Pass, Running, calls_under_way, expect_no_trace, expect_no_transform, part_by_itself
from forebay.runtime.plain_names import PlainNames
from forebay.runtime.recompute import Recomputation
from forebay.runtime.saving_scope import Saves, SavingScope, quiet_blocks
from forebay.runtime.session import Phase, Session
from forebay.runtime.tiles import Tiled
from forebay.runtime.unplanned import Unplanned
from forebay.runtime.vigil import batch_shape

__all__ = ["Attachment", "GradientHook", "RootHook", "attachment_of", "is_prepared", "prepared_session", "session_of"]


@final
class RootHook:
    """The root module's forward pre-hook; also how a session is found again from its model."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.attachment.before_root(args, kwargs)


@final
class GradientHook:
    """A parameter's hook after accumulation; also how a part of a prepared model is known for what it is.

    The session is held weakly: torch keeps these hooks where the garbage collector does not look, so that a cycle
    from the session to its parameters and back would never be freed.
    """

    def __init__(self, session: Session, name: str) -> None:
        self._session = weakref.ref(session)
        self._name = name

    def __call__(self, parameter: nn.Parameter) -> None:
        session = self._session()
        if session is not None:
            session.gradient_made(self._name, parameter)


def is_prepared(model: nn.Module) -> bool:
    """Whether ``model``, a part of it or a model that it is part of is prepared. Raises ``UsageError`` for no model."""
    _expect_module(model)
    if any(session_of(module) is not None for module in model.modules()):
        return True
    hooks = (h for p in model.parameters() for h in (p._post_accumulate_grad_hooks or {}).values())
    return any(isinstance(hook, GradientHook) for hook in hooks)


def session_of(model: nn.Module) -> Attachment | None:
    """The attachment of a prepared model, or None. Raises ``UsageError`` for what is no model."""
    _expect_module(model)
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, RootHook):
            return hook.attachment
    return None


def _expect_module(model: object) -> None:
    expect("model", model, nn.Module, "a torch.nn.Module")


def attachment_of(model: nn.Module) -> Attachment:
    """The attachment of a prepared model. Raises ``UsageError`` for a model that is not prepared."""
    attachment = session_of(model)
    if attachment is None:
        raise UsageError("this model is not prepared; call forebay.prepare(model, optimizer, ...) first")
    return attachment


def prepared_session(model: nn.Module) -> Session:
    """The session of a prepared model. Raises ``UsageError`` for a model that is not prepared."""
    return attachment_of(model).session


@final
class Attachment:
    """All hooks of one session on one model. They cannot be copied, and so neither can a prepared model: a copy would
    share threads, arenas and files with the original."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UsageError(
            "a prepared model cannot be copied or pickled; save its state_dict(), or forebay.close() it first; an "
            "average of its weights is made of forebay.parameters(model)"
        )

    def __init__(self, session: Session, root: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        self.session = session
        self._root = weakref.ref(root)
        self._handles: list[RemovableHandle] = []
        self._endings: list[Callable[[], None]] = []
        self._unseen = session.saved.unseen
        self._recomputation = Recomputation(
            session.saved, session.comes_to_block, self._recompute, session.watch, session.stash
        )
        self._offloading = Offloading(session.saved, session.save_order)
        # Held while several passes take turns: one accumulation at a time.
        self.accumulating = threading.Lock()
        self.passing = Passing.planned(session.plan.accumulation)
        # The pass that runs, or ran last; while several take turns, the one whose turn it is.
        self.current = Pass()
        self._beginning = threading.Lock()
        # Threads whose forward did not begin, and whose after-hooks are still to be called.
        self._turned_away: set[int] = set()
        # What the plan was made for, if that is known.
        self.planned_for: Unplanned | None = None
        self.has_tiles = any(isinstance(module, Tiled) for module in modules.values())
        self._compiled = CompiledModules(root, session.plan, watched=not isinstance(session.watch, NoWatch))
        streamed = [b for b in session.model.blocks if not session.store.blocks[b.name].placement.resident]
        self._streamed = {b.name for b in streamed}
        self._streamed_names = {p.name for b in streamed for p in b.parameters}
        self._open = OpenBlocks(session, self._streamed)
        self._quiet = quiet_blocks(session.plan, session.model.blocks, modules)
        try:
            self._attach(root, modules, streamed)
        except BaseException:
            self._remove_hooks()
            raise
        remark = self._compiled.remark(session.torch_device)
        if remark:
            warnings.warn(remark, stacklevel=4)

    # Attaching and detaching.

    def _attach(self, root: nn.Module, modules: Mapping[str, nn.Module], streamed: Sequence[Block]) -> None:
        keep = self._handles.append
        named = {block.module for block in self.session.model.blocks}
        beside = beside_blocks(root, [module for name, module in modules.items() if name in named])
        for block in self.session.model.blocks:
            module, treatments = modules.get(block.module or block.name), self.session.plan.treatments(block.name)
            if module is None:
                continue
            compiled = block.module in self.session.plan.compiled
            if compiled:
                self._handles += self._unseen.attach(module)
            if block.name in self.session.plan.recompute:
                self._handles += self._recomputation.attach(block.name, module, treatments, beside, compiled=compiled)
            elif treatments:
                self._handles += self._offloading.attach(block.name, module, treatments)
        for name, blocks in self._asked(streamed).items():
            # Before the user's own hooks, and before those of a recomputation: both may read the parameters.
            module = modules[name]
            before, after = self._compiled.beside(module, self._before_module(tuple(blocks)), self._after_module)
            keep(module.register_forward_pre_hook(before, prepend=True))
            # always_call: an exception inside forward must close the block too, so that the next step works.
            keep(module.register_forward_hook(after, always_call=True))
        # Last and in front of all: a pass begins before its first block is asked for.
        keep(root.register_forward_pre_hook(RootHook(self), prepend=True, with_kwargs=True))
        keep(root.register_forward_hook(self._after_root, always_call=True))
        for name, parameter in self.session.parameters.items():
            if parameter.requires_grad:
                keep(parameter.register_post_accumulate_grad_hook(GradientHook(self.session, name)))
        self._handles += PlainNames(self.session, self._streamed_names).attach(modules)

    def _asked(self, streamed: Sequence[Block]) -> dict[str, list[Block]]:
        """Modules whose forward is told of, and the blocks of each: all modules that read a streamed block, and of a
        resident block, whose parameters are always there, the ones that say when it computes."""
        asked: dict[str, list[Block]] = {}
        for block in self.session.model.blocks:
            # Inside of compiled code there is no place for hooks: the block is there from its begin to its end.
            alone = block not in streamed or block.module in self.session.plan.compiled
            whole = block.module if alone else None
            for name in (whole,) if whole is not None else block.modules:
                asked.setdefault(name, []).append(block)
        return asked

    def hide_all(self) -> None:
        """Points every streamed parameter at its stand-in."""
        for name in self._streamed_names:
            self.session.hide(name)

    def detach(self) -> None:
        """Takes every hook off and gives the parameters their values back, as ordinary tensors.

        What was at home on the host stays where it is; what was on disk is read into memory. Raises the first error
        of what could not be read or given back, after everything else has its values.
        """
        self._remove_hooks()
        self._recomputation.abandon()
        self._offloading.abandon()
        self._unseen.abandon()
        self.current.scopes.close()
        # The device may be the caller's, and go on to another model.
        self.session.device.ledger.remark = ""
        # After a fault the step's account is still open; what is made from here on is not the device's.
        self.session.watch.activate(False)
        errors: list[Exception] = []
        try:
            self.session.replaced.take_over()
        except Exception as error:
            errors.append(error)
        for name, parameter in self.session.parameters.items():
            try:
                self._give_back(name, parameter)
            except Exception as error:  # whatever it is, the others get their values
                errors.append(error)
        if not errors:
            return
        if isinstance(errors[0], ForebayError):
            raise errors[0]
        raise ForebayError(f"a parameter was not given back as it should be ({errors[0]})") from errors[0]

    def at_end(self, ending: Callable[[], None]) -> None:
        """Has ``ending`` called when the hooks are taken off."""
        self._endings.append(ending)

    def _remove_hooks(self) -> None:
        while self._endings:
            self._endings.pop()()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @torch.no_grad()
    def _give_back(self, name: str, parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        if name in self._streamed_names:
            self.session.hide(name)  # what cannot be read stays NaN
        parameter.data = self.session.contents.value(name)
        if gradient is not None and not is_gone(gradient):
            # Of its dtype: with the parameter the user may have changed that of the gradient.
            parameter.grad = host_copy(gradient).to(parameter.device, parameter.dtype)

    # Forward.

    def before_root(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """A pass begins, on the batch that ``args`` and ``kwargs`` are. Raises ``UsageError`` in the middle of one of
        another thread, in the loop of another model, inside of ``torch.func``, or where the model is traced."""
        expect_no_transform()
        expect_no_trace()
        root = self._root()
        with self._beginning:
            try:
                self.session.own_loop.expect()
                self.current.begin(root)
            except UsageError:
                self._turned_away.add(threading.get_ident())
                raise
        if self.session.phase is Phase.FORWARD:
            if calls_under_way(root, sys._getframe()) > 1:
                return  # part of the same pass
            self.abandon()
        elif self.session.gathering is None:
            self._open.close_all()  # those of a checkpoint of the model's own, if the backward before was interrupted
        self.current.running.clear()
        self.current.training = torch.is_grad_enabled()
        # With dropout on or off: other things are made and saved.
        mode = root is not None and root.training
        if self.planned_for is not None:
            # Micro-batches that pass together are planned as such.
            alone = self.current.training and self.session.gathering is None
            waiting = self.session.measure.waiting if alone else 0
            evaluates = self.current.training and not mode
            remark = self.planned_for.remark(args, kwargs, waiting, evaluates=evaluates)
            self.session.device.ledger.remark = remark
        saves = self.session.begin_forward(lambda: (mode, batch_shape(args, kwargs)), training=self.current.training)
        self.current.scopes.enter_context(self._compiled.standing_back())
        self.current.saving = None
        if saves is Saves.NOTHING:
            return  # nothing streams, and what such a pass saves has been seen
        # Only here, and never around a single block: hooks that a checkpoint sets inside the root's forward, and
        # again in its recomputation, must stay the innermost ones.
        scope = SavingScope(self.session.saved, self._quiet if saves is Saves.NEEDED else (), self._streamed)
        self.current.scopes.enter_context(scope)
        if saves is Saves.NEEDED and self._quiet:
            self.current.saving = scope

    def _recompute(self, block: str, again: Callable[[], None]) -> None:
        """Runs ``again``, the forward of ``block`` in backward, as it ran the first time."""
        with self._compiled.standing_back():
            self.session.recompute(block, again)

    def abandon(self) -> None:
        """Ends a forward that was interrupted: what it left open is closed."""
        self._recomputation.abandon()
        self._offloading.abandon()
        self._unseen.abandon()
        self._open.close_all()
        self.current.scopes.close()
        self.session.end_forward(backward_follows=False)

    def _after_root(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() in self._turned_away:
            self._turned_away.discard(threading.get_ident())  # the last hook of that call
        elif self.session.phase is Phase.FORWARD and not self.current.running:
            self.current.scopes.close()
            # After an exception torch calls this with None. What the user does about it is no part of a step.
            self.session.end_forward(backward_follows=self.current.training and output is not None)

    def _before_module(self, blocks: tuple[Block, ...]) -> Callable[[nn.Module, Any], None]:
        def before(module: nn.Module, args: Any) -> None:
            expect_no_transform(module)
            self._expect_pass(module)
            again = SavingScope.again(self.session.saved) if self._streamed else None
            self.current.running.append(Running(module, blocks, again))
            if self.current.saving is not None:
                self.current.saving.begin(blocks)
            for block in blocks:
                self._open.open(block)

        return before

    def _expect_pass(self, module: nn.Module) -> None:
        """Raises ``UsageError`` where a part of the model is trained by itself: its graph would go by nobody who counts
        bytes, and would keep every slot that it has read. Without gradients nothing is kept, and beside a pass of the
        whole model (a loss that calls its head once more) it is counted with that."""
        if self.session.phase is not Phase.IDLE or self.session.measure.in_step:
            return
        outside = torch.is_grad_enabled()
        # Backward may begin with a recomputation of the model's own, before forebay is told of it.
        if outside and torch._C._current_graph_task_id() == -1:
            raise part_by_itself(module)

    def _after_module(self, module: nn.Module, args: Any, output: Any) -> Any:
        if threading.get_ident() in self._turned_away:
            return None
        if not self.current.running or self.current.running[-1].module is not module:
            return None  # its pre-hook did not come as far as opening
        _, blocks, again = self.current.running.pop()
        if again is not None:
            again.close()
        if self.current.saving is not None:
            self.current.saving.end(output, partial(self.session.reached, blocks[0].name))
        instead, changed = self._without_aliases(output), list[str]()
        for block in blocks:
            # A pre-hook that failed in the middle has opened only the first of its blocks.
            changed += self._open.close(block, whole=output is not None)
        if changed:
            raise lost(changed[0])
        return instead

    def _without_aliases(self, output: Any) -> Any:
        """The output with views of a slot copied: they would hold the slot for as long as they live. None where there
        are none: the containers in it, which the model may go on with, stay the same objects then."""

        def is_alias(value: Any) -> bool:
            return type(value) is torch.Tensor and self.session.access.slot_at(value) is not None

        if type(output) is torch.Tensor:  # what most modules return
            return output.clone() if is_alias(output) else None
        if not any(is_alias(value) for value in tree_leaves(output)):
            return None
        return tree_map(lambda value: value.clone() if is_alias(value) else value, output)
