"""Every policy and every treatment on a card: the numbers of plain PyTorch there, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import forebay
import forebay.testing
from forebay.device.cuda import CudaDevice
from forebay.device.delays import RandomDelays
from forebay.errors import CannotServe, DoesNotFit
from forebay.memory import Kind, Tier
from forebay.planners import PLANNERS
from forebay.plans import Plan
from forebay.runtime.blocks import find_blocks
from forebay.runtime.codec import DTYPES, decode, decode_mask, encode, encode_mask
from forebay.trace import Phase
from forebay.treatments import Fate, Treatment
from tests.parity.bits import bits_plan, opened
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import CASES, Case
from tests.parity.offloading import SUBJECTS, host_formula, movable, offload_plan, trace_of
from tests.parity.recomputing import DROPOUT, plan_for, recomputable
from tests.parity.test_codec import assert_close
from tests.parity.test_disk_activations import disk_plan
from tests.parity.test_offload import counters, moved
from tests.parity.test_recompute import losses_and_gradients
from tests.parity.treated import SUBJECTS as RECOMPUTED
from tests.parity.treated import treated_plan

pytestmark = pytest.mark.gpu

BUDGET = 2 * 2**30
WHERE = pytest.mark.parametrize("resident", [False, True], ids=["streamed", "resident"])


def test_a_recorded_step_says_of_which_block_backward_is() -> None:
    """Autograd runs a card's backward in a thread of its own, whose nodes have numbers of their own."""
    trace = trace_of(CASES["llama"], torch.float32, "cuda")
    blocks = {phase: {v.block for v in trace.visits if v.phase is phase} for phase in Phase}
    assert blocks[Phase.BACKWARD] == blocks[Phase.FORWARD]
    assert trace.workspace_nbytes > 0


@pytest.mark.parametrize("policy", sorted(PLANNERS))
def test_every_policy(policy: str, tmp_path: Path) -> None:
    """What a policy promises of the numbers it keeps, clipping and evaluation among them; or it says why it is not for
    this."""
    case = CASES["llama"]
    try:
        forebay.testing.assert_same_training(
            lambda: case.make(),
            [case.inputs(i, torch.float32) for i in range(2)],
            lambda parameters: adamw(list(parameters)),
            device_memory=BUDGET,
            disk=f"{tmp_path}:64MiB",
            policy=policy,
            device="cuda",
        )
    except (CannotServe, DoesNotFit) as refused:
        pytest.skip(f"{policy}: {refused}")


@WHERE
@pytest.mark.parametrize("name", SUBJECTS)
def test_all_that_may_be_moved_is_moved(name: str, resident: bool) -> None:
    """And the host takes what the formula says, once a micro-batch."""
    case = SUBJECTS[name]
    named = movable(trace_of(case, torch.float32, "cuda"))
    plan = offload_plan(
        case, torch.float32, resident=resident, offload_window=20_000, reload_window=20_000, device="cuda"
    )
    model = assert_same_training(
        case, torch.float32, clip=None, steps=3, plan=plan, device_memory=BUDGET, device="cuda"
    )
    assert counters(model) == 0
    expected = sorted(n for one in named for n in one.nbytes)
    assert expected, "nothing in this model is large enough to be moved"
    assert sorted(n for _, n in moved(model, "offload")) == sorted(expected * 6)
    assert sorted(moved(model, "reload")) == sorted(moved(model, "offload"))
    host = forebay.report(model).timeline.usage(Tier.HOST)
    assert host.at_peak[Kind.ACTIVATION] == host_formula(named)
    forebay.close(model)


@pytest.mark.parametrize("seed", range(3))
@WHERE
def test_late_copies_of_activations_change_nothing(resident: bool, seed: int) -> None:
    case = SUBJECTS["llama"]
    plan = offload_plan(case, torch.bfloat16, resident=resident, offload_window=5_000, device="cuda", slots=2)
    device = CudaDevice(0, BUDGET, delays=RandomDelays(seed, max_seconds=0.002))
    model = assert_same_training(
        case, torch.bfloat16, clip=None, steps=2, plan=plan, device_memory=BUDGET, device=device
    )
    forebay.close(model)
    assert device.ledger.live == 0
    device.close()


@WHERE
def test_activations_on_disk(resident: bool, tmp_path: Path) -> None:
    case = SUBJECTS["llama"]
    fates = {one: Fate.DISK for one in movable(trace_of(case, torch.float32, "cuda"))}
    plan = disk_plan("llama", tmp_path, fates, resident=resident)
    model = assert_same_training(
        case, torch.float32, clip=None, steps=2, plan=plan, device_memory=BUDGET, disk=str(tmp_path), device="cuda"
    )
    assert counters(model) == 0
    assert {what for what, _ in moved(model, "write")} == {what for what, _ in moved(model, "reload")} != set()
    forebay.close(model)


@WHERE
@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.OFFLOAD, None], ids=["keep", "offload", "both"])
@pytest.mark.parametrize("name", sorted(set(RECOMPUTED) - set(DROPOUT)))
def test_blocks_that_run_again_with_every_op_named(name: str, fate: Fate | None, resident: bool) -> None:
    case = RECOMPUTED[name]
    plan = treated_plan(case, torch.float32, fate, resident=resident, window=20_000, device="cuda")
    model = assert_same_training(
        case, torch.float32, clip=None, steps=2, plan=plan, device_memory=BUDGET, device="cuda"
    )
    forebay.close(model)


@WHERE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DROPOUT)
def test_dropout_gives_the_same_masks_again(name: str, dtype: torch.dtype, resident: bool) -> None:
    case = DROPOUT[name]
    expected = losses_and_gradients(case, dtype, None, where="cuda")
    plan = plan_for(case, dtype, recomputable(find_blocks(case.model(dtype)).model), resident=resident)
    actual = losses_and_gradients(case, dtype, plan, where="cuda", device_memory=BUDGET)
    assert len(actual) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@WHERE
def test_autocast(resident: bool) -> None:
    case = SUBJECTS["llama"]
    expected = losses_and_gradients(case, torch.float32, None, autocast=True, where="cuda")
    plan = plan_for(case, torch.float32, recomputable(find_blocks(case.model(torch.float32)).model), resident=resident)
    actual = losses_and_gradients(case, torch.float32, plan, autocast=True, where="cuda", device_memory=BUDGET)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("fate", [Fate.KEEP, Fate.OFFLOAD])
@pytest.mark.parametrize("bits", [8, 4, 2])
def test_activations_as_codes(bits: int, fate: Fate) -> None:
    """Forward is plain PyTorch's to the bit. Gradients are of the size that they have there, and not the same."""
    case = SUBJECTS["gpt2"]
    plan = coded_plan(case, bits, fate)
    plain = losses_and_gradients(case, torch.float32, None, steps=1, where="cuda")
    device = CudaDevice(0, BUDGET)
    model, _, _ = opened(case, plan, device)
    for micro in range(2):
        loss = model(**{k: v.to("cuda") for k, v in case.inputs(micro, torch.float32).items()})["loss"]
        assert torch.equal(loss, plain[micro])
        loss.backward()
    again = [g for _, g in sorted(forebay.gradients(model).items())]
    forebay.close(model)
    expected = plain[2:-1]
    assert len(again) == len(expected)
    assert not all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    error = sum(float((a - b).square().sum()) for a, b in zip(again, expected, strict=True))
    size = sum(float(b.square().sum()) for b in expected)
    assert error < {8: 1e-4, 4: 1e-2, 2: 0.5}[bits] * size


def coded_plan(case: Case, bits: int, fate: Fate) -> Plan:
    """What GELU's tanh makes in each block is codes."""
    named = [one for one in movable(trace_of(case, torch.float32, "cuda")) if one.op == "aten.tanh.default"]
    assert named
    chosen = {one.block: [Treatment(one.op, one.occurrence, fate, bits=bits)] for one in named}
    return bits_plan(case, chosen, elements=max(max(one.nbytes) for one in named) // 4)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_codes_come_back_within_a_step(dtype: torch.dtype, bits: int) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for shape in ((), (0,), (17,), (48, 49), (5, 7, 11)):
        tensor = torch.randn(shape, generator=generator, device="cuda").to(dtype)
        assert_close(tensor, decode(encode(tensor, bits, generator)), bits, max(tensor.numel(), 1))
        assert torch.equal(decode_mask(encode_mask(tensor > 0)), tensor > 0)


def test_a_scaler_with_half_precision() -> None:
    """``GradScaler`` around autocast: an overflow in the second step skips it, here and in plain PyTorch."""
    case = CASES["gpt2"]

    def trained(prepared: bool) -> list[torch.Tensor]:
        model = case.model(torch.float32)
        if not prepared:
            model.to("cuda")
        optimizer = adamw(list(model.parameters()))
        if prepared:
            model, optimizer = forebay.prepare(
                model, optimizer, case.inputs(0, torch.float32), policy="stream", device_memory=BUDGET, device="cuda"
            )
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
        seen = []
        for step in range(4):
            inputs = {k: v.to("cuda") for k, v in case.inputs(step, torch.float32).items()}
            with torch.autocast("cuda", torch.float16):
                loss = model(**inputs)["loss"]
            scaler.scale(loss * (1e6 if step == 1 else 1)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            seen += [loss.detach().cpu(), torch.tensor(scaler.get_scale())]
        forebay.close(model)
        return seen

    for made, plain in zip(trained(True), trained(False), strict=True):
        torch.testing.assert_close(made, plain, rtol=1e-3, atol=1e-4)


def test_a_run_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Killed after three steps of five, it ends with the parameters of a run that was not; dropout draws the same."""
    case = DROPOUT["gpt2-dropout"]

    def opened() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = case.model(torch.float32)
        return forebay.prepare(
            model,
            adamw(list(model.parameters())),
            case.inputs(0, torch.float32),
            policy="stream",
            device_memory=BUDGET,
            device="cuda",
        )

    def run(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(**{k: v.to("cuda") for k, v in case.inputs(step, torch.float32).items()})["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = opened()
    torch.manual_seed(3)
    run(model, optimizer, range(3))
    forebay.save(model, optimizer, tmp_path / "at-3", step=3)
    run(model, optimizer, range(3, 5))
    expected = {n: p.clone() for n, p in forebay.parameters(model).items()}
    forebay.close(model)
    model, optimizer = opened()
    forebay.resume(model, optimizer, tmp_path / "at-3")
    run(model, optimizer, range(3, 5))
    made = forebay.parameters(model)
    assert all(torch.equal(made[n], expected[n]) for n in expected)
    forebay.close(model)
