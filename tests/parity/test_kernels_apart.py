"""An update from one copy into another gives the bits of a copy and an update in place, and the first copy stands."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from forebay.kernels.team import Team
from forebay.optim.arithmetic import KernelArithmetic, TorchArithmetic
from forebay.optim.parts import Arithmetic, Held, Part
from forebay.optim.rules import AdamRule, LionRule, SgdRule, UpdateRule
from forebay.states import Moments, form_of

SIZES = (37, 0, 255, 256, 1369, 70_013)
"""Elements: less than a block, none, around one, odd, and enough for two threads."""

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
ADAM = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
SGD = {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "nesterov": False, "maximize": False}
LION = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1}


def adam(moments: Moments = "float32", *, amsgrad: bool = False, decoupled: bool = True) -> AdamRule:
    return AdamRule(decoupled=decoupled, amsgrad=amsgrad, moments=moments)


@dataclass(frozen=True)
class Variant:
    """A rule, its hyperparameters, and the dtypes of a parameter and its gradient."""

    rule: UpdateRule
    group: dict[str, Any]
    parameter: torch.dtype = FP32
    gradient: torch.dtype = FP32
    step: int = 2


VARIANTS = {
    "adamw": Variant(adam(), ADAM),
    "adamw-bf16": Variant(adam(), ADAM, BF16, BF16),
    "adamw-fp16": Variant(adam(), ADAM, FP16, FP16),
    "adamw-bf16-fp32": Variant(adam(), ADAM, BF16, FP32),
    "adam-coupled": Variant(adam(decoupled=False), ADAM),
    "amsgrad": Variant(adam(amsgrad=True), ADAM | {"amsgrad": True}),
    # A state that only other groups have: it goes into the other copy as it is.
    "amsgrad-of-others": Variant(adam(amsgrad=True), ADAM),
    "amsgrad-moments-bf16": Variant(adam("bfloat16", amsgrad=True), ADAM | {"amsgrad": True}, BF16, BF16),
    "moments-bf16": Variant(adam("bfloat16"), ADAM, BF16, BF16),
    "8bit": Variant(adam("8bit"), ADAM),
    "8bit-bf16": Variant(adam("8bit"), ADAM, BF16, BF16),
    "4bit": Variant(adam("4bit"), ADAM),
    "4bit-coupled-bf16": Variant(adam("4bit", decoupled=False), ADAM, BF16, BF16),
    "sgd": Variant(SgdRule(momentum=False), SGD | {"momentum": 0.0, "dampening": 0.0}),
    "sgd-momentum": Variant(SgdRule(momentum=True), SGD, BF16, BF16),
    "sgd-nesterov": Variant(SgdRule(momentum=True), SGD | {"dampening": 0.0, "nesterov": True}),
    "sgd-first": Variant(SgdRule(momentum=True), SGD, BF16, BF16, step=1),
    "sgd-momentum-of-others": Variant(SgdRule(momentum=True), SGD | {"momentum": 0.0, "dampening": 0.0}),
    "lion": Variant(LionRule(), LION),
    "lion-bf16": Variant(LionRule(), LION, BF16, BF16),
}


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def held_of(variant: Variant, size: int, generator: torch.Generator) -> Held:
    value = torch.randn(size, generator=generator)
    states = []
    for name in variant.rule.state_names:
        form = form_of(name)
        count = form.count(size)
        if form.dtype == "uint8":
            states.append(torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8))
        else:
            drawn = 0.01 * torch.randn(count, generator=generator)
            # Only the first moment and the momentum have a sign.
            signed = name.startswith(("exp_avg:", "momentum")) or name == "exp_avg"
            states.append((drawn if signed else drawn.abs()).to(getattr(torch, form.dtype)))
    master = None if variant.parameter is FP32 else value
    return Held(value.to(variant.parameter), master, tuple(states))


def parts_of(variant: Variant) -> list[Part]:
    generator = torch.Generator().manual_seed(0)
    made = []
    for place, size in enumerate(SIZES):
        held = held_of(variant, size, generator)
        gradient = (0.1 * torch.randn(size, generator=generator)).to(variant.gradient)
        made.append(Part(held.parameter, gradient, held.master, held.states, place))
    return made


def tensors(held: Held) -> list[torch.Tensor]:
    return [t for t in (held.parameter, held.master, *held.states) if t is not None]


def cloned(held: Held) -> Held:
    master = None if held.master is None else held.master.clone()
    return Held(held.parameter.clone(), master, tuple(s.clone() for s in held.states))


def in_place(part: Part) -> Part:
    held = cloned(part.written)
    return replace(part, parameter=held.parameter, master=held.master, states=held.states)


def elsewhere(part: Part, *, parameter: bool, states: bool) -> Held:
    """Another copy, with nothing of use in it yet; what is not apart is the part's own. A master is one of the states
    in the home of a block."""
    other = cloned(part.written)
    for tensor in tensors(other):
        tensor.view(torch.uint8).fill_(0x7F)
    own = part.written
    return Held(
        other.parameter if parameter else own.parameter,
        other.master if states else own.master,
        other.states if states else own.states,
    )


def same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def assert_apart(arithmetic: Arithmetic, variant: Variant, *, parameter: bool, states: bool) -> None:
    parts = parts_of(variant)
    expected = [in_place(part) for part in parts]
    arithmetic.update(expected, variant.step, variant.group)
    moved = [replace(part, into=elsewhere(part, parameter=parameter, states=states)) for part in parts]
    stood = [(cloned(part.written), part.gradient.clone()) for part in parts]
    arithmetic.update(moved, variant.step, variant.group)
    for part, want, (before, gradient) in zip(moved, expected, stood, strict=True):
        got = tensors(part.written)
        for number, (one, other) in enumerate(zip(got, tensors(want.written), strict=True)):
            assert same_bytes(one, other), (number, part.parameter.numel())
        places = {tensor.data_ptr() for tensor in got}
        for one, other in zip(tensors(replace(part, into=None).written), tensors(before), strict=True):
            assert one.data_ptr() in places or same_bytes(one, other)
        assert same_bytes(part.gradient, gradient)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", VARIANTS)
def test_kernels_write_another_copy(name: str, team: Team) -> None:
    rule = VARIANTS[name].rule
    assert isinstance(rule, AdamRule | LionRule | SgdRule)
    assert_apart(KernelArithmetic(rule, team), VARIANTS[name], parameter=True, states=True)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("parameter", "states"), [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("name", ["adamw", "adamw-bf16", "8bit"])
def test_kernels_write_one_of_both_elsewhere(name: str, parameter: bool, states: bool, team: Team) -> None:
    """As where the parameters are in memory and the states on disk."""
    rule = VARIANTS[name].rule
    assert isinstance(rule, AdamRule | LionRule | SgdRule)
    assert_apart(KernelArithmetic(rule, team), VARIANTS[name], parameter=parameter, states=states)


@pytest.mark.parametrize("name", VARIANTS)
def test_torch_copies_first(name: str) -> None:
    room = torch.empty(4 * 8 * sum(SIZES), dtype=torch.uint8)  # ample: what it takes is counted elsewhere
    for parameter, states in ((True, True), (True, False)):
        assert_apart(TorchArithmetic(VARIANTS[name].rule, room), VARIANTS[name], parameter=parameter, states=states)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("shift", [0, 1, 16], ids=["lines", "unaligned", "half lines"])
@pytest.mark.parametrize("name", ["adamw-bf16", "moments-bf16", "8bit", "lion-bf16", "sgd-momentum"])
def test_nothing_is_written_around_it(name: str, shift: int, team: Team) -> None:
    """Wherever the other copy begins: whole lines go past the caches, all else is copied."""
    variant = VARIANTS[name]
    assert isinstance(variant.rule, AdamRule | LionRule | SgdRule)
    arithmetic, guards = KernelArithmetic(variant.rule, team), list[tuple[torch.Tensor, int, int]]()

    def guarded(tensor: torch.Tensor) -> torch.Tensor:
        start, stop = 128 + shift, 128 + shift + tensor.numel()
        room = torch.full((stop + 128,), 77).to(tensor.dtype)
        guards.append((room, start, stop))
        return room[start:stop]

    for part in parts_of(variant):
        want = in_place(part)
        arithmetic.update([want], variant.step, variant.group)
        master = None if part.master is None else guarded(part.master)
        into = Held(guarded(part.parameter), master, tuple(guarded(s) for s in part.states))
        arithmetic.update([replace(part, into=into)], variant.step, variant.group)
        assert all(same_bytes(a, b) for a, b in zip(tensors(into), tensors(want.written), strict=True))
    assert all((room[:start] == 77).all() and (room[stop:] == 77).all() for room, start, stop in guards)


def test_a_narrow_parameter_is_not_read(team: Team) -> None:
    """Its master is: whatever the parameter of the first copy holds, the second one is the same."""
    variant = VARIANTS["adamw-bf16"]
    found: list[Sequence[torch.Tensor]] = []
    for fill in (None, float("nan")):
        parts = [replace(p, into=elsewhere(p, parameter=True, states=True)) for p in parts_of(variant)]
        for part in parts if fill is not None else ():
            part.parameter.fill_(fill)
        KernelArithmetic(adam(), team).update(parts, variant.step, variant.group)
        found.append([tensor for part in parts for tensor in tensors(part.written)])
    assert all(same_bytes(one, other) for one, other in zip(*found, strict=True))


def test_states_are_apart_all_or_none(team: Team) -> None:
    part = parts_of(VARIANTS["adamw"])[-1]
    other = elsewhere(part, parameter=True, states=True)
    mixed = replace(other, states=(part.states[0], other.states[1]))
    with pytest.raises(ValueError, match="some states in place and some apart"):
        KernelArithmetic(adam(), team).update([replace(part, into=mixed)], 1, ADAM)


def test_another_copy_has_the_same_length(team: Team) -> None:
    part = parts_of(VARIANTS["adamw"])[-1]
    other = elsewhere(part, parameter=True, states=True)
    short = replace(other, parameter=other.parameter[1:])
    with pytest.raises(ValueError, match="elements in host memory"):
        KernelArithmetic(adam(), team).update([replace(part, into=short)], 1, ADAM)
