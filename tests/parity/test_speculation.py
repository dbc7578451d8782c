"""Updates ahead of their step: whatever a loop does between backward and step, the numbers are those of a plain one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import forebay
from benchmarks.fasthost.timed import plan_by_hand
from forebay.device.delays import RandomDelays
from forebay.errors import ConfigError
from forebay.kernels.team import cores, cores_beside_compute
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import prepared_session
from forebay.runtime.speculation import SpeculationPolicy
from forebay.timeline import Lane
from tests.null.updating import at_home
from tests.parity.compare import assert_same_training
from tests.parity.models import CASES
from tests.parity.speculating import AMPLE, MIXED, Run, counters, speculating, trained, two_groups
from tests.parity.test_delays import LATE, NARROW, assert_same_whichever_is_late, train

BLOCKS = len(trained(find_blocks(NARROW.model(torch.float32)).model))
HARMLESS, TIGHT = 1e9, 1e-3
"""Norms: nothing is clipped, everything is."""

DTYPES = [torch.float32, torch.bfloat16]


def clip(run: Run, norm: float) -> torch.Tensor:
    return torch.nn.utils.clip_grad_norm_(run.model.parameters(), norm)


def reload_optimizer(run: Run) -> None:
    run.optimizer.load_state_dict(run.optimizer.state_dict())


def reload_model(run: Run) -> None:
    run.model.load_state_dict({n: p * 0.5 for n, p in run.model.state_dict().items()})


def evaluate(run: Run) -> Any:
    with torch.no_grad():
        return run.model(**MIXED.inputs(99, run.dtype))["loss"]


def set_rate(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.5


def skip_if_not_finite(run: Run) -> None:
    """What loops do about an overflow."""
    if all(torch.isfinite(g).all() for g in forebay.gradients(run.model).values()):
        run.optimizer.step()
    run.optimizer.zero_grad()


Action = Callable[[Run], Any]
ACTIONS: dict[str, Action] = {
    "backward": lambda run: run.backward(1),
    "another backward": lambda run: run.backward(2, scale=0.5),
    "infinite": lambda run: run.backward(3, scale=float("inf")),
    "clip nothing": lambda run: clip(run, HARMLESS),
    "clip": lambda run: clip(run, TIGHT),
    "lr": set_rate,
    "lr of one group": lambda run: run.optimizer.param_groups[1].update(lr=1e-3, weight_decay=0.5),
    "zero": lambda run: run.optimizer.zero_grad(),
    "zero in place": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "evaluate": evaluate,
    "look": lambda run: run.everything(),
    "load the optimizer": reload_optimizer,
    "load the model": reload_model,
    "drop a gradient": lambda run: setattr(run.model.get_parameter("body.head.weight"), "grad", None),
    "step": lambda run: run.optimizer.step(),
    "step if finite": skip_if_not_finite,
}
LOOP = ["backward", "clip nothing", "step", "zero"]
"""What most loops do; a forecast is made from it."""

ENDS = [["step", "zero"], ["step", "zero in place"], ["step if finite"], ["step"], []]
ROUNDS = st.builds(
    lambda before, between, end: [*before, "backward", *between, *end],
    st.lists(st.sampled_from(sorted(ACTIONS)), max_size=1),
    st.lists(st.sampled_from(sorted(ACTIONS)), max_size=2),
    st.sampled_from(ENDS),
)


def assert_equal(seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert seen.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(bits(seen[name]), bits(tensor)), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """So that NaN equals NaN."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def run_all(run: Run, actions: list[str]) -> list[Any]:
    try:
        made = [ACTIONS[action](run) for action in actions]
        return [*made, run.everything()]
    finally:
        run.close()


def assert_same(made: list[Any], expected: list[Any], actions: list[str]) -> None:
    for one, other, action in zip(made, expected, [*actions, "the end"], strict=True):
        if isinstance(other, torch.Tensor):
            assert torch.equal(bits(one), bits(other)), action
        elif isinstance(other, dict):
            assert_equal(one, other)


PLANS: dict[tuple[torch.dtype, bool], Plan] = {
    (dtype, disk): speculating(MIXED, dtype, disk=disk) for dtype in DTYPES for disk in (False, True)
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("disk", [False, True], ids=["host", "tiers"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=6)
@given(actions=st.lists(ROUNDS, min_size=2, max_size=4), seed=st.integers(0, 9))
def test_whatever_a_loop_does(
    dtype: torch.dtype, disk: bool, actions: list[list[str]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Against the same plan without speculation, whose numbers are those of plain PyTorch (test_user_loop). Every job
    of the one that speculates is late by chance."""
    folder = f"{tmp_path_factory.mktemp('disk')}:64MiB" if disk else None
    plan = PLANS[dtype, disk]
    flat = [action for group in actions for action in group]
    plain = Run(MIXED, dtype, at_home(plan), folder, None)
    expected = run_all(plain, flat)
    ahead = Run(MIXED, dtype, plan, folder, RandomDelays(seed, max_seconds=0.001))
    assert_same(run_all(ahead, flat), expected, flat)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("between", ACTIONS)
def test_between_backward_and_step(between: str, tmp_path: Path) -> None:
    """Each thing that a loop may do when the updates have run ahead, and the steps after it."""
    plan, folder = PLANS[torch.bfloat16, True], f"{tmp_path}:64MiB"
    actions = [*LOOP, *LOOP, "backward", between, "step", "zero", *LOOP]
    expected = run_all(Run(MIXED, torch.bfloat16, at_home(plan), folder, None), actions)
    ahead = Run(MIXED, torch.bfloat16, plan, folder, RandomDelays(0, max_seconds=0.001))
    assert_same(run_all(ahead, actions), expected, actions)


def loop(run: Run, steps: int, *, micro_batches: int = 1, norm: float = HARMLESS, first: int = 0) -> None:
    for step in range(first, first + steps):
        for micro in range(micro_batches):
            run.backward(step * micro_batches + micro)
        clip(run, norm)
        run.optimizer.step()
        run.optimizer.zero_grad()


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Any:
    made = Run(NARROW, torch.float32, speculating(NARROW, torch.float32, disk=False), None, None)
    yield made
    made.close()


def test_a_plain_loop_with_clipping_is_made_ahead(run: Run) -> None:
    """From the first step on, as long as nothing is clipped: every block in every step, and nothing anew."""
    loop(run, 4)
    assert counters(run.model) == (4 * BLOCKS, 4 * BLOCKS, 0)


def test_updates_beside_compute_leave_a_core_to_others(run: Run) -> None:
    plan = speculating(NARROW, torch.float32, disk=False)
    waited = at_home(plan, streaming=replace(plan.streaming, overlap_update=False))
    crowded = at_home(plan, streaming=replace(plan.streaming, spared_cores=0))
    others = [Run(NARROW, torch.float32, each, None, None) for each in (waited, crowded)]
    sizes = [prepared_session(each.model).resources.team.size for each in (run, *others)]
    for other in others:
        other.close()
    assert sizes == [cores_beside_compute(plan.streaming.spared_cores), cores(), cores()]
    assert plan.streaming.spared_cores == 1


def test_a_parameter_without_gradient_is_not_waited_for() -> None:
    """That it has none is known after the first step, in which its block is waited for in vain."""
    run = Run(MIXED, torch.float32, PLANS[torch.float32, False], None, None)
    blocks = len(run.model.body.layers) + 1
    loop(run, 3)
    assert counters(run.model) == (3 * blocks - 1, 3 * blocks - 1, 0)
    run.close()


def test_states_that_a_step_leaves_alone_are_in_both_copies() -> None:
    """A parameter without gradient in some steps keeps its states through those that were made ahead without it."""
    run = Run(MIXED, torch.float32, PLANS[torch.float32, False], None, None)
    reference = MIXED.model(torch.float32)
    plain = two_groups(reference, fused=True)
    for step, whole in enumerate([True, True, False, False, True, False, False, False, True, True]):
        for model, optimizer in ((run.model, run.optimizer), (reference, plain)):
            model.body.layers[0].whole = whole
            model(**MIXED.inputs(step, torch.float32))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    values = forebay.parameters(run.model)
    assert all(torch.equal(values[n], p) for n, p in reference.named_parameters())
    # Of four blocks in ten steps: whenever the kind of step changes, the one with the parameter is not foreseen.
    assert counters(run.model)[1] == 4 * 10 - 4
    run.close()


def test_same_numbers_as_plain_pytorch(run: Run) -> None:
    """One step in three is clipped, and an extra backward comes once."""
    reference = NARROW.model(torch.float32)
    plain = two_groups(reference, fused=True)
    for step in range(6):
        for _ in range(2 if step == 4 else 1):
            run.backward(step)
            reference(**NARROW.inputs(step, torch.float32))["loss"].backward()
        norm = TIGHT if step % 3 == 1 else HARMLESS
        assert torch.equal(clip(run, norm), torch.nn.utils.clip_grad_norm_(reference.parameters(), norm))
        run.optimizer.step()
        plain.step()
        values = forebay.parameters(run.model)
        assert all(torch.equal(values[n], p) for n, p in reference.named_parameters()), step
        run.optimizer.zero_grad()
        plain.zero_grad()
    # Steps 1 and 4 are clipped, and step 4 has another backward; in step 5 one backward is not the last of two.
    assert counters(run.model) == (5 * BLOCKS, 3 * BLOCKS, 2 * BLOCKS)


def test_accumulation_is_learnt_in_one_step(run: Run) -> None:
    """The first step takes the first micro-batch for the last; after that the last one is known."""
    loop(run, 4, micro_batches=3)
    assert counters(run.model) == (4 * BLOCKS, 3 * BLOCKS, BLOCKS)


def test_zeroed_in_place_counts_like_dropped(run: Run) -> None:
    for step in range(3):
        run.backward(step)
        run.optimizer.step()
        run.optimizer.zero_grad(set_to_none=False)
    assert counters(run.model) == (3 * BLOCKS, 3 * BLOCKS, 0)


def test_a_skipped_step_is_neither_taken_over_nor_made_anew(run: Run) -> None:
    loop(run, 1)
    run.backward(1, scale=float("nan"))
    run.optimizer.zero_grad()
    loop(run, 1, first=2)
    assert counters(run.model) == (3 * BLOCKS, 2 * BLOCKS, 0)


def test_a_learning_rate_set_before_backward_is_foreseen(run: Run) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: 0.9**step)
    for step in range(3):
        loop(run, 1, first=step)
        scheduler.step()
    assert counters(run.model) == (3 * BLOCKS, 3 * BLOCKS, 0)


def test_a_run_of_clipped_steps_ends_it_for_a_while(run: Run) -> None:
    policy = SpeculationPolicy()
    loop(run, policy.give_up + policy.retry, norm=TIGHT)
    tried = policy.give_up * BLOCKS
    assert counters(run.model) == (tried, 0, tried)
    loop(run, 2, norm=TIGHT)  # one more try, and no second one
    assert counters(run.model) == (tried + BLOCKS, 0, tried + BLOCKS)
    loop(run, policy.retry - 1, norm=TIGHT)
    loop(run, 3)
    assert counters(run.model) == (tried + 4 * BLOCKS, 3 * BLOCKS, tried + BLOCKS)


@pytest.mark.parametrize(("give_up", "retry"), [(0, 1), (1, 0), (-1, 5)])
def test_a_policy_counts_steps(give_up: int, retry: int) -> None:
    with pytest.raises(ConfigError, match="1 step or more"):
        SpeculationPolicy(give_up, retry)
    assert SpeculationPolicy(1, 1).retry == 1


def test_gradients_that_are_only_read_are_no_reason_to_start_anew(run: Run) -> None:
    """A running mean of gradients, a scaler with a scale of 1."""
    mean = [torch.zeros_like(p) for p in run.model.parameters()]
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=1000)
    for step in range(2):
        scaler.scale(run.model(**NARROW.inputs(step, torch.float32))["loss"]).backward()
        for kept, parameter in zip(mean, run.model.parameters(), strict=True):
            if parameter.grad is not None:
                kept.mul_(0.9).add_(parameter.grad, alpha=0.1)
        scaler.unscale_(run.optimizer)
        clip(run, HARMLESS)
        scaler.step(run.optimizer)
        scaler.update()
        run.optimizer.zero_grad()
    assert counters(run.model) == (2 * BLOCKS, 2 * BLOCKS, 0)
    assert any(kept.any() for kept in mean)


def test_a_scaler_that_unscales_changes_every_gradient(run: Run) -> None:
    """So that no update ahead of its step is taken over, and after a few nobody tries; the numbers are plain ones."""
    plain = NARROW.model(torch.float32)
    optimizer = two_groups(plain, fused=True)
    tries = SpeculationPolicy().give_up
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0) for _ in range(2)]
    for step in range(tries + 1):
        for model, owner, scaler in ((run.model, run.optimizer, scalers[0]), (plain, optimizer, scalers[1])):
            scaler.scale(model(**NARROW.inputs(step, torch.float32))["loss"]).backward()
            scaler.unscale_(owner)
            torch.nn.utils.clip_grad_norm_(model.parameters(), HARMLESS)
            scaler.step(owner)
            scaler.update()
            owner.zero_grad()
    assert counters(run.model) == (tries * BLOCKS, 0, tries * BLOCKS)
    assert_equal(dict(forebay.parameters(run.model)), dict(plain.named_parameters()))


@pytest.mark.parametrize("factor", [0.5, torch.tensor(0.5), torch.ones(40, 1)])
def test_any_other_factor_is_a_change(run: Run, factor: Any) -> None:
    run.backward(0)
    run.model.get_parameter("body.layers.2.weight").grad.mul_(factor)
    run.optimizer.step()
    assert counters(run.model) == (BLOCKS, BLOCKS - 1, 1)


SGD: dict[str, dict[str, Any]] = {"plain": {}, "momentum": {"momentum": 0.9, "nesterov": True}}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", SGD)
def test_other_optimizers(kind: str, tmp_path: Path) -> None:
    """Without any state, and with one."""
    states = ("momentum_buffer",) if SGD[kind] else ()
    plan = speculating(NARROW, torch.float32, disk=True, states=states)
    made = assert_same_training(
        NARROW,
        torch.float32,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, **SGD[kind]),
        clip=HARMLESS,
        steps=3,
        plan=plan,
        device_memory=AMPLE,
        disk=f"{tmp_path}:64MiB",
        device="cpu",
    )
    speculated, committed, _ = counters(made)
    assert speculated == 3 * len(plan.updated(Update.AHEAD)) and committed == 2 * len(plan.updated(Update.AHEAD))
    forebay.close(made)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["llama-tied", "used-twice", "frozen", "experts", "checkpointed"])
def test_models_of_every_shape(name: str, tmp_path: Path) -> None:
    case, dtype = CASES[name], CASES[name].dtypes[-1]
    plan = speculating(case, dtype, disk=True, host_slots=3)
    made = assert_same_training(
        case, dtype, clip=0.5, steps=3, plan=plan, device_memory=AMPLE, disk=f"{tmp_path}:64MiB", device="cpu"
    )
    assert counters(made)[0] > 0
    forebay.close(made)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_job_late_in_turn(dtype: torch.dtype, tmp_path: Path) -> None:
    """Steps of two micro-batches, so that one step is made anew and the next is taken over."""
    plan = speculating(NARROW, dtype, disk=True, host_slots=5)
    assert_same_whichever_is_late(dtype, plan, tmp_path, 0 if dtype is torch.float32 else 6, 12)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("lane", [Lane.H2D, Lane.D2H, Lane.UPDATE, Lane.DISK_READ, Lane.DISK_WRITE])
def test_a_slow_lane(lane: Lane, tmp_path: Path) -> None:
    expected = train(NARROW, torch.float32, None)
    plan, disk = speculating(NARROW, torch.float32, disk=True, host_slots=1), f"{tmp_path}:64MiB"
    delays = RandomDelays(seed=1, max_seconds=LATE, lanes=[lane])
    train(NARROW, torch.float32, delays, plan=plan, disk=disk).assert_equal(expected)


def test_what_is_frozen_in_a_block_goes_along() -> None:
    """Into the copy that becomes the current one, though no update makes it."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        for name in ("0.weight", "2.weight"):
            model.get_parameter(name).requires_grad_(False)
        return model

    model, reference = network(), network()
    plan = plan_by_hand(model, states=Tier.HOST, overlap=True, speculate=("0", "2"), chunk=1 << 18)
    given = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    plain = torch.optim.AdamW([p for p in reference.parameters() if p.requires_grad], lr=1e-2, fused=True)
    model, optimizer = forebay.prepare(model, given, plan=plan, device_memory="64GiB", device="cpu")
    for step in range(3):
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        for one, each in ((model, optimizer), (reference, plain)):
            one(x).square().mean().backward()
            each.step()
            each.zero_grad()
    assert counters(model)[1] == 6
    values = forebay.parameters(model)
    assert all(torch.equal(values[name], value) for name, value in reference.named_parameters())
    forebay.close(model)
