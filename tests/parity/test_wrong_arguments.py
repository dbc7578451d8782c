"""What public functions say of arguments of another kind: what was needed, and what was there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ForebayError, UsageError
from forebay.profiler.here import this_machine

WIDTH = 8
BATCH = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)

Prepared = tuple[nn.Module, torch.optim.Optimizer]


def made() -> Prepared:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    return model, torch.optim.AdamW(model.parameters(), fused=True)


@pytest.fixture
def prepared() -> Iterator[Prepared]:
    model, optimizer = forebay.prepare(*made(), BATCH, device_memory="1MiB", policy="stream", device="cpu")
    yield model, optimizer
    forebay.close(model)


PREPARE: dict[str, tuple[dict[str, Any], str]] = {
    "blocks": ({"blocks": 3}, r"blocks are the names of modules in a list, got 3"),
    "names": ({"blocks": [3]}, r"blocks are the names of modules in a list, got \[3\]"),
    "once": ({"blocks": (name for name in ("0", "1", "2"))}, r"blocks are the names of modules in a list, got <gen"),
    "accumulates": ({"accumulates": None}, "accumulates is True, or False for a loop .*; got None"),
    "checksums": ({"checksums": "no"}, "checksums must be True or False, got 'no'"),
    "compress": ({"compress": torch.zeros(2)}, "compress must be 0 .* got tensor"),
    "micro_batches": ({"micro_batches": torch.zeros(2)}, "micro_batches must be an int, 1 or more, got tensor"),
    "loss_fn": ({"loss_fn": "cross_entropy"}, "loss_fn is a function, .* got 'cross_entropy'"),
}


@pytest.mark.parametrize("name", PREPARE)
def test_prepare(name: str) -> None:
    given, words = PREPARE[name]
    model, optimizer = made()
    with pytest.raises(UsageError, match=words):
        forebay.prepare(model, optimizer, BATCH, device_memory="1MiB", device="cpu", **given)
    forebay.close(forebay.prepare(model, optimizer, BATCH, device_memory="1MiB", device="cpu")[0])


PROFILE: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": None}, r"model is a torch\.nn\.Module; got None"),
    "optimizer": ({"optimizer": 3}, "optimizer is the name of one.*; got 3"),
    "device": ({"device": "tpu"}, "recorded for device cpu or cuda, got 'tpu'"),
    "no-device": ({"device": None}, "recorded for device cpu or cuda, got 'None'"),
    "loss_fn": ({"loss_fn": 3}, "loss_fn is a function, .* got 3"),
}


@pytest.mark.parametrize("name", PROFILE)
def test_profile(name: str) -> None:
    given, words = PROFILE[name]
    with pytest.raises(UsageError, match=words):
        forebay.profile(**{"model": made()[0], "batch": BATCH, **given})


OTHERS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "close": (lambda m, o: forebay.close(None), r"model is a torch\.nn\.Module; got None"),
    "report": (lambda m, o: forebay.report((m, o)), r"model is a torch\.nn\.Module; got tuple"),
    "parameters": (lambda m, o: forebay.parameters(m.parameters()), r"model is a torch\.nn\.Module; got generator"),
    "tile": (lambda m, o: forebay.tile(None, "1MiB"), r"model is a torch\.nn\.Module; got None"),
    "seed": (lambda m, o: forebay.initialize(m, seed="a"), "seed is an integer of 64 bits; got 'a'"),
    "seeds": (
        lambda m, o: forebay.initialize(m, seed=2**64),
        "seed is an integer of 64 bits; got 18446744073709551616",
    ),
    "load": (lambda m, o: forebay.load(m, None), "folder is the path of a folder with safetensors; got None"),
    "export": (lambda m, o: forebay.export(m, 3), "folder is the path of a new folder; got 3"),
    "save": (
        lambda m, o: forebay.save(m, o, None, step=1),
        "folder is the path of the folder of a checkpoint; got None",
    ),
    "background": (
        lambda m, o: forebay.save(m, o, "checkpoint", step=1, background=torch.zeros(2)),
        "background is True, or False to wait until the checkpoint stands; got Tensor",
    ),
    "resume": (lambda m, o: forebay.resume(m, o, None), "folder is the path of the folder of a checkpoint; got None"),
    "batch": (lambda m, o: forebay.accumulate(m, {"x": BATCH}, sum), r"list of batches.* give \[batch\]"),
    "batches": (lambda m, o: forebay.accumulate(m, 2, sum), "micro_batches is a list of batches.*; got 2"),
    "loss": (lambda m, o: forebay.accumulate(m, [BATCH] * 2, None), "loss_fn is a function.*; got None"),
    "several": (
        lambda m, o: forebay.prepare_several(m, device_memory="1MiB", device="cpu"),
        "models is a list, .*got Seq",
    ),
    "loops": (lambda m, o: forebay.alternate([m], [3]), "each of loops is a function without arguments .*; got 3"),
    "alternate": (lambda m, o: forebay.alternate(m, [print]), "models is a list of models .*; got Sequential"),
    "reports": (lambda m, o: forebay.report_several(m), "models is a list of models .*; got Sequential"),
    "text": (lambda m, o: forebay.Plan.from_json(Path("plan.json")), "a Plan is read from its JSON text, got Posix"),
    "trace-text": (
        lambda m, o: forebay.Plan.from_json(forebay.profile(made()[0], BATCH).to_json()),
        "this is no Plan in JSON but something else, with the keys model, optimizer, state_names",
    ),
    "machine-text": (
        lambda m, o: forebay.Machine.from_json(None),
        "a Machine is read from its JSON text, got NoneType",
    ),
    "budget": (lambda m, o: forebay.Budget("24GiB"), r"in bytes, got '24GiB' for device; Budget\.of\('24GiB'\) reads"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, prepared: Prepared) -> None:
    call, words = OTHERS[name]
    with pytest.raises(ForebayError, match=words):
        call(*prepared)


@pytest.mark.parametrize("which", ["optimizer", "scheduler"])
def test_what_is_saved_beside_the_model(which: str, prepared: Prepared, tmp_path: Path) -> None:
    model, optimizer = prepared
    given: dict[str, Any] = {"optimizer": optimizer, "scheduler": None, which: 3}
    with pytest.raises(UsageError, match=f"{which} is .*; got int"):
        forebay.save(model, folder=tmp_path, step=1, **given)


def test_records() -> None:
    trace, machine = forebay.profile(made()[0], BATCH), this_machine("cpu")[0]
    budget = forebay.Budget.of("1MiB")
    plan = forebay.plan(trace, machine, budget)
    for function, name, given in (
        (forebay.plan, "trace", (plan, machine, budget)),
        (forebay.plan, "machine", (trace, None, budget)),
        (forebay.plan, "budget", (trace, machine, "24GiB")),
        (forebay.simulate, "plan", (trace, machine, budget)),
        (forebay.check, "machine", (trace, plan, plan)),
    ):
        with pytest.raises(UsageError, match=rf"{name} is a forebay\.{name.title()}: .* makes one.*; got"):
            function(*given)  # type: ignore[operator]
    with pytest.raises(UsageError, match=r"crash_safe is True or False here: .*; got '/disk'"):
        forebay.plan(trace, machine, budget, crash_safe="/disk")  # type: ignore[arg-type]
    for simulated in (forebay.simulate, forebay.check):
        with pytest.raises(UsageError, match="needs 1 step and 1 micro-batch at least, got None and two"):
            simulated(trace, machine, plan, micro_batches="two")  # type: ignore[operator]


INFERENCE: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "prepare": lambda m, o: forebay.prepare(m, o, BATCH, device_memory="1MiB", device="cpu"),
    "prepare_several": lambda m, o: forebay.prepare_several([(m, o, BATCH)], device_memory="1MiB", device="cpu"),
    "profile": lambda m, o: forebay.profile(m, BATCH, o),
}


@pytest.mark.parametrize("name", INFERENCE)
def test_nothing_is_prepared_in_inference_mode(name: str) -> None:
    model, optimizer = made()
    with torch.inference_mode(), pytest.raises(UsageError, match=rf"{name} is called under torch\.inference_mode\(\)"):
        INFERENCE[name](model, optimizer)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    with torch.inference_mode():
        model, optimizer = made()
    with pytest.raises(UsageError, match=r"parameter 0\.weight was made under torch\.inference_mode\(\)"):
        forebay.prepare(model, optimizer, BATCH, device_memory="1MiB", device="cpu")


def test_closed_in_inference_mode(prepared: Prepared) -> None:
    """Refused: torch keeps of the dispatch modes that were on when that mode began that they are, and ended in it one
    leaves a process in which no tensor is made."""
    model, optimizer = prepared
    with torch.inference_mode():
        model(BATCH)
        with pytest.raises(UsageError, match=r"close is called under torch\.inference_mode\(\)"):
            forebay.close(model)
    model(BATCH).sum().backward()
    optimizer.step()


def test_first_seen_in_inference_mode() -> None:
    """What is imported by a call that is refused there serves the next one."""
    script = """
import torch, forebay
with torch.inference_mode():
    try:
        forebay.close(torch.nn.Linear(4, 4))
        forebay.accumulate
    except forebay.ForebayError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
