"""The factor of clipping waits beside a landed gradient for whoever reads it: the update, as a rule.

Whoever it is finds the bits of ``mul_``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.kernels.team import ALONE, Team
from forebay.model import Parameter
from forebay.optim.scaling import Span, multiply
from forebay.plans import Plan, Update
from forebay.runtime.deferred import Deferred
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.runtime.gradients import LandedGradient
from forebay.runtime.landing import Landing
from forebay.timeline import Lane
from tests.null.updating import at_home
from tests.parity.device_updating import on_device
from tests.parity.speculating import MIXED, Run, speculating

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPE = (6, 10)


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    made = Team(2)
    yield made
    made.close()


def values_of(seed: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every size: some that become subnormal or infinite, some that are already."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(numel, generator=generator) * 10.0 ** torch.randint(-12, 12, (numel,), generator=generator)
    made = made.to(dtype)
    made[::97], made[1::97], made[2::97] = 0.0, float("inf"), torch.finfo(dtype).tiny
    return made


FACTORS = st.floats(2.0**-20, 1, width=32) | st.floats(2.0**-140, 2.0**100, width=32) | st.sampled_from([-0.1, 1e-40])


@given(
    factor=FACTORS,
    dtype=st.sampled_from(DTYPES),
    sizes=st.lists(st.sampled_from([1, 7, 1000, 70_000, ALONE + 33]), min_size=1, max_size=3),
    seed=st.integers(0, 9),
)
def test_products_are_those_of_torch(
    factor: float, dtype: torch.dtype, sizes: list[int], seed: int, team: Team
) -> None:
    """By one thread and by several, several spans in one call; around them nothing changes."""
    found = [values_of(seed + i, size + 8, dtype) for i, size in enumerate(sizes)]
    expected = [values.clone() for values in found]
    for values in expected:
        values[3:-5].mul_(torch.tensor(factor))
    multiply(team, [Span(values, 3, values.numel() - 5, factor) for values in found])
    assert all(
        torch.equal(got.view(torch.uint8), want.view(torch.uint8)) for got, want in zip(found, expected, strict=True)
    )


@pytest.fixture
def buffer() -> Iterator[GradientBuffer]:
    device = CpuDevice(delays=RandomDelays(0, 0.002, [Lane.D2H, Lane.NORM]))
    yield buffer_on(device)
    device.close()


def buffer_on(device: CpuDevice, deferred: Deferred | None = None) -> GradientBuffer:
    landing = Landing(device, 4096, torch.empty(360, dtype=torch.uint8), norms_ahead=True)
    spec = Parameter("weight", SHAPE, torch.empty(SHAPE).stride(), "float32", 240, 0, True)
    return GradientBuffer(spec, torch.zeros(60), landing, deferred)


def random(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def test_a_factor_waits_until_somebody_reads(buffer: GradientBuffer) -> None:
    buffer.land(random(0))
    buffer.settle()
    gradient, version = LandedGradient(buffer, torch.device("cpu")), buffer.version
    gradient.mul_(torch.tensor(0.3))
    assert torch.equal(buffer.whole, random(0)) and buffer.factor is not None and buffer.version > version
    assert torch.equal(gradient.value(), random(0) * 0.3)
    assert buffer.factor is None
    gradient.mul_(0.3)
    buffer.land(random(1))  # what it was for is gone
    assert buffer.factor is None
    assert torch.equal(LandedGradient(buffer, torch.device("cpu")).value(), random(1))


def test_what_is_added_later_is_not_multiplied(buffer: GradientBuffer) -> None:
    buffer.land(random(0))
    gradient = LandedGradient(buffer, torch.device("cpu"))
    gradient.mul_(0.3)
    assert buffer.factor is not None
    gradient.add_(random(1))
    assert torch.equal(gradient.value(), random(0) * 0.3 + random(1))


def test_of_what_is_used_up_nothing_has_landed(buffer: GradientBuffer) -> None:
    """So that the next pass updates no parameter that has no gradient in it."""
    buffer.land(random(0))
    assert buffer.landings == 1
    buffer.use_up()
    assert buffer.landings == 0


@pytest.mark.parametrize("change", ["land", "accumulate", "scale", "write"])
def test_an_update_that_is_not_queued_yet_comes_before_what_changes_the_bytes(change: str) -> None:
    device, deferred, seen = CpuDevice(), Deferred(), list[torch.Tensor]()
    buffer = buffer_on(device, deferred)
    buffer.land(random(0))
    buffer.settle()
    deferred.put(lambda: seen.append(buffer.whole.clone()))
    {
        "land": lambda: buffer.land(random(1)),
        "accumulate": lambda: buffer.accumulate(random(1)),
        "scale": lambda: buffer.scale(0.5),
        "write": buffer.settle_for_write,
    }[change]()
    device.close()
    assert len(seen) == 1 and torch.equal(seen[0], random(0))


CHANGES: dict[str, Callable[[torch.Tensor, int], object]] = {
    "mul": lambda g, number: g.mul_(0.7),
    "mul by a tensor": lambda g, number: g.mul_(torch.tensor(1.3, dtype=torch.float64)),
    "mul by 0": lambda g, number: g.mul_(0),
    "div": lambda g, number: g.div_(3.0),
    "add": lambda g, number: g.add_(random(number)),
    "view": lambda g, number: g[2:4].mul_(0.5),
    "zero": lambda g, number: g.zero_(),
    "copy": lambda g, number: g.copy_(random(number)),
    "read": lambda g, number: g.clone(),
    "norm": lambda g, number: torch.linalg.vector_norm(g),
}


@settings(max_examples=60)
@given(actions=st.lists(st.sampled_from(["land", *CHANGES]), min_size=2, max_size=8))
def test_whatever_is_done_to_it(actions: list[str]) -> None:
    """Beside a plain tensor; what lands arrives late."""
    device = CpuDevice(delays=RandomDelays(len(actions), 0.001, [Lane.D2H, Lane.NORM]))
    try:
        made = buffer_on(device)
        for number, action in enumerate(["land", *actions]):
            if action == "land":
                plain = random(number)
                made.land(plain.clone())
                gradient: torch.Tensor = LandedGradient(made, torch.device("cpu"))
                continue
            got, expected = (CHANGES[action](one, number) for one in (gradient, plain))
            assert isinstance(got, torch.Tensor) and isinstance(expected, torch.Tensor)
            if action in ("read", "norm"):
                assert torch.equal(got, expected)
        assert torch.equal(gradient.clone(), plain)
    finally:
        device.close()


# Of a model


def plan_of(way: Update, dtype: torch.dtype, *, disk: bool) -> Plan:
    if way is Update.DEVICE:
        return on_device(MIXED, dtype, disk=disk)
    plan = speculating(MIXED, dtype, disk=disk)
    return at_home(plan) if way is Update.STEP else plan


def clipped(run: Run, batch: int) -> None:
    run.backward(batch)
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.01)


@pytest.mark.parametrize("disk", [False, True], ids=["host", "tiers"])
@pytest.mark.parametrize("way", [Update.STEP, Update.AHEAD, Update.DEVICE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_multiplies_as_torch_does(dtype: torch.dtype, way: Update, disk: bool, tmp_path: Path) -> None:
    """Nobody looks at the gradients between clipping and the step: its updates find them clipped, and leave them so."""
    run = Run(
        MIXED, dtype, plan_of(way, dtype, disk=disk), f"{tmp_path}:64MiB" if disk else None, RandomDelays(0, 0.001)
    )
    reference = MIXED.model(dtype)
    reference(**MIXED.inputs(0, dtype))["loss"].backward()
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    clipped(run, 0)
    run.optimizer.step()
    found = forebay.gradients(run.model)
    run.close()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("way", [Update.STEP, Update.AHEAD, Update.DEVICE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_looking_at_them_changes_nothing(dtype: torch.dtype, way: Update) -> None:
    """One loop reads every gradient between clipping and the step, and so multiplies them at once; the other does not.
    So does one that clips twice, or adds another backward to what is clipped, with one that reads before."""
    seen = []
    for looks in (True, False):
        run = Run(MIXED, dtype, plan_of(way, dtype, disk=False), None, RandomDelays(int(looks), 0.001))
        for step in range(4):
            clipped(run, step)
            if looks:
                forebay.gradients(run.model)
            if step == 1:
                clipped(run, 10)
            elif step == 2:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), 0.001)
            run.optimizer.step()
            if step == 3:
                break  # a last look at gradients that a step has read
            run.optimizer.zero_grad()
        seen.append(run.everything())
        run.close()
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(seen[0][name], seen[1][name]) for name in seen[0])
