"""Whether two tensors are the same bits, and how far they are apart if not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from forebay import loss, tiling
from forebay.memory import Tier
from forebay.plans import Placement, Plan, Streaming, Update
from forebay.testing.differences import PIECE, Differences, distance, same_bits
from forebay.testing.promises import LOSSES_OF_BITS, ROUNDINGS, VECTORS, Course, Promise
from forebay.treatments import Fate, Selection, Treatment

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_bits_and_not_values() -> None:
    one = torch.tensor([1.0, math.nan, math.inf])
    assert same_bits(one, one.clone()) and distance(one, one.clone()) == math.inf
    assert same_bits(None, None) and not same_bits(one, None)
    assert not same_bits(torch.zeros(2), -torch.zeros(2)) and distance(torch.zeros(2), -torch.zeros(2)) == 0.0
    assert not same_bits(one, one.double()) and not same_bits(one, one[None])
    grid = torch.arange(6.0).view(2, 3)
    assert same_bits(grid.t(), grid.t().contiguous())
    assert same_bits(torch.tensor(2.0), torch.tensor(2.0)) and same_bits(torch.empty(0), torch.empty(0))


def test_distance_is_a_share_of_the_largest_element() -> None:
    expected = torch.tensor([0.0, -4.0, 1.0])
    assert distance(torch.tensor([0.0, -4.0, 1.5]), expected) == 0.125
    assert distance(torch.tensor([0.0, -math.inf, 1.0]), expected) == math.inf
    assert distance(torch.tensor([math.nan, -4.0, 1.0]), expected) == math.inf
    assert distance(None, expected) == distance(expected[:1], expected) == math.inf
    assert distance(torch.ones(1), torch.zeros(1)) == math.inf
    far = torch.zeros(PIECE + 2)
    far[-1] = 1.0
    assert distance(far, torch.cat([torch.full((1,), 2.0), far[1:]])) == 1.0  # the first piece has the largest


def test_a_check_keeps_the_worst_and_each_promise() -> None:
    found = Differences()
    one = torch.ones(2)
    found.note("a", one, one.clone(), "first")
    found.note("b", one * 1.5, one, "second", 0.75)
    found.note("b", one * 1.25, one, "third", 0.25)
    found.note("c", one * 9, one, "fourth", None)
    a, b, c = found.checks
    assert (a.equal, a.kept, a.worst_error, a.where, a.compared) == (True, True, 0.0, "", 1)
    assert (b.equal, b.kept, b.worst_error, b.where, b.compared) == (False, True, 0.5, "second", 2)
    assert (c.equal, c.kept, c.worst_error) == (False, True, 8.0)
    found.note("b", one * 1.3, one, "fifth", 0.25)
    found.note("a", torch.zeros(1), -torch.zeros(1), "sixth")
    a, b, c = found.checks
    assert (a.kept, a.where) == (False, "sixth") and (b.kept, b.where) == (False, "second")


def plan(**changes: object) -> Plan:
    from forebay.budgets import Budget

    return Plan("test", Budget(1), (), Streaming(), 0, 0, 0, **changes)  # type: ignore[arg-type]


def lossy(bits: int) -> Plan:
    kept = Selection(("a",), (Treatment("aten.mm.default", 0, Fate.KEEP, bits),))
    return plan(activations=(kept,), recompute=("a",), changes_numbers=("fewer bits",))


def test_what_a_plan_promises() -> None:
    course = Course()
    exact = Promise()
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        assert Promise.of(plan(), CPU, torch.float32, course) == exact
    assert Promise.of(plan(), CUDA, torch.float32, course) == Promise(
        roundings=ROUNDINGS * 2.0**-23, updates=ROUNDINGS * 2.0**-23, losses=None, outcome=None
    )
    for bits, share in LOSSES_OF_BITS.items():
        assert Promise.of(lossy(bits), CPU, torch.float32, course) == Promise(0.0, None, None, None, share, None)
    for words in (loss.ROUNDED_OTHERWISE, f"head is computed in tiles: {tiling.ROUNDED_OTHERWISE}"):
        parts = plan(loss_piece=1, changes_numbers=(words,))
        assert Promise.of(parts, CPU, torch.float32, course) == Promise(8 * 2.0**-23, None, None, None, None, None)
    # Pieces that give the bits of the whole: what else changes numbers is no reason to look away.
    few = plan(loss_piece=1, changes_numbers=("optimizer states in 8 bits",))
    assert Promise.of(few, CPU, torch.float32, course) == Promise.of(plan(), CPU, torch.float32, course)


def test_a_plan_that_sends_a_part_of_gradients_promises_the_gradients() -> None:
    there = Placement("a", Tier.HOST, Tier.HOST, Tier.DISK, Update.STORAGE)
    made = {"placements": (there,), "changes_numbers": ("gradients go in part",)}
    part, whole = (replace(plan(), streaming=Streaming(gradient_density=share), **made) for share in (0.5, 1.0))
    if torch.backends.cpu.get_cpu_capability() in VECTORS:
        assert Promise.of(part, CPU, torch.float32, Course()) == Promise(updates=None, losses=None, outcome=None)
        assert Promise.of(whole, CPU, torch.float32, Course()) == Promise()


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"accumulate": 0}, {"clip_norm": 0.0}, {"clip_norm": math.nan}])
def test_a_course_that_cannot_be_gone_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be"):
        Course(**wrong)  # type: ignore[arg-type]
