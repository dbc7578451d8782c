"""From a plan to a program. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forebay.arenas import Arenas, arenas_of
from forebay.errors import ConfigError
from forebay.lowering.liveness import Liveness
from forebay.lowering.recorder import Recorder
from forebay.lowering.repeating import counterparts, repeated
from forebay.lowering.stages import Grain
from forebay.lowering.walk import Walker
from forebay.memory import Kind, Tier
from forebay.plans import Plan, Update, used_up
from forebay.program import Program, Sketch
from forebay.trace import Trace

__all__ = ["MOST_STEPS", "lower", "sketch"]

LEAST_STEPS = 2
"""One more where updates hang over: how much of them is left when a step begins. Before the second step it is what the
first one has left, which had to wait for none, and before the third one what all later ones leave, too."""

MOST_STEPS = 4
"""Steps after which the lowering no longer waits for one that is like the one before it."""


def lower(
    trace: Trace,
    plan: Plan,
    *,
    steps: int | None = None,
    micro_batches: int = 1,
    liveness: Liveness | None = None,
    sizes: Arenas | None = None,
) -> Program:
    """What the runtime does under ``plan`` in ``steps`` steps of ``micro_batches`` passes each.

    ``steps`` None: as many as it takes until the last is like all that would follow (``LEAST_STEPS``, or more); where
    blocks are updated in turns, until a whole round of steps is. The first step has no record of the order of blocks
    yet, and fetches on demand. Updates ahead of their step are written down as all steps make them that get what they
    took for granted; with several micro-batches the runtime makes those of its first step too early, and again.
    ``liveness`` is that of the trace and ``sizes`` are the arenas of the plan, if the caller has them.

    Raises ``ConfigError`` for a plan of another model and ``DeviceOutOfMemory`` when the slots cannot hold the
    blocks that are in use at one time.
    """
    recorder = Recorder(in_step_with_compute=trace.device == "cpu")
    slots, sizes, done = _walked(trace, plan, recorder, steps, micro_batches, liveness, sizes)
    return Program(
        actions=tuple(recorder.actions),
        slots=slots,
        standing=_standing(trace, plan, sizes),
        steps=done,
        micro_batches=micro_batches,
        checksums=plan.streaming.checksums,
        round=min(done, plan.streaming.update_every),
    )


def sketch(
    trace: Trace,
    plan: Plan,
    *,
    micro_batches: int = 1,
    liveness: Liveness | None = None,
    sizes: Arenas | None = None,
    grain: Grain | None = None,
) -> Sketch:
    """``lower`` for who asks for nothing but seconds; for who only compares them, as coarse as ``grain`` says (but for
    gradients for each of which an update in backward waits). Raises what ``lower`` raises."""
    recorder = Recorder(in_step_with_compute=trace.device == "cpu", sketching=True)
    if grain is not None and used_up(plan.placements, resident=False):
        grain = replace(grain, gradients=0)
    slots, _, done = _walked(trace, plan, recorder, None, micro_batches, liveness, sizes, grain)
    every = plan.streaming.update_every
    return Sketch(tuple(recorder.outlines), slots, done, micro_batches, plan.streaming.checksums, min(done, every))


def _walked(
    trace: Trace,
    plan: Plan,
    recorder: Recorder,
    steps: int | None,
    micro_batches: int,
    liveness: Liveness | None,
    sizes: Arenas | None,
    grain: Grain | None = None,
) -> tuple[tuple[int, ...], Arenas, int]:
    """Writes the steps into ``recorder``. Returns the bytes of the slots, the arenas and the number of steps."""
    _expect_counts(plan, steps, micro_batches)
    _refuse_other_model(trace, plan)
    sizes = sizes or arenas_of(trace.model, plan, trace.state_names)
    walker = Walker(trace, plan, liveness or Liveness(trace), sizes, recorder, grain)
    done, begun, before, after = 0, 0, None, walker.state()
    least = LEAST_STEPS + (plan.streaming.overlap_update and not all(p.resident for p in plan.placements))
    # Once a step is like the one before it, but for whose turn it is: the steps that its round has left.
    settling, left_of_round, again = True, plan.streaming.update_every - 1, None
    while done < steps if steps is not None else settling or left_of_round:
        recorder.step, begun = done, len(recorder.outlines)
        for left in reversed(range(micro_batches)):
            walker.micro_batch(last=not left)
        walker.optimizer_step()
        done, before, after = done + 1, after, walker.state()
        left_of_round -= not settling
        # Only what hangs over is another in the last step that a sketch needs: nothing is new to a walk.
        if settling and recorder.sketching and LEAST_STEPS <= done < least and before == after and not left_of_round:
            again = counterparts(recorder.outlines, begun)
            if again is not None:
                break
        settling = settling and (done < least or (before != after and done < MOST_STEPS))
    end = len(recorder.outlines)
    walker.finish()
    if again is not None:
        recorder.outlines, done = repeated(recorder.outlines, begun, end, again), done + 1
    return tuple(slot.nbytes for slot in walker.pool.slots), sizes, done


def _expect_counts(plan: Plan, steps: int | None, micro_batches: int) -> None:
    if not isinstance(micro_batches, int) or micro_batches < 1 or (steps is not None and steps < 1):
        raise ConfigError(f"a program needs 1 step and 1 micro-batch at least, got {steps} and {micro_batches}")
    if plan.updated(Update.BACKWARD) and micro_batches > 1:
        raise ConfigError(
            f"a plan that updates blocks in backward takes one backward a step, got {micro_batches}; plan "
            f"with update='step', or pass the micro-batches together (forebay.accumulate)"
        )
    if not plan.accumulates and micro_batches > 1:
        raise ConfigError(
            f"a plan with accumulates=False takes one backward a step, got {micro_batches}; plan with accumulates=True"
        )


def _refuse_other_model(trace: Trace, plan: Plan) -> None:
    planned, there = [p.block for p in plan.placements], {b.name for b in trace.model.blocks}
    if set(planned) != there or len(planned) != len(there):
        odd = min(set(planned) ^ there, default="a block named twice")
        raise ConfigError(f"the plan was made for another model: block {odd} is not in both; make the plan again")
    unknown = set(plan.recompute) - there
    if unknown:
        raise ConfigError(f"the plan recomputes block {min(unknown)}, which the model does not have")
    unknown = {block for selection in plan.activations for block in selection.blocks} - there
    if unknown:
        raise ConfigError(f"the plan treats ops of block {min(unknown)}, which the model does not have")


def _standing(trace: Trace, plan: Plan, sizes: Arenas) -> Mapping[Tier, Mapping[Kind, int]]:
    """Bytes that are there all the time. Gradients of resident blocks come with a pass and go with the update."""
    resident = {p.block for p in plan.placements if p.resident}
    parameters = sum(b.nbytes for b in trace.model.blocks if b.name in resident)
    # What is page-locked on a device with a link of its own, arena by arena as far as the pinned budget goes.
    pinned: dict[Kind, int] = {}
    left = plan.budget.pinned
    for kind, nbytes in sizes.pinnable if trace.device == "cuda" else ():
        if left is None or nbytes <= left:
            pinned[kind] = pinned.get(kind, 0) + nbytes
            left = None if left is None else left - nbytes
    return {
        Tier.DEVICE: _there(
            {
                Kind.PARAMETER: sizes.device_slots + parameters,
                Kind.STATE: sizes.device_resident - parameters,
                Kind.BUFFER: trace.model.buffer_nbytes,
                Kind.INPUT: trace.input_nbytes,
                Kind.TEMPORARY: trace.workspace_nbytes,
                Kind.STAGING: sizes.device_updates,
            }
        ),
        Tier.HOST: _there(
            {
                Kind.PARAMETER: sizes.host_parameters,
                Kind.GRADIENT: sizes.host_gradients,
                Kind.STATE: sizes.host_states + sizes.host_residuals,
                Kind.ACTIVATION: sizes.host_activations,
                Kind.STAGING: sizes.host_staging,
            }
        ),
        Tier.PINNED: _there(pinned),
        Tier.DISK: _there(
            {
                Kind.PARAMETER: sizes.disk_parameters,
                Kind.STATE: sizes.disk_states,
                Kind.ACTIVATION: sizes.disk_activations,
            }
        ),
    }


def _there(kinds: Mapping[Kind, int]) -> dict[Kind, int]:
    return {kind: nbytes for kind, nbytes in kinds.items() if nbytes}
