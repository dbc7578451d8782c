"""``forebay.accumulate`` where something goes wrong: everything ends, nothing is left, and the next step is right."""

from __future__ import annotations

import _thread
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import DoesNotFit, HostOutOfMemory, ModelError, UsageError
from forebay.plans import Plan
from forebay.runtime.hooks import session_of
from tests.parity.accumulating import loss_of
from tests.parity.models import CASES, Case, WithLoss, images
from tests.parity.recomputing import AMPLE

LLAMA = CASES["llama"]


@pytest.fixture
def model() -> Iterator[nn.Module]:
    made = prepared(LLAMA)
    yield made
    forebay.close(made)
    assert left() == []


def prepared(case: Case, **budgets: Any) -> nn.Module:
    model = case.model(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters())
    budgets = {"plan": streamed(case)} if not budgets else {"policy": "stream", **budgets}
    budgets = {"device_memory": AMPLE, **budgets}
    model, _ = forebay.prepare(model, optimizer, case.inputs(0, torch.float32), device="cpu", **budgets)
    return model


@cache
def streamed(case: Case) -> Plan:
    """All blocks of ``case`` stream."""
    model = prepared(case, device_memory=AMPLE)
    plan = forebay.report(model).plan
    forebay.close(model)
    return plan


def left() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "micro-batch" in thread.name]


def batches(case: Case, count: int = 3) -> list[dict[str, Any]]:
    return [case.inputs(micro, torch.float32) for micro in range(count)]


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def live(model: nn.Module) -> int:
    attachment = session_of(model)
    assert attachment is not None
    attachment.session.synchronize()
    gc.collect()
    return attachment.session.device.ledger.live


def assert_as_before(model: nn.Module, case: Case, hooks: int, nbytes: int | None) -> None:
    """No thread, no hook, no gradient and no byte is left; the model trains on, with the numbers of the loop."""
    assert left() == []
    assert hooks_of(model) == hooks
    assert all(p.grad is None for p in model.parameters())
    assert nbytes in (None, live(model))
    reference = case.model(torch.float32)
    for batch in batches(case):
        loss_of(reference, batch).backward()
    forebay.accumulate(model, batches(case), loss_of)
    gradients = forebay.gradients(model)
    for name, parameter in reference.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda m, b: m(**b)["logits"], r"a tensor of shape \(2, 16, 128\) for micro-batch 0"),
        (lambda m, b: m(**b), "CausalLMOutputWithPast for micro-batch 0"),
        (lambda m, b: m(**b)["loss"].detach(), "the loss of micro-batch 0 has no gradient"),
    ],
)
def test_a_loss_that_is_none_is_refused(model: nn.Module, wrong: Any, says: str) -> None:
    hooks, nbytes = hooks_of(model), live(model)
    with pytest.raises(UsageError, match=says):
        forebay.accumulate(model, batches(LLAMA), wrong)
    assert_as_before(model, LLAMA, hooks, nbytes)


def test_no_micro_batches_are_refused(model: nn.Module) -> None:
    with pytest.raises(UsageError, match="needs one at least"):
        forebay.accumulate(model, iter(()), loss_of)


@pytest.mark.parametrize("block", ["model.layers.0", "model.layers.3", "lm_head"])
def test_an_error_in_one_forward_is_the_callers(model: nn.Module, block: str) -> None:
    """In the last block others have had a part of their backward."""
    hooks, nbytes, calls = hooks_of(model), live(model), 0

    def fail(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ZeroDivisionError("in the second micro-batch")

    handle = model.get_submodule(block).register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError, match="second micro-batch"):
        forebay.accumulate(model, batches(LLAMA), loss_of)
    handle.remove()
    assert_as_before(model, LLAMA, hooks, nbytes)


def test_an_error_in_backward_is_the_callers(model: nn.Module) -> None:
    """What torch's engine was about to run it keeps for a while, as after ``loss.backward()``."""
    hooks = hooks_of(model)
    weight = model.get_submodule("model.layers.1.mlp.up_proj").weight

    def fail(gradient: torch.Tensor) -> None:
        raise ZeroDivisionError("in backward")

    handle = weight.register_hook(fail)
    with pytest.raises(ZeroDivisionError, match="in backward"):
        forebay.accumulate(model, batches(LLAMA), loss_of)
    handle.remove()
    assert_as_before(model, LLAMA, hooks, None)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_what_no_hook_hears_of_is_cleared_away(model: nn.Module, error: type[BaseException]) -> None:
    """torch calls no hooks for what is no ``Exception``."""
    hooks, nbytes, calls = hooks_of(model), live(model), 0

    def stop(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error

    handle = model.get_submodule("model.layers.2.mlp").register_forward_pre_hook(stop)
    with pytest.raises(error):
        forebay.accumulate(model, batches(LLAMA), loss_of)
    handle.remove()
    assert_as_before(model, LLAMA, hooks, nbytes)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own answer to SIGINT: where tests run in several processes, those ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_of_the_caller_ends_all(model: nn.Module) -> None:
    """Ctrl-C while a micro-batch runs: it ends at its next turn, and so do the others."""
    hooks, nbytes, calls = hooks_of(model), live(model), 0

    def interrupt(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            _thread.interrupt_main()

    handle = model.get_submodule("model.layers.1").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        forebay.accumulate(model, batches(LLAMA), loss_of)
    handle.remove()
    assert_as_before(model, LLAMA, hooks, nbytes)


def test_one_at_a_time(model: nn.Module) -> None:
    hooks, nbytes = hooks_of(model), live(model)
    errors: list[BaseException] = []

    def again() -> None:
        try:
            forebay.accumulate(model, batches(LLAMA), loss_of)
        except UsageError as error:
            errors.append(error)

    def nested(whole: nn.Module, batch: Any) -> torch.Tensor:
        thread = threading.Thread(target=again)
        thread.start()
        thread.join()
        return torch.as_tensor(forebay.accumulate(whole, batches(LLAMA), loss_of)[0])

    with pytest.raises(UsageError, match="under way on this model already"):
        forebay.accumulate(model, batches(LLAMA), nested)
    assert len(errors) == 1
    assert_as_before(model, LLAMA, hooks, nbytes)


class Winding(nn.Module):
    """Layers, some of which a batch may leave out, and in an order that depends on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(48, 48) for _ in range(5)])
        self.head = nn.Linear(48, 4)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values[:, :, :4, :4].flatten(1)
        way = [(0, 1, 2, 3, 4), (0, 2, 4), (1, 0, 3, 3, 2)][int(pixel_values.sum().abs().item() * 10) % 3]
        for number in way:
            x = x + self.layers[number](x).relu()
        return self.head(x)


WINDING = Case(lambda: WithLoss(Winding()), images)


def test_micro_batches_may_go_different_ways() -> None:
    model = prepared(WINDING)
    assert_as_before(model, WINDING, hooks_of(model), live(model))
    forebay.close(model)


class Remembering(nn.Module):
    """A layer that reads what an earlier one has left somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Leaving(self, i) for i in range(3)])
        self.left: list[torch.Tensor] = []

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        x = pixel_values[:, :, :4, :4].flatten(1)
        self.left.clear()
        for layer in self.layers:
            x = layer(x)
        return x[:, :4]


class Leaving(nn.Module):
    def __init__(self, whole: Remembering, number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(48, 48)
        self.number = number
        object.__setattr__(self, "whole", whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).relu()
        self.whole.left.append(x)
        return x + self.whole.left[0] if self.number == 2 else x * 2


REMEMBERING = Case(lambda: WithLoss(Remembering()), images)


def test_a_block_that_reads_past_its_arguments_is_refused() -> None:
    """Nothing has been added to a gradient then; the loop itself works."""
    model = prepared(REMEMBERING)
    hooks = hooks_of(model)
    with pytest.raises(ModelError, match="was not given it as an argument"):
        forebay.accumulate(model, batches(REMEMBERING), loss_of)
    assert left() == []
    assert hooks_of(model) == hooks
    assert all(p.grad is None for p in model.parameters())
    for batch in batches(REMEMBERING):
        loss_of(model, batch).backward()
    forebay.close(model)


def through_its_input(y: torch.Tensor, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True, allow_unused=True)
    return y.mean() * (1 if slope is None else slope.norm().detach())


def through_all(y: torch.Tensor, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    y.mean().backward(retain_graph=True)
    return y.square().mean()


def through_one_of_the_first(y: torch.Tensor, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    y.mean().backward(retain_graph=True, inputs=[model[0].weight])  # type: ignore[list-item, index]
    return y.square().mean()


def through_the_last(y: torch.Tensor, x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    (slope,) = torch.autograd.grad(y.sum(), model[3].weight, retain_graph=True)  # type: ignore[index]
    return y.mean() * slope.norm().detach()


@pytest.mark.parametrize("inner", [through_its_input, through_all, through_one_of_the_first, through_the_last])
def test_gradients_that_a_loss_takes_itself(inner: Callable[..., torch.Tensor]) -> None:
    """Of the last block they are the loop's; where they would come to a cut it is refused, and never another number."""

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_()
        return inner(model(x), x, model)

    def network() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))

    batches = [torch.full((2, 32), float(i)) for i in range(3)]
    reference, model = network(), network()
    model, _ = forebay.prepare(
        model, torch.optim.SGD(model.parameters()), device_memory="1MiB", policy="stream", device="cpu"
    )
    if inner is through_the_last:
        expected = [loss_of(reference, batch) for batch in batches]
        assert all(map(torch.equal, forebay.accumulate(model, batches, loss_of), expected))
    else:
        with pytest.raises(ModelError, match="takes gradients itself"):
            forebay.accumulate(model, batches, loss_of)
    forebay.close(model)


class Parts(nn.Module):
    """Of which it calls one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        self.aux = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.body(x)
        return made


def test_a_part_that_was_taken_out_is_not_missed() -> None:
    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss

    batches = [torch.full((2, 32), float(i)) for i in range(3)]
    reference, model = Parts(), Parts()
    expected = [loss_of(reference, batch) for batch in batches]
    forebay.prepare(model, torch.optim.SGD(model.parameters()), device_memory="1MiB", policy="stream", device="cpu")
    del model.aux
    assert all(map(torch.equal, forebay.accumulate(model, batches, loss_of), expected))
    forebay.close(model)


@pytest.mark.parametrize("ready", [False, True], ids=["not prepared", "resident"])
def test_where_nothing_streams_it_is_the_loop(ready: bool) -> None:
    model = prepared(LLAMA, policy="resident") if ready else LLAMA.model(torch.float32)
    reference, seen = LLAMA.model(torch.float32), []

    def noted(whole: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(threading.current_thread() is threading.main_thread())
        return loss_of(whole, batch)

    losses = forebay.accumulate(model, batches(LLAMA), noted)
    expected = [loss_of(reference, batch) for batch in batches(LLAMA)]
    assert seen == [True] * 3
    assert all(torch.equal(a, b) for a, b in zip(losses, expected, strict=True))
    forebay.close(model)


def test_tied_gradients_without_room_on_the_host() -> None:
    """They wait there, one a micro-batch: 16 KiB each. The plan says so beforehand; one that does not, on the way."""
    case = CASES["llama-tied"]
    probe = prepared(case)
    attachment = session_of(probe)
    assert attachment is not None
    plan = attachment.session.plan
    forebay.close(probe)
    model = prepared(case, host_memory=plan.host + 2 * 16384)
    says = r"host: 3 micro-batches .* at most 2 fit: call accumulate more than once"
    with pytest.raises(DoesNotFit, match=says) as info:
        forebay.accumulate(model, batches(case), loss_of)
    assert (info.value.tier, info.value.needed - info.value.allowed) == ("host", 16384)
    forebay.close(model)
    model = prepared(case, plan=replace(plan, accumulation=None), host_memory=plan.host + 2 * 16384)
    with pytest.raises(HostOutOfMemory, match=r"contributes to model\.embed_tokens\.weight"):
        forebay.accumulate(model, batches(case), loss_of)
    assert left() == []
    forebay.accumulate(model, batches(case, 2), loss_of)
    forebay.close(model)
