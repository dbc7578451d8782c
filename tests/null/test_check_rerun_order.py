"""What the checker asks of the ops that run again: which of them, when, and how far; each with one program in which
nothing else is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forebay.checking import check
from forebay.errors import PlanInvalid
from forebay.lowering import lower
from forebay.plans import Plan
from forebay.program import Program, Verb
from forebay.timeline import Lane
from forebay.trace import Trace
from forebay.treatments import Fate, Treatment
from tests.null.test_check_reruns import BLOCKS, MACHINE, gelus
from tests.null.test_check_transfers import changed, inserted, planned, unread, without
from tests.null.test_check_transfers import way as one_way


def generous(trace: Trace, fate: Fate, *ops: str) -> tuple[Plan, Program]:
    """Both blocks run again but for ``ops``; what the program says of its memory is enough for anything."""
    chosen = replace(one_way(fate, 0, *BLOCKS), treatments=tuple(Treatment(op, 0, fate) for op in ops))
    plan = planned(trace, chosen, recompute=BLOCKS)
    program = lower(trace, plan, steps=1)
    claims = (replace(a, peak=1 << 20, changes=()) if a.lane is Lane.COMPUTE else a for a in program.actions)
    return plan, replace(program, actions=tuple(claims))


def ops_of(index: int, first: int, last: int) -> Callable[[Program, list[int]], Program]:
    """The rerun's action number ``index`` with its range of ops moved by so many at either end."""

    def spoiled(program: Program, again: list[int]) -> Program:
        start, stop = program.actions[again[index]].ops
        return changed(program, again[index], ops=(start + first, stop + last))

    return spoiled


def twice(program: Program, again: list[int]) -> Program:
    return inserted(program, again[0] + 1, program.actions[again[0]])


def left_out(index: int) -> Callable[[Program, list[int]], Program]:
    return lambda program, again: without(program, again[index])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (ops_of(0, 0, 1), r"op 7 \(mul of block b\) is run again, and the plan keeps or moves what it has made"),
        (twice, r"op 6 \(pow of block b\) is recomputed twice"),
        (ops_of(2, 0, 1), r"op 11 \(out of block b\) is run again, and the last tensor of its block is saved before"),
        (left_out(1), r"op 8 \(add of block b\) is left out of what is run again before op 14"),
        (ops_of(0, -6, -6), r"op 0 \(pow of block a\) is run again before op 14, which is not its backward"),
        (left_out(2), r"op 10 \(linear of block b\) is not run again, and a tensor of its block is saved after it"),
    ],
)
def test_all_runs_again_once_but_for_named_ops(spoil: Callable[[Program, list[int]], Program], words: str) -> None:
    """b's forward is ops 6 to 11: pow, [mul], add, [tanh], linear, which is the last to save something, and out."""
    trace = gelus()
    plan, program = generous(trace, Fate.KEEP, "mul", "tanh")
    check(trace, MACHINE, plan, program)
    again = [i for i, a in enumerate(program.actions) if a.recomputed and a.block == "b"]
    assert [program.actions[i].ops for i in again] == [(6, 7), (8, 9), (10, 11)]
    with pytest.raises(PlanInvalid, match=words) as caught:
        check(trace, MACHINE, plan, spoil(program, again))
    assert caught.value.subject in BLOCKS


def test_what_backward_does_not_read_runs_again_all_the_same() -> None:
    """Autograd asks for what was saved, and only a rerun of its block has it."""
    trace = unread(gelus())
    plan, program = generous(gelus(), Fate.KEEP, "mul")
    check(trace, MACHINE, plan, program)
    for index in [i for i, a in enumerate(program.actions) if a.recomputed and a.block == "b"][::-1]:
        program = without(program, index)
    with pytest.raises(PlanInvalid, match=r"op 6 \(pow of block b\) is not run again in pass 0, and backward needs"):
        check(trace, MACHINE, plan, program)


def test_a_named_op_at_the_end_is_given_what_it_has_made() -> None:
    """No op reads it, but the rerun is not over before: compute that goes on without it is refused."""
    trace = unread(gelus())
    plan, program = generous(gelus(), Fate.OFFLOAD, "linear")
    check(trace, MACHINE, plan, program)
    reload = next(i for i, a in enumerate(program.actions) if a.verb is Verb.RELOAD)
    late = without_wait(program, reload)
    with pytest.raises(PlanInvalid, match=r"op 10 \(linear of block b\) is given tensor .* may not be back by then"):
        check(trace, MACHINE, plan, late)


def without_wait(program: Program, index: int) -> Program:
    """``program`` in which nobody waits for action ``index``."""
    return replace(
        program, actions=tuple(replace(a, after=tuple(x for x in a.after if x != index)) for a in program.actions)
    )
