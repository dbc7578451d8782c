"""Blocks whose forward writes to what is inside of their attributes, and that run again in backward."""

from __future__ import annotations

import copy
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import forebay
from forebay.checking import check
from forebay.errors import ModelError, PlanInvalid
from forebay.profiler.capture import capture
from forebay.runtime.inside import Content, look_inside
from tests.null.strategies import roomy_machine
from tests.parity.compare import stepped

WIDTH, LAYERS, STEPS = 16, 4, 4


class Meter:
    """A running mean, as training scripts have one."""

    def __init__(self) -> None:
        self.total: Any = 0.0
        self.count = 0
        self.latest: list[torch.Tensor] = []

    def update(self, value: torch.Tensor) -> None:
        self.total, self.count = self.total + value, self.count + 1
        self.latest.append(value)

    def mean(self) -> torch.Tensor:
        return self.total / max(self.count, 1) + sum(self.latest[-2:])


class Layer(nn.Module):
    """What it computes hangs on what it has noted, which it goes on to note before backward has all that it needs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.noted = nn.Linear(WIDTH, WIDTH), self.start()

    def start(self) -> Any:
        raise NotImplementedError

    def note(self, mean: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        return x + y * self.note(y.detach().mean()) + y.sin()


class InList(Layer):
    def start(self) -> list[torch.Tensor]:
        return []

    def note(self, mean: torch.Tensor) -> Any:
        self.noted.append(mean)
        return sum(self.noted) / len(self.noted) + len(self.noted)


class InDict(Layer):
    def start(self) -> Counter[str]:
        return Counter()

    def note(self, mean: torch.Tensor) -> Any:
        self.noted["calls"] += 1
        return 1 / self.noted["calls"]


class InSet(Layer):
    def start(self) -> set[int]:
        return set()

    def note(self, mean: torch.Tensor) -> Any:
        self.noted.add(len(self.noted))
        return len(self.noted)


class InDeque(Layer):
    def start(self) -> deque[torch.Tensor]:
        return deque(maxlen=2)

    def note(self, mean: torch.Tensor) -> Any:
        self.noted.append(mean)
        return sum(self.noted) + len(self.noted)


class InObject(Layer):
    def start(self) -> Meter:
        return Meter()

    def note(self, mean: torch.Tensor) -> Any:
        self.noted.update(mean)
        return self.noted.mean()


class Deeper(Layer):
    def start(self) -> SimpleNamespace:
        return SimpleNamespace(by_name={"means": ([], 1)})

    def note(self, mean: torch.Tensor) -> Any:
        self.noted.by_name["means"][0].append(mean)
        return 1 / len(self.noted.by_name["means"][0])


class Late(InDict):
    """Makes what it notes in when it is first called, and another one every other time."""

    def start(self) -> Any:
        return None

    def note(self, mean: torch.Tensor) -> Any:
        if self.noted is None or self.noted["calls"] == 2:
            self.noted = Counter()
        return super().note(mean)


class InArray(Layer):
    def start(self) -> np.ndarray[Any, Any]:
        return np.zeros(3)

    def note(self, mean: torch.Tensor) -> Any:
        self.noted[1] += 1
        return 1 / float(self.noted[1])


KINDS: tuple[type[Layer], ...] = (InList, InDict, InSet, InDeque, InObject, InArray, Deeper, Late)


class InTensor(Layer):
    """Changes a tensor in place that is no buffer."""

    def start(self) -> torch.Tensor:
        return torch.ones(())

    def note(self, mean: torch.Tensor) -> Any:
        self.noted.mul_(0.9).add_(mean)
        return self.noted.clone()


class InTensorOfList(Layer):
    def start(self) -> list[torch.Tensor]:
        return [torch.ones(())]

    def note(self, mean: torch.Tensor) -> Any:
        self.noted[0].mul_(0.9)
        return self.noted[0].clone()


def model(kind: type[Layer], *, shared: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers = [kind() for _ in range(LAYERS)]
    for layer in layers if shared else ():
        layer.noted = layers[0].noted
    return nn.Sequential(*layers)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    batch = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    return stepped(optimizer, (loss_of(model, batch) for _ in range(STEPS)))


def prepared(module: nn.Module, policy: str, loss_fn: Any = loss_of) -> tuple[nn.Module, torch.optim.Optimizer]:
    return forebay.prepare(
        module,
        adamw(module),
        torch.zeros(4, WIDTH),
        device_memory="1MiB",
        policy=policy,
        device="cpu",
        loss_fn=loss_fn,
    )


@pytest.mark.thinned(2)
@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
@pytest.mark.parametrize("policy", ["stream-recompute", "resident"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_of_plain_pytorch(kind: type[Layer], policy: str, shared: bool) -> None:
    plain = model(kind, shared=shared)
    its = adamw(plain)
    expected = trained(plain, its)
    ours, optimizer = prepared(model(kind, shared=shared), policy)
    assert trained(ours, optimizer) == expected
    assert bool(forebay.report(ours).plan.recompute) is (policy == "stream-recompute")
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    if kind is InDict:
        assert [layer.noted for layer in ours] == [layer.noted for layer in plain]
    forebay.close(ours)


def test_a_list_that_is_emptied_between_forward_and_backward_stays_empty() -> None:
    """As with losses that layers add to a list, and the loop takes from there."""
    ours, optimizer = prepared(model(InList, shared=True), "stream-recompute")
    for _ in range(2):
        loss = loss_of(ours, torch.ones(4, WIDTH))
        assert len(ours[0].noted) == LAYERS
        ours[0].noted.clear()
        loss.backward()
        assert ours[0].noted == []
        optimizer.step()
        optimizer.zero_grad()
    forebay.close(ours)


class Told(nn.Module):
    """Its layers are called with an object that is made for each forward, and count in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counting() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_place, by_name = Meter(), SimpleNamespace(numbers=random.Random(1))
        for layer in self.layers:
            x = layer(x, by_place, told=by_name)
        return x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, meter: Meter, *, told: SimpleNamespace) -> torch.Tensor:
        y = self.linear(x).tanh()
        meter.update(y.detach().mean())
        return x + y * meter.count + (y * told.numbers.random()).sin()


@pytest.mark.parametrize("policy", ["stream-recompute", "resident"])
def test_objects_that_a_block_is_called_with(policy: str) -> None:
    torch.manual_seed(0)
    plain = Told()
    ours, optimizer = prepared(copy.deepcopy(plain), policy)
    assert trained(ours, optimizer) == trained(plain, adamw(plain))
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    forebay.close(ours)


class Handing(Told):
    """Gives its layers the scale of the batch, in an attribute and inside of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            layer.scale, layer.more["scale"] = x.amax(), x.amin()
            x = layer(x)
        return x


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.more = nn.Linear(WIDTH, WIDTH), torch.ones(()), {"scale": torch.ones(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh() * self.scale
        return x + y + (y * self.more["scale"]).sin()


@pytest.mark.parametrize("policy", ["stream-recompute", "resident"])
def test_another_forward_before_the_backward_has_set_them_anew(policy: str) -> None:
    torch.manual_seed(0)
    plain = Handing()

    def pairs(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - model(2 * batch)).square().mean()

    ours, optimizer = prepared(copy.deepcopy(plain), policy, pairs)
    batch = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    expected = stepped(adamw(plain), (pairs(plain, batch) for _ in range(STEPS)))
    assert stepped(optimizer, (pairs(ours, batch) for _ in range(STEPS))) == expected
    assert all(torch.equal(forebay.parameters(ours)[n], p) for n, p in plain.named_parameters())
    forebay.close(ours)


class InTensorLate(InTensor):
    """Makes it in the first forward, and changes it in all others."""

    def start(self) -> Any:
        return None

    def note(self, mean: torch.Tensor) -> Any:
        if self.noted is None:
            self.noted = mean
            return mean
        return super().note(mean)


IN_PLACE: tuple[type[Layer], ...] = (InTensor, InTensorOfList, InTensorLate)


@pytest.mark.parametrize("policy", ["stream", "stream-recompute"])
@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_tensor_that_is_changed_in_place_and_is_no_buffer(kind: type[Layer], policy: str) -> None:
    """Nobody has what was in it, so no plan has its block run again; a recording leaves it as it was."""

    def mixed() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*((kind, InList)[place % 2]() for place in range(LAYERS)))

    plain = mixed()
    ours, optimizer = prepared(mixed(), policy)
    assert forebay.report(ours).plan.recompute == (("1", "3") if policy == "stream-recompute" else ())
    assert trained(ours, optimizer) == trained(plain, adamw(plain))
    forebay.close(ours)


@pytest.mark.parametrize("kind", IN_PLACE)
def test_a_plan_that_has_it_run_again_is_refused(kind: type[Layer]) -> None:
    """By the check, which has the trace; else by the first backward behind a forward that changes it."""
    ours, _ = prepared(model(kind), "stream")
    again = replace(forebay.report(ours).plan, recompute=("3",))
    forebay.close(ours)
    module, batch = model(kind), torch.ones(4, WIDTH)
    trace = capture(module, batch, loss_fn=loss_of, device="cpu").trace
    with pytest.raises(PlanInvalid, match=r"recomputes block 3, whose forward changes in place .*register_buffer"):
        check(trace, roomy_machine("cpu"), again)
    ours, optimizer = forebay.prepare(module, adamw(module), plan=again, device_memory="1MiB", device="cpu")
    if kind is InTensorLate:
        stepped(optimizer, [loss_of(ours, batch)])
    loss = loss_of(ours, batch)
    with pytest.raises(ModelError, match=r"block 3 is to run again .* its forward has changed .*register_buffer"):
        loss.backward()
    del loss
    forebay.close(ours)


def test_the_plan_says_why_it_does_not_run_again() -> None:
    trace = capture(model(InTensor), torch.zeros(4, WIDTH), loss_fn=loss_of, device="cpu").trace
    assert trace.unrepeatable == ("0", "1", "2", "3")
    assert any("block 0 and 3 more are not recomputed" in note for note in trace.notes)
    assert not capture(model(InList), torch.zeros(4, WIDTH), loss_fn=loss_of, device="cpu").trace.unrepeatable


def test_one_that_is_changed_between_forward_and_backward() -> None:
    module = Handing()
    ours, _ = prepared(module, "stream-recompute")
    layers = ours.layers
    loss = loss_of(ours, torch.ones(4, WIDTH))
    layers[LAYERS - 1].scale.mul_(2)
    with pytest.raises(ModelError, match=r"something since its forward has changed"):
        loss.backward()
    del loss
    forebay.close(ours)


NOTED: list[torch.Tensor] = []


def note_in_the_file(value: torch.Tensor) -> None:
    NOTED.append(value)


class ByName(Layer):
    """Notes in a variable of this file, by a function of it."""

    def start(self) -> None:
        NOTED.clear()

    def note(self, mean: torch.Tensor) -> Any:
        note_in_the_file(mean)
        return sum(NOTED) + len(NOTED)


@pytest.mark.parametrize("policy", ["stream-recompute", "resident"])
def test_what_a_forward_has_by_name(policy: str) -> None:
    plain = model(ByName)
    expected = trained(plain, adamw(plain))
    count = len(NOTED)
    ours, optimizer = prepared(model(ByName), policy)
    assert not NOTED and trained(ours, optimizer) == expected and len(NOTED) == count
    forebay.close(ours)


@pytest.mark.parametrize("policy", ["stream-recompute", "resident"])
def test_what_hooks_have_by_name(policy: str) -> None:
    """Features that hooks inside of the blocks collect, and the loop takes from there before backward."""

    def run(model: nn.Module, begin: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]) -> list[float]:
        features: list[torch.Tensor] = []
        for layer in model:
            layer.linear.register_forward_hook(lambda module, args, output: features.append(output.square().mean()))
        model, optimizer = begin(model)
        batch, found = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH), []
        for _ in range(STEPS):
            assert not features
            loss = loss_of(model, batch) + sum(features)
            features.clear()
            found += stepped(optimizer, [loss])
        forebay.close(model)
        return found

    expected = run(model(InDict), lambda plain: (plain, adamw(plain)))
    assert run(model(InDict), lambda ours: prepared(ours, policy)) == expected


def on_gradients_of_modules(layer: Layer, seen: list[float]) -> None:
    layer.linear.register_full_backward_hook(lambda module, made, given: seen.append(float(given[0].norm())))


def before_gradients_of_modules(layer: Layer, seen: list[float]) -> None:
    layer.linear.register_full_backward_pre_hook(lambda module, given: seen.append(float(given[0].norm())))


@pytest.mark.parametrize("policy", ["stream-recompute", "resident"])
@pytest.mark.parametrize("register", [on_gradients_of_modules, before_gradients_of_modules])
def test_what_hooks_of_backward_note(register: Callable[[Layer, list[float]], None], policy: str) -> None:
    """The norms of gradients, for a log: nothing of what is looked at before the run is among them."""

    def run(model: nn.Module, begin: Callable[[nn.Module], tuple[nn.Module, torch.optim.Optimizer]]) -> list[float]:
        seen: list[float] = []
        for layer in model:
            register(layer, seen)
        model, optimizer = begin(model)
        assert not seen
        batch = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
        for _ in range(STEPS):
            stepped(optimizer, [loss_of(model, batch)])
        forebay.close(model)
        return seen

    expected = run(model(InDict), lambda plain: (plain, adamw(plain)))
    assert expected and run(model(InDict), lambda ours: prepared(ours, policy)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_recording_leaves_nothing(kind: type[Layer]) -> None:
    module = model(kind)
    held = [Content.of(one) for layer in module for one in look_inside([layer.noted]).containers]
    assert held or kind is Late
    assert capture(module, torch.ones(4, WIDTH)).trace.visits
    assert not any(content.is_changed() for content in held)
    assert all(layer.noted is None for layer in module if kind is Late)


class Slotted:
    __slots__ = ("value",)


def test_what_is_looked_into() -> None:
    """Containers one in the other, and the fields of the program's own objects, of which each is seen once. Not what
    such an object refers to, nor what is Python's, torch's or a class."""
    meter, rest = Meter(), [1, (2, {3})]
    meter.other = Meter()  # type: ignore[attr-defined]
    rest.append(rest)
    found = look_inside([rest, {"meter": meter}, meter]).containers
    assert [id(one) for one in found] == [
        id(one)
        for one in (rest, rest[1][1], found[2], meter, meter.latest)  # type: ignore[index]
    ]
    assert found[2] == {"meter": meter}
    others = [threading.Thread(), Slotted(), Meter, nn.Linear(2, 2), torch.zeros(2), torch.optim.SGD([torch.zeros(2)])]
    assert look_inside([*others, len, Meter.update]).containers == ()
    kept = Content.of(meter)
    assert not kept.is_changed()
    meter.update(torch.ones(()))
    meter.late = 1  # type: ignore[attr-defined]
    now = kept.now()
    assert kept.is_changed() and not now.is_changed()
    kept.put_back()
    assert (meter.total, meter.count, len(meter.latest)) == (0.0, 0, 1) and "late" not in vars(meter)
    now.put_back()
    assert meter.count == 1 and vars(meter)["late"] == 1


def test_what_functions_have_by_name() -> None:
    """Variables of the file and of functions around, of a method its object, of a partial its arguments; of functions
    by name what they have, and of these no further."""
    inner, given, meter = [1], {"given": 2}, Meter()

    def nested(x: int) -> list[int]:
        return [len(inner) + y for y in range(x)]

    def around(x: int) -> Any:
        return further(x)

    def further(x: int) -> Any:
        return nested(x)

    def furthest(x: int) -> Any:
        return around(x)

    def found(value: Any) -> list[int]:
        return [id(one) for one in look_inside([value]).containers]

    assert found(nested) == found(further) == found(around) == [id(inner)]
    assert found(furthest) == []
    assert found(note_in_the_file) == [id(NOTED)]
    assert found(meter.update) == [id(meter), id(meter.latest)]
    assert found(partial(nested, given)) == [id(inner), id(given)]
    assert found(nn.functional.gelu) == found(copy.deepcopy) == []
