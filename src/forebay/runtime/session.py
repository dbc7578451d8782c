"""A prepared model at run time: passes, steps, and what they leave in the timeline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import final

import torch
from torch import nn

from forebay.errors import ForebayError, SessionClosed, UsageError
from forebay.memory import Kind, Tier, TierUsage
from forebay.model import Model, Parameter
from forebay.optim.rules import UpdateRule
from forebay.plans import Plan
from forebay.runtime.access import BlockAccess
from forebay.runtime.backward_end import when_backward_ends
from forebay.runtime.contents import Contents
from forebay.runtime.forward_writes import ForwardWrites
from forebay.runtime.gathering import Gathering
from forebay.runtime.gradients import LandedGradient
from forebay.runtime.holds import Outcome
from forebay.runtime.lookout import Lookout
from forebay.runtime.measure import BACKWARD, FORWARD, Measurement, Phase, Whereabouts
from forebay.runtime.own_loop import OwnLoop
from forebay.runtime.replaced import Replaced
from forebay.runtime.resources import Resources
from forebay.runtime.save_order import SaveOrder
from forebay.runtime.saved import SavedTensors
from forebay.runtime.saving_scope import Saves
from forebay.runtime.standins import StandIns
from forebay.runtime.stepping import Groups, Hyperparameters, Stepping
from forebay.runtime.unplanned import DIFFERENTIATED
from forebay.runtime.updates import Updater
from forebay.scheduling.rounds import Rounds
from forebay.timeline import Timeline
from forebay.treatments import seen_by_op

__all__ = ["Phase", "Session", "Whereabouts"]

TRAINING, EVALUATION = "training", "evaluation"
"""The kinds of pass, each with a record of its own of the order in which blocks are used."""


@final
class Session:
    """One prepared model. The hooks call in (``hooks.py``), the optimizer asks for steps, the interface reads.

    ``names`` are those of its parameters, by ``id``.
    """

    def __init__(
        self,
        plan: Plan,
        model: Model,
        parameters: Mapping[str, nn.Parameter],
        rule: UpdateRule,
        resources: Resources,
        whereabouts: Whereabouts,
    ) -> None:
        self.plan = plan
        self.model = model
        self.parameters = parameters
        self.own_loop = OwnLoop()
        self.names: Mapping[int, str] = {id(parameter): name for name, parameter in parameters.items()}
        self.rule = rule
        self.resources = resources
        self.device = resources.device
        self.watch = resources.watch
        self.store = resources.store
        self.pool = resources.pool
        self.stash = resources.stash
        self._whereabouts = whereabouts
        self.torch_device = torch.device(resources.device.name)
        self.access = BlockAccess(self.pool, self.watch, self.torch_device)
        self.writes = ForwardWrites(self.access, parameters, plan.written)
        ledgers = resources.ledgers
        self.measure = Measurement(self.device, whereabouts, (ledgers.host, ledgers.pinned, ledgers.disk))
        by_op = bool(seen_by_op(plan.activations, plan.recompute).difference(plan.recompute))
        self.save_order = SaveOrder(self.stash, by_op=by_op)
        self.saved = SavedTensors(
            model.blocks, parameters, self.access, self.save_order, self.watch, self.measure, self.reached
        )
        streamed = [block for block in model.blocks if not self.store.blocks[block.name].placement.resident]
        self._stand_ins = StandIns([spec for block in streamed for spec in block.parameters], self.torch_device)
        for name, tensor in self._stand_ins.items():
            self.watch.mark_released(tensor, name)
        store = self.store
        team, cells, way = resources.team, store.cells, plan.streaming
        updater = Updater(
            self.device,
            rule,
            store.workspace,
            team,
            cells,
            store.beside,
            overlap=way.overlap_update,
            promised=plan.device,
        )
        self.stepping = Stepping(
            self.store,
            self.pool,
            updater,
            parameters,
            self.measure,
            self.torch_device,
            way.delay_after,
            Rounds.of(plan),
        )
        self.contents = Contents(model, parameters, self.store, self.pool, self.stepping, self.synchronize)
        self.replaced = Replaced(parameters, self.contents, self.access, self._stand_ins, self.torch_device)
        self.lookout = Lookout(self.watch, parameters, away=bool(self._stand_ins))
        # Whether what a pass saves is more than counted: also where nobody counts it must go through forebay's hooks.
        self._handles_saved = bool(self._stand_ins or plan.recompute or plan.activations)
        # While several passes take turns and count as one (accumulate.py): their gradients.
        self.gathering: Gathering | None = None
        self.saving: Outcome | None = None
        # Parameters that have no gradient when a training forward begins, or there is no room for what it makes.
        staying = [b for b in model.blocks if store.blocks[b.name].placement.resident and not plan.accumulates]
        self._fresh = tuple(spec.name for block in staying for spec in block.parameters)

    # What is running.

    @property
    def phase(self) -> Phase:
        """What the model is doing."""
        return self._whereabouts.phase

    def expect_open(self) -> None:
        """Raises ``SessionClosed`` after ``close``, and in a forked child."""
        self.contents.expect_here()
        if self.phase is Phase.CLOSED:
            raise SessionClosed("this model was closed; prepare it again to train on")

    def begin_forward(self, shape: Callable[[], Hashable], *, training: bool) -> Saves:
        """The root module's forward begins, on a batch of ``shape``. Returns what of all that it saves is to go through
        the hooks for saved tensors."""
        self.expect_open()
        self.contents.expect_written()
        if self.gathering is None or self.gathering.begins():
            if training:
                self._expect_no_gradients()
            self.replaced.take_over()
            self.stepping.in_backward.expect_whole()
            # No gradient of the pass before is beside what this one makes: a budget has room for one of the two.
            self.store.landing.empty()
            if training:
                self.stepping.begin()
            else:
                self.stepping.delay.show()
            self.stash.begin_forward()
            self.save_order.forget()
            self.pool.order.begin(TRAINING if training else EVALUATION)
        batch = shape()
        if training:
            self.save_order.begin(batch, alone=self.gathering is None)
        seen = self.lookout.begins(batch, training=training)
        self._whereabouts.phase = Phase.FORWARD
        self.measure.begin(FORWARD)
        if training:
            self.measure.begin_pass(seen=seen)
        if seen:
            return Saves.ALL
        return Saves.NEEDED if self._handles_saved else Saves.NOTHING

    def _expect_no_gradients(self) -> None:
        """Raises ``UsageError`` where gradients are there that the plan has no room for before backward."""
        for name in self._fresh:
            if self.parameters[name].grad is not None:
                raise UsageError(
                    f"parameter {name} has a gradient when forward begins, and the plan uses its room for other things "
                    f"until backward (accumulates=False): call zero_grad() before the forward, with set_to_none=True, "
                    f"or prepare the model with accumulates=True"
                )

    def end_forward(self, *, backward_follows: bool) -> None:
        """The root module's forward ended, with a result or with an exception."""
        self.measure.end()
        self.measure.gather()
        self.save_order.end(whole=backward_follows)
        if self.gathering is None:
            self.stash.end_forward()
        self._whereabouts.block = ""
        if self.phase is not Phase.CLOSED:
            self._whereabouts.phase = Phase.IDLE
        self.measure.waiting += backward_follows
        if not backward_follows:
            # Else the loss and backward are still to come, and what they take is the step's.
            self.lookout.between_passes()

    def turn(self, phase: Phase) -> None:
        """Of several passes that take turns another one goes on, in ``phase``, in the thread that is to run it."""
        self._whereabouts.phase = phase
        self.measure.end()
        if phase is not Phase.IDLE:
            self.measure.begin(FORWARD if phase is Phase.FORWARD else BACKWARD)
        self.lookout.goes_on()

    def recompute(self, block: str, again: Callable[[], None]) -> None:
        """Runs ``again``, the forward of ``block`` in backward."""
        self.measure.recompute(block)
        try:
            again()
        finally:
            self.measure.recomputed()

    def enter_backward(self) -> None:
        """Something happened that only happens in backward; the first time, backward begins."""
        if self._whereabouts.phase is not Phase.IDLE or torch._C._current_graph_task_id() == -1:
            return
        self._whereabouts.phase = Phase.BACKWARD
        self.measure.begin(BACKWARD)
        when_backward_ends(self.end_backward)
        self.stash.begin_backward()

    def reached(self, block: str) -> None:
        """Backward has come to ``block``: it asks for what the forward has saved, or for a gradient of the result."""
        self.comes_to_block()
        if self.measure.unpacked(block):
            since = self.measure.now()
            self.device.turn.offer()
            self.measure.waited(since)

    def comes_to_block(self) -> None:
        """Backward asks for something, in the mode that it runs in: what runs a block again turns gradients on."""
        self.enter_backward()
        if torch.is_grad_enabled():  # as only in a backward that is differentiated itself
            self.device.ledger.remark = DIFFERENTIATED
            self.access.differentiated = True

    def end_backward(self) -> None:
        """Backward is over, or has raised."""
        self.measure.end()
        self._whereabouts.block = ""
        self._whereabouts.phase = Phase.IDLE
        self.lookout.rests()
        self.access.differentiated = False

    # Gradients and steps.

    def gradient_made(self, name: str, parameter: nn.Parameter) -> None:
        """autograd has accumulated into ``param.grad``: a gradient that does not stay here goes to the host."""
        self.enter_backward()
        if parameter.grad is None:
            return
        if parameter.grad.layout is not torch.strided:
            raise ForebayError(f"the gradient of {name} is sparse; make the embedding with sparse=False")
        if self.gathering is not None and not self.gathering.complete(name):
            return
        gradient, state = parameter.grad, self.contents.state(name)  # only now: it may be a sum of several
        if not isinstance(gradient, LandedGradient):  # else autograd's own accumulation has landed it
            if self.plan.compiled:
                self.watch.found(gradient, Kind.GRADIENT)
            else:
                self.watch.attribute(gradient, Kind.GRADIENT)
            buffer = state.gradients.get(name)
            if buffer is not None:
                self.stepping.land(state, parameter, gradient, buffer)
        self.stepping.landed(state, name)

    def follow(self, hyperparameters: Hyperparameters) -> None:
        """Has the optimizer asked, at any time, for the hyperparameters that a step would have if it came then."""
        self.stepping.hyperparameters = hyperparameters

    def step(self, groups: Groups) -> None:
        """One optimizer step for the parameters named in ``groups`` (name to hyperparameters) that have a gradient.

        Updates of blocks on the host or on disk are queued in the order in which the next forward will want the
        blocks (unless they were made ahead, see ``speculation``), and each fetch waits for its own; with
        ``overlap_update`` off they are waited for here.
        """
        self.expect_open()
        self.own_loop.expect()
        self.replaced.take_over()
        self.stepping.expect_possible(groups)
        self.lookout.rests()
        # The next pass begins where the record begins: its first blocks are fetched as soon as they are updated.
        self.pool.order.begin(TRAINING)
        self.stepping.step(groups)
        if not self.plan.streaming.overlap_update:
            self.store.settle()
        self.pool.prefetch()
        self.measure.end_step()
        self.lookout.step_ended()
        self.lookout.between_passes()

    def give_up_step(self) -> None:
        """The passes since the last step are followed by none: it is skipped, or they have failed on the way. Gradients
        are the caller's to drop."""
        self.expect_open()
        if self.phase is Phase.BACKWARD:  # a turn of micro-batches that pass together
            self.end_backward()
        self.stepping.give_up()
        self.lookout.between_passes()

    # What the interface reads.

    def synchronize(self) -> None:
        """Waits for every transfer and update; raises the first error among them, and ``SessionClosed`` in a forked
        child."""
        self.contents.expect_here()
        self.store.landing.drain()
        self.store.settle()
        self.finish_saving()
        self.device.synchronize()

    def stand_in(self, spec: Parameter) -> torch.Tensor:
        """What ``param.data`` is while the parameter is not on the device; the same tensor every time."""
        return self._stand_ins[spec.name]

    def hide(self, name: str) -> None:
        """Points a parameter that streams at its stand-in."""
        self.parameters[name].data = self._stand_ins[name]

    def is_hidden(self, name: str) -> bool:
        """Whether the parameter's ``data`` is its stand-in."""
        made = self._stand_ins.get(name)
        data = self.parameters[name].data
        return made is not None and data.untyped_storage().data_ptr() == made.untyped_storage().data_ptr()

    @property
    def state_names(self) -> tuple[str, ...]:
        """The optimizer's states per element (``optim.streamed.StateHost``)."""
        return self.rule.state_names

    def parameter(self, name: str) -> Parameter:
        """The record of a parameter that is trained."""
        return self.contents.spec_of[name]

    def read_states(self, name: str) -> dict[str, torch.Tensor]:
        """Copies of the states of one parameter (``contents``)."""
        self.expect_open()
        return self.contents.read_states(name)

    def write_states(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Replaces the states of the parameters named (``contents``)."""
        self.expect_open()
        self.contents.write_states(states)

    def finish_saving(self) -> None:
        """Waits until the last checkpoint stands that is made in the background; raises what went wrong with it."""
        saving = self.saving
        if saving is None:
            return
        with self.device.turn.given_away():
            saving.stands()
        # Only now: where the wait was interrupted, the checkpoint is still on its way.
        self.saving = None
        saving.expect_done()

    def lock(self, folder: Path) -> None:
        """Keeps ``folder`` for this session until it is closed. Raises ``StorageError`` where another one has it."""
        self.expect_open()
        self.resources.locks.take(folder)

    def unlock(self, folder: Path) -> None:
        """Leaves ``folder`` to others, now and not when the session is closed."""
        self.resources.locks.leave(folder)

    def timeline(self) -> Timeline:
        """What was measured so far."""
        ledgers = self.resources.ledgers
        tiers = (self.device.usage(), ledgers.host.usage(), ledgers.pinned.usage(), ledgers.disk.usage())
        counters = {
            "fetches on demand": self.pool.on_demand,
            "fetches ahead": self.pool.prefetched,
            "deviations from the recorded order": self.pool.order.deviations,
            "activations_kept": self.stash.kept,
            "speculated": self.stepping.speculation.speculated,
            "committed": self.stepping.speculation.committed,
            "redone": self.stepping.speculation.redone,
            "disk_written": self.store.disk_written,
        }
        used: tuple[TierUsage, ...] = tuple(t for t in tiers if t.peak or t.tier is not Tier.PINNED)
        return self.measure.timeline(used, counters, self.store.arenas)

    @property
    def elapsed(self) -> float:
        """Seconds since the first training forward began."""
        return self.measure.elapsed

    @property
    def steps(self) -> int:
        """Whole optimizer steps so far."""
        return len(self.measure.step_seconds)

    def close(self) -> None:
        """Gives everything back. The hooks take themselves off (``hooks.Attachment.detach``)."""
        if self.phase is Phase.CLOSED:
            return
        self._whereabouts.phase = Phase.CLOSED
        self.measure.collect()
        self.resources.close()
