"""What forebay takes, it gives back: threads, memory, descriptors and files, however a session ends."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.device.cpu import CpuDevice
from forebay.errors import DiskFull, ForebayError, SessionClosed, StorageError
from forebay.runtime.store import Store
from forebay.timeline import Lane
from forebay.units import MiB
from tests.faults.faulty import Late, Refuses, fill_disk, train_until_refused
from tests.faults.programs import ENVIRONMENT, ROOT
from tests.faults.residue import mapped, nothing_left_behind
from tests.faults.trained import AMPLE, WIDTH, adamw, disk_plan, network, prepare, step

__all__ = ["nothing_left_behind"]


@pytest.fixture(params=["auto", "stream", "disk"])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_close_twice(way: str, tmp_path: Path) -> None:
    model, optimizer = prepare(way, tmp_path)
    step(model, optimizer)
    if way != "auto":
        assert any(t.name.startswith("forebay-") for t in threading.enumerate())
    assert any(tmp_path.iterdir()) == (way == "disk")
    saved = optimizer.state_dict()
    forebay.close(model)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    forebay.close(model)
    assert all(torch.equal(model.state_dict()[n], t) for n, t in state.items())
    assert not any(t.name.startswith("forebay-") for t in threading.enumerate())
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.load_state_dict(saved)):
        with pytest.raises(SessionClosed, match="was closed; prepare it again"):
            use()


def test_what_was_asked_for_before_says_that_the_model_was_closed(tmp_path: Path) -> None:
    """A backward, and the parameters."""
    model, _ = prepare("stream", tmp_path)
    loss = model(torch.ones(2, WIDTH)).square().mean()
    parameters = forebay.parameters(model)
    forebay.close(model)
    with pytest.raises(SessionClosed, match="went when the model was closed, before its backward"):
        loss.backward()
    with pytest.raises(SessionClosed, match="its parameters are its own again"):
        parameters[next(iter(parameters))]


def test_close_before_the_first_step(way: str, tmp_path: Path) -> None:
    model, _ = prepare(way, tmp_path)
    forebay.close(model)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), network().parameters(), strict=True))


def test_close_in_the_middle_of_a_step(way: str, tmp_path: Path) -> None:
    """With a graph that nobody has run backward over."""
    model, optimizer = prepare(way, tmp_path)
    step(model, optimizer)
    loss = model(torch.ones(2, WIDTH)).square().mean()
    forebay.close(model)
    assert torch.equal(model(torch.ones(2, WIDTH)).square().mean(), loss)


def test_close_with_updates_under_way(tmp_path: Path) -> None:
    device = CpuDevice(8 * MiB, delays=Late(Lane.UPDATE))
    model, optimizer = prepare("disk", tmp_path, device)
    expected = network()
    plain = torch.optim.AdamW(expected.parameters(), lr=1e-2, fused=True)
    step(model, optimizer)
    step(expected, plain)
    forebay.close(model)  # at once: the updates are queued
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), expected.parameters(), strict=True))
    # A device that was handed over stays its owner's.
    assert device.submit(Lane.UPDATE, lambda: 3).wait() == 3
    assert device.usage().live == 0
    device.close()


@pytest.mark.parametrize("steps", [0, 2])
def test_a_model_that_is_dropped_gives_everything_back(way: str, steps: int, tmp_path: Path) -> None:
    before = mapped()
    model, optimizer = prepare(way, tmp_path)
    if way == "stream":
        assert mapped() > before, "the arenas are seen"
    for _ in range(steps):
        step(model, optimizer)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None
    assert not any(t.name.startswith("forebay-") for t in threading.enumerate())
    assert not any(tmp_path.iterdir())
    assert mapped() == before


def test_closing_frees_what_the_parameters_do_not_need(tmp_path: Path) -> None:
    before = mapped()
    model, optimizer = prepare("disk", tmp_path)
    step(model, optimizer)
    forebay.close(model)
    gc.collect()
    assert mapped() == before, "although the optimizer is still there"
    assert all(p.isfinite().all() for p in model.parameters())
    model, optimizer = prepare("stream", tmp_path)
    step(model, optimizer)
    held = mapped() - before
    forebay.close(model)
    gc.collect()
    assert 0 < mapped() - before < held / 3, "parameters stay where they are; gradients and two moments go"


def test_many_sessions_one_after_the_other(way: str, tmp_path: Path) -> None:
    model = network()
    options: dict[str, Any] = {"policy": way}
    if way == "disk":
        options = {"plan": disk_plan(tmp_path), "disk": f"{tmp_path}:64MiB"}
    reference = network()
    for _ in range(4):
        plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
        model, optimizer = forebay.prepare(model, adamw(model), device_memory=AMPLE, device="cpu", **options)
        step(model, optimizer)
        step(reference, plain)
        forebay.close(model)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def test_two_models_side_by_side(tmp_path: Path) -> None:
    pairs = [prepare("stream", tmp_path) for _ in range(2)]
    first, second = pairs
    step(*first)
    step(*second)
    forebay.close(first[0])
    step(*second)
    forebay.close(second[0])


def run(body: str, folder: Path, expect: int = 0) -> str:
    """Runs a program of its own that has a model with its states on disk in ``folder``."""
    head = """
        import sys
        from pathlib import Path
        import torch
        import forebay
        from tests.faults.trained import prepare, step
        torch.set_num_threads(1)
        folder = Path(sys.argv[1])
        model, optimizer = prepare("disk", folder)
        step(model, optimizer)
        assert any(folder.iterdir())
    """
    program = textwrap.dedent(head) + textwrap.dedent(body)
    result = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=False,
        env=ENVIRONMENT,
    )
    assert result.returncode == expect, result.stderr
    return result.stderr


ENDINGS: dict[str, tuple[str, int]] = {
    "in the middle of a step": ("loss = model(torch.ones(2, 96)).sum(); optimizer.step()", 0),
    "an exception": ("raise RuntimeError('as it happens')", 1),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("how", ENDINGS)
def test_a_process_that_ends_without_close(how: str, tmp_path: Path) -> None:
    body, code = ENDINGS[how]
    stderr = run(body, tmp_path, code)
    assert not any(tmp_path.iterdir())
    if code == 0:
        assert stderr == "", "nothing is complained about at exit"


WAITS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "synchronize": lambda m, o: forebay.synchronize(m),
    "the next step": step,
    "evaluation": lambda m, o: m(torch.ones(2, WIDTH)),
    "state_dict": lambda m, o: m.state_dict(),
    "the optimizer's state": lambda m, o: o.state_dict(),
    "parameters": lambda m, o: dict(forebay.parameters(m).items()),
    "close": lambda m, o: forebay.close(m),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("file", ["states", "parameters"])
def test_a_write_that_fails_is_told_in_the_training_thread(file: str, wait: str, tmp_path: Path) -> None:
    """The disk is full at some instant of an update: whoever waits for it next is told, and close still works."""
    model, optimizer = prepare("disk", tmp_path)
    step(model, optimizer)
    forebay.synchronize(model)
    fill_disk(file)

    def go_on() -> None:
        # A step may need its own writes (a staging buffer that is wanted again); else the next call does.
        step(model, optimizer)
        WAITS[wait](model, optimizer)

    with pytest.raises(DiskFull, match=f"{file}.*No space left"):
        go_on()
    with contextlib.suppress(DiskFull):
        forebay.close(model)
    assert not model._forward_pre_hooks
    assert not any(t.name.startswith("forebay-") for t in threading.enumerate())
    assert not any(tmp_path.iterdir())


def test_what_fails_to_close_keeps_nothing_else_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = prepare("disk", tmp_path)
    step(model, optimizer)
    close = Store.close

    def failing(store: Store) -> None:
        close(store)
        raise StorageError("the file cannot be closed")

    monkeypatch.setattr(Store, "close", failing)
    with pytest.raises(StorageError, match="cannot be closed"):
        forebay.close(model)
    assert not any(t.name.startswith("forebay-") for t in threading.enumerate())
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("way", ["stream", "disk"])
@pytest.mark.parametrize("nth", range(0, 60, 7))
def test_a_job_that_no_lane_takes(way: str, nth: int, tmp_path: Path) -> None:
    """Whatever job it is, the error reaches the caller, and close gives everything back."""
    device = CpuDevice(8 * MiB, delays=Refuses(nth))
    model, optimizer = prepare(way, tmp_path, device)
    train_until_refused(model, optimizer, device)
    assert not model._forward_pre_hooks
    assert not any(tmp_path.iterdir())


def test_the_step_after_a_refused_one(tmp_path: Path) -> None:
    """A fetch that could not be queued leaves the model as it was: the same step again gives plain PyTorch's."""
    device = CpuDevice(8 * MiB, delays=Refuses(2))
    model, optimizer = prepare("stream", tmp_path, device)
    with pytest.raises(ForebayError, match="refused: "):
        step(model, optimizer)
    optimizer.zero_grad()
    reference = network()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2, fused=True)
    for _ in range(2):
        step(model, optimizer)
        step(reference, plain)
        values = forebay.parameters(model)
        assert all(torch.equal(values[n], p) for n, p in reference.named_parameters())
    forebay.close(model)
    device.close()
