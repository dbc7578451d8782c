"""What is said where the device has no room for a pass that its plan was not made for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.device.cpu import CpuDevice
from forebay.errors import DeviceOutOfMemory, DoesNotFit, ModelError
from forebay.runtime.losses import LossFunction
from forebay.runtime.unplanned import BESIDE, BY_LOSS, Unplanned
from tests.parity.models import CASES, VOCABULARY
from tests.parity.page_programs import programs

CASE = CASES["llama"]


def batch(sequences: int = 4, tokens: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def pair() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """A model under the least budget of a policy for a batch of 4 by 32."""
    model = CASE.model(torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepare = partial(forebay.prepare, model, optimizer, batch(), device="cpu", policy="stream")
    with pytest.raises(DoesNotFit) as refused:
        prepare(device_memory=1)
    model, optimizer = prepare(device_memory=refused.value.needed)
    yield model, optimizer
    forebay.close(model)


def refusal(model: nn.Module, inputs: dict[str, torch.Tensor], forwards: int = 1) -> str:
    """What is said of ``forwards`` before one backward. The frames of the error, and what is in them, are let go."""
    try:
        torch.stack([model(**inputs)["loss"] for _ in range(forwards)]).sum().backward()
    except DeviceOutOfMemory as error:
        return str(error)
    return ""


def step(model: nn.Module, optimizer: torch.optim.Optimizer, **inputs: Any) -> None:
    model(**inputs)["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
def test_a_larger_batch(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """What is larger of it, and what was planned; then the planned batch, and a smaller one, train on."""
    model, optimizer = pair
    step(model, optimizer, **batch())
    said = refusal(model, batch(16))
    assert "this forward has input_ids (16, 32), labels (16, 32), and the plan was made for input_ids (4, 32)" in said
    assert said.endswith(
        "labels (4, 32): give prepare() the batch that takes the most; or use a smaller batch or a shorter sequence, "
        "or raise device_memory"
    )
    optimizer.zero_grad()
    step(model, optimizer, **batch())
    step(model, optimizer, **batch(2))
    assert "(4, 64)" in refusal(model, batch(4, 64))


def test_what_a_loss_makes_of_the_batch() -> None:
    """Of forwards that are not called with it nobody knows what was planned; nor how many."""
    planned = Unplanned(by_place, (), {"first": torch.zeros(2, 3), "second": torch.zeros(2, 3)}, by_loss=True)
    assert planned.remark((), {"third": torch.zeros(2, 3)}, 0, evaluates=False) == BY_LOSS
    assert planned.remark((torch.zeros(2, 3),), {}, 1, evaluates=False) == BY_LOSS
    assert "first (4, 3), and the plan was made for first (2, 3)" in planned.remark(
        (torch.zeros(4, 3),), {}, 0, evaluates=False
    )


def test_several_forwards_of_a_loss() -> None:
    """As many as were planned, of more than was planned."""

    def loss_of(model: nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = torch.stack([model(input_ids=ids, labels=ids)["loss"] for ids in given.values()]).sum()
        return loss

    def texts(size: int = 4) -> dict[str, torch.Tensor]:
        return dict.fromkeys(("question", "answer"), batch(size)["input_ids"])

    model = CASE.model(torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    prepared = partial(forebay.prepare, model, optimizer, texts(), loss_fn=loss_of, device="cpu", policy="stream")
    with pytest.raises(DoesNotFit) as refused:
        prepared(device_memory=1)
    model, optimizer = prepared(device_memory=refused.value.needed)
    loss_of(model, texts()).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(DeviceOutOfMemory) as error:
        loss_of(model, texts(16)).backward()
    assert BY_LOSS in str(error.value)
    del error
    forebay.close(model)


def test_a_block_that_runs_again_is_no_second_derivative() -> None:
    """Running it again turns gradients on, which the error took for a backward with ``create_graph=True``."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(*critic(), x, device_memory=1, device="cpu", policy="stream-recompute")
    assert refused.value.needed is not None
    least = refused.value.needed
    model, _ = forebay.prepare(*critic(), x, device_memory=least, device="cpu", policy="stream-recompute")
    loss = model(x).square().mean()
    kept: list[torch.Tensor] = []
    model.get_parameter("0.weight").register_hook(lambda gradient: kept.append(torch.cat([gradient] * 8)))
    with pytest.raises(DeviceOutOfMemory) as error:
        loss.backward()
    assert BESIDE in str(error.value)
    del error
    forebay.close(model)


def penalised(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A loss with the norm of its own gradient, as of a critic (Gulrajani et al., "Improved training of Wasserstein
    GANs", NeurIPS 2017, equation 3)."""
    x = x.detach().requires_grad_()
    score = model(x)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    return score.mean() + (slope.norm(dim=1) - 1).square().mean()


def critic() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.SiLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 1))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.mark.parametrize("policy", ["auto", "recompute", "offload-all", "stream"])
def test_a_second_derivative(policy: str) -> None:
    """The plan of a forward and a backward has no room for it, and the error says whose has: then it is trained."""
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))

    def least(loss_fn: LossFunction | None) -> int:
        with pytest.raises(DoesNotFit) as refused:
            forebay.prepare(*critic(), x, device_memory=1, device="cpu", policy=policy, loss_fn=loss_fn)
        assert refused.value.needed is not None
        return refused.value.needed

    model, _ = forebay.prepare(*critic(), x, device_memory=least(None), device="cpu", policy=policy)
    with pytest.raises((DeviceOutOfMemory, ModelError), match=r"create_graph=True keeps .* loss_fn that makes "):
        penalised(model, x).backward()
    forebay.close(model)

    limits: Any = {"device_memory": least(penalised) + 64, "device": "cpu"}  # and the numbers that a loop has of a loss
    plain, its = critic()
    model, optimizer = forebay.prepare(*critic(), x, policy=policy, loss_fn=penalised, **limits)
    for _ in range(2):
        losses = [penalised(one, x) for one in (plain, model)]
        assert torch.equal(*losses)
        for loss, rule in zip(losses, (its, optimizer), strict=True):
            loss.backward()
            rule.step()
            rule.zero_grad()
    forebay.close(model)


@pytest.mark.slow
def test_an_evaluation(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, _ = pair
    with torch.no_grad(), pytest.raises(DeviceOutOfMemory, match=r"has input_ids \(40, 64\), labels \(40, 64\)"):
        model(**batch(40, 64))


def by_place(first: torch.Tensor, *rest: Any, **more: Any) -> None:
    """A forward."""


def test_another_argument() -> None:
    """At most two are named, none at length. What is the same, or smaller, is not."""
    planned = Unplanned(by_place, (torch.zeros(2, 3),), {"mask": [torch.zeros(4)], "scale": 2})
    assert planned.remark((torch.zeros(2, 2),), {"mask": [torch.zeros(4)], "scale": 2}, 0, evaluates=False) == BESIDE
    said = planned.remark(
        (torch.zeros(2, 3),), {"mask": [torch.zeros(5)], "scale": 2, "note": "a" * 50, "last": 1}, 0, evaluates=True
    )
    assert said == (
        f"this forward has mask.0 (5,), note '{36 * 'a'}..., and the plan was made for mask.0 (4,), no note: give "
        f"prepare() the batch that takes the most"
    )
    assert "scale 3, and the plan was made for scale 2:" in planned.remark((), {"scale": 3}, 0, evaluates=False)
    assert planned.remark((), {}, 1, evaluates=True).startswith(
        "the plan was made for one forward before each backward, and this is "
    )


def test_an_argument_by_place_is_the_one_of_its_name() -> None:
    planned = Unplanned(by_place, (), {"first": torch.zeros(2, 3)})
    assert planned.remark((torch.zeros(2, 3),), {}, 0, evaluates=False) == BESIDE
    assert "has first (4, 3), and the plan was made for first (2, 3):" in planned.remark(
        (torch.zeros(4, 3),), {}, 0, evaluates=False
    )
    said = planned.remark((torch.zeros(2, 3), torch.zeros(1)), {}, 0, evaluates=False)
    assert "has 1 (1,), and the plan was made for no 1:" in said


def test_a_plan_that_does_not_know_activations_blames_nobody() -> None:
    unknown = Unplanned(by_place, (), {"first": torch.zeros(2, 3)}, activations=False)
    assert unknown.remark((torch.zeros(2, 3),), {}, 0, evaluates=False) == ""


@pytest.mark.parametrize(
    "whole", [torch.ones(2, 3, dtype=torch.long), torch.ones(2, 3, dtype=torch.bool), torch.zeros(2, 3) > 0]
)
def test_padding(whole: torch.Tensor) -> None:
    """A mask that leaves something out, where the one that was planned leaves nothing out."""
    padded = whole.clone()
    padded[0, 0] = not padded[0, 0]
    planned = Unplanned(by_place, (), {"mask": whole})
    assert planned.remark((), {"mask": whole[:1]}, 0, evaluates=False) == BESIDE
    said = planned.remark((), {"mask": padded}, 0, evaluates=False)
    assert "has mask with padding, and the plan was made for mask without: give prepare()" in said
    assert Unplanned(by_place, (), {"mask": padded}).remark((), {"mask": whole}, 0, evaluates=False) == BESIDE


@pytest.mark.parametrize(
    "later",
    [torch.tensor([[5, 17, 1]]), torch.zeros(1, 3, dtype=torch.long, device="meta")],
    ids=["tokens", "elsewhere"],
)
def test_what_is_not_known_to_be_padding_is_not_called_so(later: torch.Tensor) -> None:
    """Token numbers that were planned for as ones are no mask, and a mask on another device is not looked at."""
    planned = Unplanned(by_place, (), {"ids": torch.ones(2, 3, dtype=torch.long)})
    assert planned.remark((), {"ids": later}, 0, evaluates=False) == BESIDE


def test_a_batch_with_padding() -> None:
    """transformers makes a mask only then, and it takes memory that a plan for a batch without has not."""
    whole = torch.ones(4, 32, dtype=torch.long)
    padded = whole.clone()
    padded[0, :16] = 0
    model = CASE.model(torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    planned = batch() | {"attention_mask": whole}
    prepare = partial(forebay.prepare, model, optimizer, planned, device="cpu", policy="stream")
    with pytest.raises(DoesNotFit) as refused:
        prepare(device_memory=1)
    model, optimizer = prepare(device_memory=refused.value.needed)
    step(model, optimizer, **planned)
    said = refusal(model, planned | {"attention_mask": padded})
    assert "has attention_mask with padding, and the plan was made for attention_mask without" in said
    forebay.close(model)


class Unread(nn.Sequential):
    """Has a mask that it does not read."""

    def forward(self, inputs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        assert mask.numel()
        return super().forward(inputs)


def test_looking_at_a_mask_takes_nothing_of_the_device() -> None:
    """Before a pass that an account is open for, since a forward before it waits for its backward."""
    model: nn.Module = Unread(*[nn.Linear(16, 16) for _ in range(3)])
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    inputs, mask = torch.randn(8, 16), torch.ones(1 << 20, dtype=torch.int8)
    model, optimizer = forebay.prepare(model, optimizer, (inputs, mask), device_memory="64KiB", device="cpu")
    loss = model(inputs, mask).sum()
    with torch.no_grad():
        model(inputs, mask)
    loss.backward()
    optimizer.step()
    forebay.close(model)


def test_a_second_forward(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """The plan is for one before each backward. Behind a step the next one is the first."""
    model, optimizer = pair
    said = refusal(model, batch(), 40)
    assert "made for one forward before each backward, and this is number" in said
    assert "give prepare() a loss_fn that makes all of them, or leave room for the others with device_reserve" in said
    optimizer.zero_grad()
    step(model, optimizer, **batch())
    assert "number" not in refusal(model, batch(16))


def test_a_device_that_goes_on_to_another_model() -> None:
    """What was said of the one is not said of the next."""
    device = CpuDevice(1 << 20)
    model = CASE.model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forebay.prepare(model, optimizer, batch(), device_memory=1 << 20, device=device)
    assert "(64, 64)" in refusal(model, batch(64, 64)) and "(64, 64)" in device.ledger.remedy
    forebay.close(model)
    assert device.ledger.remedy == "use a smaller batch or a shorter sequence, or raise device_memory"
    device.close()


def test_what_is_planned_is_not_spoken_of() -> None:
    """A budget that is too small for what a plan without a batch does not know."""
    model = CASE.model(torch.float32)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with pytest.raises(DoesNotFit) as refused:
        forebay.prepare(model, optimizer, None, device_memory=1, device="cpu", policy="stream")
    model, optimizer = forebay.prepare(
        model, optimizer, None, device_memory=refused.value.needed, device="cpu", policy="stream"
    )
    assert refusal(model, batch()).endswith("); use a smaller batch or a shorter sequence, or raise device_memory")
    forebay.close(model)


def test_the_program_of_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    """Two calls of a model in one forward; everything kept would take more than it has."""
    (program,) = programs("does-not-fit.md", "test_unplanned.py")
    with pytest.raises(DoesNotFit):
        exec(program.replace('device="cpu"', 'device="cpu", policy="keep"'), {"__name__": "page"})
    exec(program, {"__name__": "page"})
    assert "Tier.DEVICE" in capsys.readouterr().out
