"""Norms made while backward still runs: the bits of the op, of the bytes that are there when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import forebay
from benchmarks.fasthost.timed import AMPLE, plan_by_hand
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.memory import Tier
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.runtime.gradients import LandedGradient
from forebay.runtime.landing import Landing
from forebay.runtime.norms import LEAST
from forebay.timeline import Lane
from tests.parity.test_gradients import as_in_backward, spec

CPU = torch.device("cpu")


def random(seed: int, count: int = LEAST, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Rig:
    """A gradient of ``like`` that lands, and how many norms have been made ahead."""

    def __init__(self, like: torch.Tensor, *, ahead: bool = True, delays: Delays | None = None) -> None:
        self.device = CpuDevice(delays=delays)
        landing = Landing(self.device, 1 << 30, torch.empty(like.nbytes, dtype=torch.uint8), norms_ahead=ahead)
        name = str(like.dtype).removeprefix("torch.")
        described = spec("weight", tuple(like.shape), like.stride(), name)
        self.buffer = GradientBuffer(described, torch.empty(like.numel(), dtype=like.dtype), landing)

    def land(self, gradient: torch.Tensor) -> LandedGradient:
        as_in_backward(lambda: self.buffer.land(gradient))
        return LandedGradient(self.buffer, CPU)

    def made(self) -> int:
        self.device.synchronize()
        return sum("norm" in event.what for event in self.device.drain_events())


@pytest.fixture
def rigs() -> Iterator[list[Rig]]:
    made: list[Rig] = []
    yield made
    for rig in made:
        rig.device.close()


def norm(gradient: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(gradient, 2.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_was_asked_once_is_made_as_soon_as_it_lands(dtype: torch.dtype, rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(random(0, dtype=dtype)))
    for step, made in ((0, 0), (1, 1), (2, 1)):
        value = random(step, dtype=dtype)
        gradient = rig.land(value)
        assert rig.made() == made
        assert torch.equal(norm(gradient), norm(value)) and torch.equal(norm(gradient), norm(value))
    asked = norm(gradient)
    asked.zero_()  # a tensor of the caller's own
    assert torch.equal(norm(gradient), norm(value))


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_bits_do_not_hang_on_who_calls_it(dtype: torch.dtype, threads: int) -> None:
    before, value = torch.get_num_threads(), random(3, 4 * LEAST + 5, dtype)
    expected = norm(value)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(norm(value), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kind", ["few", "fp16", "norm of 1", "off"])
def test_what_is_left_to_whoever_asks(kind: str, rigs: list[Rig]) -> None:
    """Too few elements to be worth a job, a dtype whose norm several threads share, another norm, shared cores."""
    count, dtype = (LEAST - 1 if kind == "few" else LEAST), (torch.float16 if kind == "fp16" else torch.float32)
    order = 1.0 if kind == "norm of 1" else 2.0
    rigs.append(rig := Rig(random(0, count, dtype), ahead=kind != "off"))
    for step in range(2):
        value = random(step, count, dtype)
        gradient = rig.land(value)
        assert rig.made() == 0
        assert torch.equal(torch.linalg.vector_norm(gradient, order), torch.linalg.vector_norm(value, order))


def test_a_gradient_that_was_changed_since(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(random(0)))
    norm(rig.land(random(0)))
    gradient = rig.land(random(1))
    assert rig.made() == 1
    gradient.mul_(0.5)
    assert torch.equal(norm(gradient), norm(random(1) * 0.5))
    assert torch.equal(norm(gradient[5:]), norm((random(1) * 0.5)[5:]))


def test_it_is_made_when_as_many_have_landed_as_before(rigs: list[Rig]) -> None:
    rigs.append(rig := Rig(random(0)))
    for step, made in ((0, 0), (1, 1)):
        gradient = rig.land(random(step))
        assert rig.made() == 0
        gradient.add_(random(9))
        assert rig.made() == made
        assert torch.equal(norm(gradient), norm(random(step) + random(9)))


def test_the_next_gradient_waits_for_the_norm_of_this_one(rigs: list[Rig]) -> None:
    """And so does who asks: nothing but norms is on its lane."""
    rigs.append(rig := Rig(random(0), delays=RandomDelays(0, 0.05, [Lane.NORM])))
    norm(rig.land(random(0)))
    for step in range(1, 3):
        rig.land(random(step))
        gradient = rig.land(random(step + 1))
        assert torch.equal(norm(gradient), norm(random(step + 1)))
        assert torch.equal(norm(rig.land(random(step))), norm(random(step)))


@pytest.mark.parametrize("ahead", [False, True], ids=["deferred", "ahead"])
def test_steps_that_are_clipped_or_not_are_those_of_plain_pytorch(ahead: bool) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        # 1024 * 513 elements each.
        return nn.Sequential(nn.Linear(513, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 513, bias=False))

    model, reference = network(), network()
    names = ("0", "2") if ahead else ()
    plan = plan_by_hand(model, states=Tier.HOST, overlap=True, speculate=names, chunk=1 << 18)
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-3, fused=True)
    model, optimizer = forebay.prepare(model, given, plan=plan, device_memory=AMPLE, device="cpu")
    for step in range(5):
        x = torch.randn(3, 513, generator=torch.Generator().manual_seed(step))
        for one in (model, reference):
            one(x).square().mean().backward()
        limit = 1e9 if step % 2 else 1e-3
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit)
        assert torch.equal(torch.nn.utils.clip_grad_norm_(model.parameters(), limit), expected)
        for each in (optimizer, plain):
            each.step()
            each.zero_grad()
    values = forebay.parameters(model)
    assert all(torch.equal(values[name], value) for name, value in reference.named_parameters())
    events = forebay.report(model).timeline.events
    assert sum("norm" in event.what for event in events) == 4 * 2
    forebay.close(model)
