"""Activations on their way to the host when things go wrong: that is told, the next step is right, nothing is left."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, final

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import forebay
from forebay.device.base import Delays, NoWatch, Watch
from forebay.device.cpu import CpuDevice
from forebay.device.delays import DelayOne
from forebay.device.ledger import StorageLedger
from forebay.errors import ConfigError, DeviceOutOfMemory, ForebayError, SessionClosed
from forebay.layout import MOVED_LEAST
from forebay.memory import Kind
from forebay.plans import Plan, Streaming
from forebay.runtime.blocks import find_blocks
from forebay.runtime.depots import HostDepot
from forebay.runtime.stash import Stash, Ticket
from forebay.timeline import Lane
from forebay.treatments import Fate, Selection, Split, Treatment
from tests.parity.compare import adamw
from tests.parity.recomputing import AMPLE, plan_of

ROWS, WIDTH, DEPTH = 64, 32, 4
EACH = ROWS * WIDTH * 4
"""Bytes of a layer's result."""


class Tower(nn.Module):
    """``on_layer`` is called after each layer with its number."""

    def __init__(self, on_layer: Callable[[int], None] = lambda i: None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(DEPTH)])
        self.on_layer = on_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)
            self.on_layer(i)
        return x.square().mean()


def batch() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def plan_moving(model: nn.Module, resident: bool = True, **fields: Any) -> Plan:
    plan = plan_of(find_blocks(model).model, (), resident=resident)
    ops = (Treatment("aten.addmm.default", 0, Fate.OFFLOAD), Treatment("aten.gelu.default", 0, Fate.OFFLOAD))
    chosen = (Selection(tuple(f"layers.{i}" for i in range(DEPTH)), ops),)
    arena = 2 * DEPTH * EACH
    streaming = replace(plan.streaming, host_activations=arena, offload_window=EACH, reload_window=2 * EACH)
    return replace(plan, **{"streaming": streaming, "activations": chosen, "host": plan.host + arena, **fields})


def prepared(model: nn.Module, delays: Delays | None = None) -> tuple[nn.Module, torch.optim.Optimizer, CpuDevice]:
    device = CpuDevice(AMPLE, delays=delays)
    plan = plan_moving(model)
    made = forebay.prepare(model, adamw(list(model.parameters())), plan=plan, device_memory=AMPLE, device=device)
    return *made, device


def assert_a_step_like_plain_pytorch(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    plain = Tower()
    plain.load_state_dict({n: p.clone() for n, p in forebay.parameters(model).items()})
    optimizer.zero_grad()
    model(batch()).backward()
    plain(batch()).backward()
    gradients = forebay.gradients(model)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None and torch.equal(gradients[name], parameter.grad), name


def assert_closed(model: nn.Module, device: CpuDevice) -> None:
    with contextlib.suppress(ForebayError):
        forebay.close(model)
    # torch's engine keeps what is left of a graph whose backward failed until the next backward.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    assert not model._forward_pre_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not _get_current_dispatch_mode_stack()
    assert device.usage().live == 0
    device.close()


@final
class Refuses(Delays):
    """Refuses the ``nth`` job whose description begins with ``verb``."""

    def __init__(self, verb: str, nth: int) -> None:
        self._verb, self._left = verb, nth

    def seconds(self, lane: Any, what: str) -> float:
        if what.startswith(self._verb):
            self._left -= 1
            if self._left == -1:
                raise ForebayError(f"refused: {what}")
        return 0.0


@pytest.mark.parametrize("nth", range(2 * DEPTH))
@pytest.mark.parametrize("verb", ["offload", "reload"])
def test_a_copy_that_no_lane_takes(verb: str, nth: int) -> None:
    model, optimizer, device = prepared(Tower(), Refuses(verb, nth))
    with pytest.raises(ForebayError, match=f"refused: {verb} layers"):
        model(batch()).backward()
    assert_a_step_like_plain_pytorch(model, optimizer)
    assert forebay.report(model).timeline.counters["activations_kept"] == 0
    optimizer.zero_grad()
    assert_closed(model, device)


def stash_over(
    arena: torch.Tensor, device: CpuDevice, window: int = 0, *, ahead: int = 0, watch: Watch | None = None
) -> Stash:
    streaming = Streaming(offload_window=window, reload_window=ahead)
    depots = {Fate.OFFLOAD: HostDepot(device, arena)}
    return Stash(device, watch or NoWatch(), torch.device("cpu"), depots, streaming)


def looking(device: CpuDevice) -> StorageLedger:
    """As in a step whose bytes are counted."""
    watch = StorageLedger(device.ledger)
    watch.activate(True)
    return watch


def offload(stash: Stash, tensor: torch.Tensor, what: str) -> Ticket | None:
    return stash.treat(tensor, Treatment("op", 0, Fate.OFFLOAD), what)


def coming_back(stash: Stash, *, demanded: bool) -> Ticket:
    """The ticket of one that has left in forward and is on its way back in backward; ``demanded``: asked for, too."""
    ticket = offload(stash, torch.ones(MOVED_LEAST, dtype=torch.uint8), "a")
    assert ticket is not None
    stash.end_forward()
    stash.begin_backward()
    if demanded:
        ticket.tensor()
    return ticket


@pytest.mark.parametrize("window", [0, AMPLE])
def test_a_copy_that_fails_on_its_way(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told to whoever waits for it: forward, or the beginning of backward, and whoever asks for the bytes."""

    def fail(here: object, target: torch.Tensor, source: torch.Tensor) -> None:
        raise TypeError("nothing can be written there")

    monkeypatch.setattr("forebay.device.cpu._copy_bytes", fail)
    device = CpuDevice()
    stash = stash_over(torch.empty(AMPLE, dtype=torch.uint8), device, window)
    values = torch.ones(MOVED_LEAST)
    if window == 0:
        with pytest.raises(TypeError):
            offload(stash, values, "a")
    else:
        gate = threading.Event()
        device.submit(Lane.D2H, gate.wait)  # it is still on its way when forward goes on
        ticket = offload(stash, values, "a")
        assert ticket is not None
        gate.set()
        with pytest.raises(TypeError):
            stash.begin_backward()
        # Once it was told, what failed and its bytes are let go; whoever asks is told in words.
        with pytest.raises(ForebayError, match="a was lost on its way off the device or back: nothing can be"):
            ticket.tensor()
        assert stash.taken == 0
        gone = weakref.ref(ticket)
        del ticket
        stash.close()
        gc.collect()  # the error's frames
        assert gone() is None
    device.close()


def test_what_is_not_moved() -> None:
    device = CpuDevice()
    stash = stash_over(torch.empty(2 * MOVED_LEAST, dtype=torch.uint8), device)
    assert offload(stash, torch.ones(MOVED_LEAST - 1, dtype=torch.uint8), "too small") is None
    assert offload(stash, torch.ones(MOVED_LEAST, dtype=torch.uint8, device="meta"), "elsewhere") is None
    with torch.inference_mode():
        assert offload(stash, torch.ones(MOVED_LEAST, dtype=torch.uint8), "not counted by torch") is None
    assert stash.kept == 0
    assert offload(stash, torch.ones(2 * MOVED_LEAST + 1, dtype=torch.uint8), "no room") is None
    assert stash.kept == 1
    device.close()


def test_one_storage_is_moved_once() -> None:
    device = CpuDevice()
    stash = stash_over(torch.empty(8 * MOVED_LEAST, dtype=torch.uint8), device, AMPLE)
    values = torch.arange(MOVED_LEAST, dtype=torch.float32)
    ticket = offload(stash, values, "a")
    assert ticket is not None
    assert offload(stash, values[1:].view(torch.int32), "a view") is ticket
    assert torch.equal(ticket.tensor().view(torch.float32), values)
    assert ticket.tensor().data_ptr() == ticket.tensor().data_ptr()
    device.synchronize()
    assert [e.what for e in device.drain_events() if e.lane is not Lane.STALL] == ["offload a", "reload a"]
    values.add_(1)
    assert stash.ticket_of(values) is None
    replica = ticket.tensor()
    del ticket
    stash.end_forward()
    assert stash.taken == 0
    assert torch.equal(replica.view(torch.float32), values - 1)  # whoever looks at the bytes goes on having them
    device.close()


LATE = 0.03


def test_bytes_that_are_asked_for_before_they_have_arrived() -> None:
    """The copy to the host is late, and nobody has waited for it: the copy back does."""
    device = CpuDevice(delays=DelayOne(0, LATE))
    stash = stash_over(torch.empty(8 * MOVED_LEAST, dtype=torch.uint8), device, AMPLE)
    values = torch.arange(MOVED_LEAST, dtype=torch.float32)
    ticket = offload(stash, values, "a")
    assert ticket is not None
    assert torch.equal(ticket.tensor().view(torch.float32), values)
    device.close()


@pytest.mark.parametrize("late", [0, 1], ids=["to the host", "back"])
def test_a_range_is_taken_as_long_as_a_copy_uses_it(late: int) -> None:
    device = CpuDevice(delays=DelayOne(late, LATE))
    stash = stash_over(torch.empty(MOVED_LEAST, dtype=torch.uint8), device, AMPLE, ahead=AMPLE)
    ticket = offload(stash, torch.ones(MOVED_LEAST, dtype=torch.uint8), "a")
    assert ticket is not None
    if late:
        stash.begin_backward()
    del ticket
    stash.end_forward()
    assert stash.taken == MOVED_LEAST
    # Wanted at once: waited for.
    assert offload(stash, torch.ones(MOVED_LEAST, dtype=torch.uint8), "b") is not None
    stash.end_forward()
    device.synchronize()
    assert stash.taken == stash.kept == 0
    device.close()


def test_a_part_without_room_on_the_host_costs_the_device_nothing() -> None:
    """Neither a copy of the rest, which only what leaves needs; nor, where there is no room for that copy, the part."""
    device = CpuDevice(MOVED_LEAST)
    stash = stash_over(torch.empty(2 * MOVED_LEAST, dtype=torch.uint8), device, watch=looking(device))
    half = Treatment("op", 0, Fate.OFFLOAD, split=Split(1, 2))
    assert stash.treat(torch.ones(8 * MOVED_LEAST, dtype=torch.uint8), half, "a") is None
    assert (stash.kept, device.usage().peak) == (1, 0)
    with pytest.raises(DeviceOutOfMemory):
        stash.treat(torch.ones(4 * MOVED_LEAST, dtype=torch.uint8), half, "b")
    device.synchronize()
    assert (stash.taken, stash.kept, device.usage().live) == (0, 1, 0)
    stash.close()
    device.close()


@pytest.mark.parametrize("demanded", [False, True])
def test_device_bytes_go_with_the_last_reference(demanded: bool) -> None:
    device = CpuDevice()
    watch = looking(device)
    stash = stash_over(torch.empty(MOVED_LEAST, dtype=torch.uint8), device, AMPLE, ahead=AMPLE, watch=watch)
    ticket = coming_back(stash, demanded=demanded)
    device.synchronize()
    device.reset_peak()
    assert device.usage().at_peak[Kind.ACTIVATION] == device.usage().live == MOVED_LEAST
    del ticket
    assert device.usage().live == 0
    device.close()


def test_what_comes_back_for_nobody_counts_in_the_reload_window_until_it_is_there() -> None:
    """Room for one in the window. Nobody wants the one on its way any more, but the device holds its bytes."""
    device, go = CpuDevice(), threading.Event()
    watch = looking(device)
    stash = stash_over(torch.empty(2 * MOVED_LEAST, dtype=torch.uint8), device, AMPLE, ahead=MOVED_LEAST, watch=watch)
    tickets = [offload(stash, torch.ones(MOVED_LEAST, dtype=torch.uint8), what) for what in "ab"]
    stash.end_forward()
    device.submit(Lane.H2D, go.wait)
    stash.begin_backward()  # b
    tickets.pop()
    stash.begin_backward()
    device.reset_peak()
    assert device.usage().live == MOVED_LEAST
    go.set()
    device.synchronize()
    stash.begin_backward()  # a
    device.synchronize()
    assert device.usage().at_peak[Kind.ACTIVATION] == device.usage().live == MOVED_LEAST
    tickets.clear()
    stash.close()
    device.close()


class Stop:
    """Raises once, when layer 1 has run."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.armed = error, True

    def __call__(self, layer: int) -> None:
        if layer == 1 and self.armed:
            self.armed = False
            raise self.error("stop")


@pytest.mark.parametrize("inside", [False, True], ids=["between layers", "inside a layer"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_step_after_a_failed_forward(error: type[BaseException], inside: bool) -> None:
    stop = Stop(error)
    model = Tower(on_layer=lambda i: None if inside else stop(i))
    handle = model.layers[1][0].register_forward_hook(lambda *_: stop(1) if inside else None)
    model, optimizer, device = prepared(model)
    with pytest.raises(error):
        model(batch())
    assert_a_step_like_plain_pytorch(model, optimizer)
    assert forebay.report(model).timeline.counters["activations_kept"] == 0
    handle.remove()
    optimizer.zero_grad()
    model.on_layer = lambda i: None
    assert_closed(model, device)


def test_an_interrupt_leaves_nothing_on_when_the_model_is_closed() -> None:
    stop = Stop(KeyboardInterrupt)
    model = Tower()
    handle = model.layers[1][0].register_forward_hook(lambda *_: stop(1))
    model, _, device = prepared(model)
    with pytest.raises(KeyboardInterrupt):
        model(batch())
    handle.remove()
    assert_closed(model, device)


def test_an_error_between_forward_and_backward() -> None:
    model, optimizer, device = prepared(Tower())
    for _ in range(3):
        loss = model(batch())
        del loss  # as if what the user does with it had failed
    assert_a_step_like_plain_pytorch(model, optimizer)
    optimizer.zero_grad()
    assert_closed(model, device)


def test_backward_after_close_says_so() -> None:
    model, _, device = prepared(Tower())
    loss = model(batch())
    forebay.close(model)
    with pytest.raises(SessionClosed, match=r"offloaded|went when the model was closed"):
        loss.backward()
    del loss
    assert_closed(model, device)


def test_a_model_that_is_dropped_gives_everything_back() -> None:
    model, optimizer, device = prepared(Tower())
    model(batch()).backward()
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    device.reset_peak()
    assert device.usage().at_peak[Kind.ACTIVATION] == 0
    device.close()


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("layers.9",), "names ops of a block 'layers.9' that the model does not have"),
        (("layers.0", "shared"), "names ops of block shared, which is not one module"),
    ],
)
def test_a_plan_for_blocks_that_cannot_be_treated(names: tuple[str, ...], words: str) -> None:
    class Tied(Tower):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.again.weight = self.shared.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.again(self.shared(x)))

    model = Tied()
    chosen = (Selection(names, (Treatment("aten.addmm.default", 0, Fate.OFFLOAD),)),)
    with pytest.raises(ConfigError, match=words):
        forebay.prepare(
            model,
            adamw(list(model.parameters())),
            plan=plan_moving(model, activations=chosen),
            device_memory=AMPLE,
            device="cpu",
        )
