"""Ctrl-C while somebody waits for a checkpoint made in the background: it goes on, and nobody writes over it. At the
end of the program too."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import pytest

import forebay
from forebay.checkpoint.ending import Ending
from forebay.device.base import Completion
from forebay.device.completions import LaneCompletion, dependency_failure
from tests.faults.crashing import Counted
from tests.faults.programs import ENVIRONMENT
from tests.faults.test_checkpoint_in_place import Reader, Trained, operations, reader, trained
from tests.parity.content import expect_same

__all__ = ["reader", "trained"]


@final
class Interrupted(LaneCompletion):
    """A job of which the first wait is interrupted, as Ctrl-C does it, whichever wait that is."""

    def __init__(self, job: Completion) -> None:
        self._job = job
        self._interrupts = [KeyboardInterrupt()]

    def wait(self) -> Any:
        self._interrupt()
        return self._job.wait()

    def failure(self) -> BaseException | None:
        self._interrupt()
        return dependency_failure(self._job)

    def done(self) -> bool:
        return self._job.done()

    def _interrupt(self) -> None:
        if self._interrupts:
            raise self._interrupts.pop()


def save_late(trained: Trained) -> None:
    """Saves step 2 in the background; the checkpoint stands after a while, and the first wait for it is interrupted."""

    def late(counted: Counted, operation: str) -> None:
        time.sleep(0.1)

    trained.save(0)
    renamed = operations(trained).index("replace")
    trained.step()
    trained.save(2, Counted(renamed, late), background=True)
    ending = trained.session.saving
    assert isinstance(ending, Ending) and ending.coming is not None
    ending.coming = Interrupted(ending.coming)


def test_a_step_that_is_interrupted_while_it_waits_for_a_checkpoint_leaves_it_alone(
    reader: Reader, trained: Trained
) -> None:
    trained.step()
    save_late(trained)
    content = trained.content()
    with pytest.raises(KeyboardInterrupt):
        trained.step()
    trained.optimizer.zero_grad()
    trained.step()
    trained.step()
    forebay.synchronize(trained.model)
    reader.expect(trained.kept, 2, content)


@pytest.mark.parametrize(
    "wait",
    [
        lambda trained: trained.save(3, background=True),
        lambda trained: forebay.synchronize(trained.model),
        lambda trained: forebay.resume(trained.model, trained.optimizer, trained.kept),
    ],
    ids=["save", "synchronize", "resume"],
)
def test_a_wait_for_a_checkpoint_that_is_interrupted_is_waited_again(
    reader: Reader, trained: Trained, wait: Callable[[Trained], object]
) -> None:
    trained.step()
    save_late(trained)
    content = trained.content()
    with pytest.raises(KeyboardInterrupt):
        wait(trained)
    # It is on its way still: neither its number nor its folder is the next one's.
    trained.save(3, background=True)
    forebay.synchronize(trained.model)
    reader.expect(trained.kept, 3, content)


@pytest.mark.parametrize("queued", [False, True])
def test_a_save_that_is_interrupted_as_it_asks_for_its_end(
    reader: Reader, trained: Trained, monkeypatch: pytest.MonkeyPatch, queued: bool
) -> None:
    trained.step()
    trained.save(0)
    before = trained.content()
    trained.step()
    after = trained.content()
    device = trained.session.device
    submit = device.submit

    def interrupted(*arguments: Any, **options: Any) -> Completion:
        if options["what"] == "checkpoint":
            if queued:
                submit(*arguments, **options)
            raise KeyboardInterrupt
        return submit(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(device, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trained.save(1, background=True)
    # Whichever of the two stands, nobody writes over it, and it does not change any more.
    trained.step()
    trained.step()
    stands, content = reader.found(trained.kept)
    assert stands == 0 or queued
    expect_same((before, after)[stands], content)
    trained.save(2, background=True)
    forebay.synchronize(trained.model)
    reader.expect(trained.kept, 2, trained.content())


ENDING = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
import forebay
from forebay.calls import Calls
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.timeline import Lane
from forebay.units import MiB
from tests.faults.trained import AMPLE, adamw, disk_plan, network, step

class LateWrites(Delays):
    delay = 0.0

    def seconds(self, lane, what):
        return self.delay if lane is Lane.DISK_WRITE else 0.0


torch.set_num_threads(1)
programs = []
for depth in (1, 2):
    folder = Path(sys.argv[1], str(depth))
    (folder / "disk").mkdir(parents=True)
    plan = disk_plan(folder / "disk", disk_copies=2)
    plan = replace(plan, streaming=replace(plan.streaming, disk_writes=Calls(4096, depth)))
    model, delays = network(), LateWrites()
    model, optimizer = forebay.prepare(
        model,
        adamw(model),
        plan=plan,
        disk=f"{folder / 'disk'}:64MiB",
        crash_safe=folder / "kept",
        device_memory=AMPLE,
        device=CpuDevice(8 * MiB, delays=delays),
    )
    delays.delay = 0.05
    step(model, optimizer)
    forebay.save(model, optimizer, folder / "kept", step=1, background=True)
    assert not (folder / "kept" / "manifest.json").exists()
    programs.append((model, optimizer))
"""
"""Two programs in one, whose last line is a save in the background; of one, several calls of a write are in flight."""


def test_a_program_that_ends_behind_a_save_has_it_all_the_same(
    reader: Reader, trained: Trained, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=ENVIRONMENT,
    )
    assert (done.returncode, done.stderr) == (0, "")
    trained.step()
    content = trained.content()
    for depth in (1, 2):
        reader.expect(tmp_path / str(depth) / "kept", 1, content)
