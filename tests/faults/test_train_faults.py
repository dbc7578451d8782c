"""What befalls ``forebay train`` on the way: numbers that are none, a device that is too small, saves that fail."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path
from typing import Any, final

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from forebay import api
from forebay.checkpoint.generations import MANIFEST
from forebay.cli.loop import PATIENCE
from forebay.cli.runfolder import SNAPSHOT, RunFolder
from forebay.cli.train import TrainResult, train
from forebay.config import TrainConfig
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.errors import DeviceOutOfMemory, ForebayError, NotFinite, StorageError
from forebay.reporting.losses import LOSSES
from forebay.snapshot import read_snapshot
from forebay.tiers.io import SystemIo
from forebay.tiers.lock import LOCK
from forebay.timeline import Lane
from forebay.units import KiB, MiB
from tests.faults.faulty import fill_disk
from tests.faults.train_rig import (
    MODEL,
    STEPS,
    Hungry,
    Spoil,
    Spoilt,
    Telling,
    go,
    no_number,
    settings,
    text,
    weights,
)

__all__ = ["text"]


class _Overflow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return gradient * math.inf


def overflow(*forwards: int) -> Spoil:
    """The loss of these forwards is as it should be, and their gradients are not."""

    def spoil(number: int, output: Any) -> None:
        if number in forwards:
            output.last_hidden_state = _Overflow.apply(output.last_hidden_state)

    return spoil


# Numbers that are none


def test_a_run_that_stops_at_a_nan_goes_on_without_the_step(text: Path, tmp_path: Path) -> None:
    whole = go(settings(text, tmp_path / "whole", nonfinite="skip"), no_number(4))
    view = Telling()
    with pytest.raises(NotFinite, match="the loss is nan at step 4, so training was stopped before the update"):
        go(settings(text, tmp_path / "run"), no_number(4), view)
    assert view.said("step 3 is saved") and view.said("to skip step 4: forebay train --run ")
    config = settings(text, tmp_path / "run", nonfinite="skip")
    rest = go(config, no_number(1), view, resume=True)
    assert view.said("goes on behind step 3") and view.said("step 4 is skipped: the loss is nan; 1 so far")
    assert (rest.skipped, whole.skipped) == (1, 1)
    assert math.isnan(rest.losses[3]) and rest.to_json_dict()["loss"][3] is None
    # Dropout drew for the step that was tried twice what it drew when it was tried once.
    assert [loss for loss in rest.losses if loss == loss] == [loss for loss in whole.losses if loss == loss]
    lines = [json.loads(line) for line in (tmp_path / "run" / "losses.jsonl").read_text().splitlines()]
    assert lines[3]["loss"] is None and [line.get("skipped") for line in lines].count(True) == 1
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize(
    "more",
    [
        {"policy": "stream"},
        {"policy": "stream", "accumulate": 2, "clip_norm": 0.5},
        pytest.param({"policy": "zero-offload-delayed", "save_every": 1}, marks=pytest.mark.slow),
    ],
    ids=["stream", "together", "delayed"],
)
def test_skipped_steps_leave_no_trace(text: Path, tmp_path: Path, more: dict[str, Any]) -> None:
    many = int(more.get("accumulate", 1))
    found = go(settings(text, tmp_path / "run", nonfinite="skip", **more), overflow(2 * many, 4 * many))
    assert found.skipped == 2 and all(map(math.isfinite, found.losses))
    assert all(bool(value.isfinite().all()) for value in weights(tmp_path / "run").values())
    expected = plain_losses(text, settings(text, None, **more), {2, 4})
    if more["policy"] != "zero-offload-delayed":  # changes the numbers
        assert list(found.losses) == expected


def plain_losses(text: Path, config: TrainConfig, skipped: set[int]) -> list[float]:
    """The same steps in a loop of plain PyTorch that takes no step at those that are ``skipped``."""
    from forebay.cli.loop import make_scheduler, warmup_of
    from forebay.data.text import Windows, tokenize
    from forebay.data.tokenizers import find_tokenizer
    from forebay.recipes.sources import build, find

    model = build(find(config.model), config.dtype)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    model, optimizer = api.prepare(model, optimizer, device_memory="16MiB", policy="resident", device="cpu")
    api.initialize(model, config.seed)
    values = dict(api.parameters(model).items())
    api.close(model)
    for name, parameter in model.named_parameters():
        parameter.data = values[name]
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    scheduler = make_scheduler(optimizer, warmup_of(config.steps))
    windows = Windows(tokenize(config.data, find_tokenizer(None)), batch=config.batch, seq=config.seq, seed=config.seed)
    torch.manual_seed(config.seed)
    losses = []
    for step in range(config.steps):
        total = 0.0
        for number in range(config.accumulate * step, config.accumulate * (step + 1)):
            loss = model(**windows.batch(number)).loss / config.accumulate
            loss.backward()
            total += loss.item()
        if config.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        if step + 1 not in skipped:
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def test_gradients_that_overflow_never_reach_a_checkpoint(text: Path, tmp_path: Path) -> None:
    view = Telling()
    with pytest.raises(NotFinite, match=r"the norm of the gradients is (inf|nan) at step 4"):
        go(settings(text, tmp_path / "run", save_every=2), overflow(4), view)
    assert view.said("step 3 is saved")
    # Where nobody looks at gradients it shows in the next loss; the parameters are spoilt by then and not saved.
    view = Telling()
    with pytest.raises(NotFinite, match="the loss is nan at step 4"):
        go(settings(text, tmp_path / "other", save_every=2), overflow(3), view)
    assert view.said("step 3 is not saved: parameter ") and view.said("the checkpoint of step 2 stands")
    rest = go(settings(text, tmp_path / "other"), no_number(), resume=True)
    assert len(rest.losses) == STEPS and all(map(math.isfinite, rest.losses))


def test_skipping_without_end_stops(text: Path, tmp_path: Path) -> None:
    config = settings(text, tmp_path / "run", steps=40, nonfinite="skip")
    with pytest.raises(NotFinite, match=f"the loss is nan at step {PATIENCE + 2}, the {PATIENCE}th in a row"):
        go(config, no_number(*range(3, 41)))


def test_updates_in_backward_are_not_taken_back(text: Path, tmp_path: Path) -> None:
    view = Telling()
    with pytest.raises(NotFinite, match="with blocks that backward has updated for it"):
        go(settings(text, tmp_path / "run", policy="auto", update="backward", device_memory="2MiB"), no_number(3), view)
    assert not (tmp_path / "run" / "checkpoint" / MANIFEST).exists()


# A device that is too small


# The ledger of the cpu rests from the third step on (``runtime/vigil.py``).
TIGHT = {"policy": "auto", "device_memory": "3MiB", "batch": 8}
# More than may leave the device while it is asked for: gradients of the last norm and the head (64.25 KiB).
OVER = 128 * KiB


@pytest.fixture
def whole(text: Path, tmp_path: Path) -> TrainResult:
    return go(settings(text, tmp_path / "whole", **TIGHT), no_number())


@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.slow), False], ids=["first", "second"])
def test_a_plan_that_falls_short_is_made_again(text: Path, tmp_path: Path, whole: TrainResult, first: bool) -> None:
    view, spoilt = Telling(), Spoilt(Hungry(OVER, *(range(1, 99) if first else range(2, 99))))
    engine: Any = spoilt
    found = train(settings(text, tmp_path / "run", **TIGHT), engine, view)
    again = [note for note in view.notes if "is taken again under a plan that leaves" in note]
    assert len(again) == 1 and again[0].startswith("device memory: ")
    assert view.said("the run begins anew" if first else "goes on behind step 1")
    assert found.losses == whole.losses
    one, two = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(one[name], two[name]) for name in one)
    plans = [options["plan"] for options in spoilt.prepared]
    assert plans[-1].device < plans[0].device
    assert spoilt.prepared[-1]["device_memory"] == spoilt.prepared[0]["device_memory"]
    # What the device held when it ran out is kept, and can be looked at.
    kept = tmp_path / "run" / SNAPSHOT
    assert view.said(f"what the device held: forebay fragmentation {kept}")
    held = read_snapshot(kept)
    assert plans[0].device * 0.5 < held.live[-1] <= 3 * MiB and "it ran out when" in held.notes[-1]


def test_the_plan_that_is_made_again_is_one_for_tiles(text: Path, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text(json.dumps(MODEL | {"hidden_size": 128}))
    tiled = {**TIGHT, "device_memory": "5MiB", "steps": 2, "tile": "64KiB"}
    whole, view = go(settings(text, None, **tiled), no_number()), Telling()
    found = go(settings(text, tmp_path / "run", **tiled), Hungry(OVER, *range(2, 99)), view)
    assert view.said("in tiles: lm_head") or view.said("in tiles: model.embed_tokens")
    assert view.said("is taken again under a plan that leaves") and found.losses == whole.losses


@pytest.mark.slow
def test_nothing_is_lost_where_no_plan_will_do(text: Path, tmp_path: Path, whole: TrainResult) -> None:
    view = Telling()
    with pytest.raises(ForebayError, match="device memory"):
        go(settings(text, tmp_path / "run", **TIGHT), Hungry(8 * MiB, 2), view)
    assert view.said("step 1 is saved")
    rest = go(settings(text, tmp_path / "run", **TIGHT), no_number(), resume=True)
    assert rest.losses == whole.losses


def test_without_a_folder_a_run_under_way_is_not_begun_anew(text: Path) -> None:
    with pytest.raises(DeviceOutOfMemory, match="or raise device_memory"):
        go(settings(text, None, **TIGHT), Hungry(OVER, 2))


# A disk that is full, and saves that fail


def on_disk(text: Path, run: Path, **more: object) -> TrainConfig:
    """A run with its states on disk, in a folder on the disk of what it saves."""
    disk = text.parent / "disk"
    disk.mkdir(exist_ok=True)
    return settings(text, run, **{"policy": "zero-infinity", "disk": f"{disk}:64MiB", "save_every": 1, **more})


def test_a_disk_without_room_for_two_places_has_one(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}
    (tmp_path / "model.json").write_text(json.dumps(MODEL | large))
    roomy: Any = Spoilt(no_number())
    train(on_disk(text, tmp_path / "roomy", steps=1, host_memory="13MiB"), roomy, Telling())
    (first,) = roomy.prepared
    assert first["crash_safe"] is not None and first["plan"].disk > 0
    free = first["plan"].disk - 1
    monkeypatch.setattr(SystemIo, "free_bytes", lambda io, path: free)
    view, narrow = Telling(), Spoilt(no_number())
    engine: Any = narrow
    train(on_disk(text, tmp_path / "narrow", steps=1, host_memory="13MiB"), engine, view)
    assert [options["crash_safe"] for options in narrow.prepared] == [None]
    assert view.said("saves copy what is on disk, which has no room for two places: the disk tier needs ")
    assert view.said("step 1 is saved")


def test_states_that_are_updated_where_they_lie_are_copied(text: Path, tmp_path: Path) -> None:
    view = Telling()
    go(on_disk(text, tmp_path / "run", steps=1, policy="smart-infinity"), no_number(), view)
    assert "saves copy what is on disk: smart-infinity updates states where they lie" in view.notes


@final
class Losing:
    """forebay's interface, on a device whose checkpoints are on their way for a while; the folder of the one of
    ``step`` is removed meanwhile."""

    class _Slow(Delays):
        def seconds(self, lane: Lane, what: str) -> float:
            return 0.02 if what == "checkpoint" else 0.0

    def __init__(self, step: int, spoil: Spoil) -> None:
        self._step = step
        self._spoilt = Spoilt(spoil)
        self.device = CpuDevice(16 * MiB, delays=self._Slow())

    def __getattr__(self, name: str) -> Any:
        return getattr(api, name)

    def prepare(self, model: nn.Module, *arguments: Any, **options: Any) -> Any:
        return self._spoilt.prepare(model, *arguments, **{**options, "device": self.device})

    def save(self, model: nn.Module, optimizer: Any, folder: Path, **options: Any) -> int:
        nbytes = api.save(model, optimizer, folder, **options)
        if options["step"] == self._step and options["background"]:
            shutil.rmtree(folder / f"generation-{self._step:08d}")
        return nbytes


def test_a_save_that_failed_in_the_background_is_made_again(text: Path, tmp_path: Path) -> None:
    whole = go(settings(text, None), no_number())
    losing, view = Losing(3, no_number(4)), Telling()
    engine: Any = losing
    with pytest.raises(NotFinite, match="the loss is nan at step 4"):
        train(settings(text, tmp_path / "run", save_every=1), engine, view)
    losing.device.close()
    assert view.said("step 3 is being saved") and view.said("step 3 was not saved in the background: ")
    assert view.said("step 3 is saved: ")
    rest = go(settings(text, tmp_path / "run"), no_number(), view, resume=True)
    assert view.said("goes on behind step 3") and rest.losses == whole.losses


# A folder without room


def test_a_loss_that_finds_no_room_is_one_error(text: Path, tmp_path: Path) -> None:
    def full(number: int, output: Any) -> None:
        if number == 3:
            fill_disk(LOSSES)

    with pytest.raises(StorageError, match=r"^cannot write the losses to .*run/losses.jsonl: No space left on device$"):
        go(settings(text, tmp_path / "run", save_every=2), full)
    rest = go(settings(text, tmp_path / "run"), no_number(), view := Telling(), resume=True)
    assert view.said("goes on behind step 2")
    assert rest.losses == go(settings(text, None), no_number()).losses


def test_a_file_that_finds_no_room_leaves_no_part_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunFolder(tmp_path / "run", resume=False) as folder, monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=f"cannot write {SNAPSHOT}: No space left on device"):
            folder.keep_snapshot({})
    assert os.listdir(tmp_path / "run") == [LOCK]
