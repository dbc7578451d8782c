"""The session's half of updates beside the storage: states stay on disk, and a process of its own updates them there.

Gradients, and parameters that have no fp32 master, are copied to a cell of shared memory on the way to the disk
(``Lane.DISK_WRITE``); one job a chunk has the process read, update and write the states (``Lane.STORAGE_UPDATE``);
parameters come home on the way back (``Lane.DISK_READ``). The process has the file of states to itself while updates
are queued: whoever else reads or writes states has waited for them (``homes.StorageHome``).

The process ends with the session: its end of the channel is closed by ``close`` or by the kernel. It has no name on
disk, no thread here, and memory without a name: nothing is left of it. Where it dies first, the job that waits for it
fails, and all after it; the states on disk are then those of no step, as after any failed update.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Final, final

import torch

from forebay.cells import Cell
from forebay.device.base import Completion, Device
from forebay.errors import ConfigError, StorageError
from forebay.model import Block
from forebay.optim.rules import UpdateRule
from forebay.runtime.applying import Task
from forebay.runtime.cells import Cells, Load, StorageWay
from forebay.runtime.storage_orders import Done, Failed, Order, Setup
from forebay.tiers.handed import HandedFile
from forebay.tiers.shared import SharedArena

__all__ = ["StoragePolicy", "StorageSide", "StorageWorker", "Territory"]

LAST_WORDS: Final = 2000
"""Characters of what the process has said on its standard error that an error repeats."""

LOOKS: Final = 8
"""How often an answer is looked for before the process is given up."""


@dataclass(frozen=True)
class StoragePolicy:
    """``patience`` are the seconds without an answer after which the process is given up, and ended: it hangs, or the
    disk does, or somebody has stopped it. The longest answers are the first, which loads torch, and that of a chunk
    whose states a slow disk reads and writes. ``grace`` are the seconds that it has to end by itself."""

    patience: float = 120.0
    grace: float = 10.0

    def __post_init__(self) -> None:
        for name, seconds in (("patience", self.patience), ("grace", self.grace)):
            if not seconds > 0:
                raise ConfigError(f"{name} must be more than 0 seconds, got {seconds}")


@final
class Territory:
    """What is updated beside the storage: ``blocks``, each with the offset of its states in ``file``, in chunks of
    ``update_chunk`` elements, through ``memory`` with cells of ``cell`` bytes and ``widening`` bytes at its end.
    ``density`` is the share of the elements of gradients that go there (None: they go as they are)."""

    def __init__(
        self,
        blocks: tuple[tuple[Block, int], ...],
        file: HandedFile,
        update_chunk: int,
        memory: SharedArena,
        cell: int,
        widening: int,
        density: float | None,
    ) -> None:
        self.blocks = blocks
        self.file = file
        self.update_chunk = update_chunk
        self.memory = memory
        self.cell = cell
        self.widening = widening
        self.density = density


@final
class StorageWorker:
    """The process, and the channel to it. ``written`` are the bytes that it has written to disk. Used from one thread
    at a time. Raises ``StorageError`` where it cannot be started."""

    def __init__(self, rule: UpdateRule, of: Territory, policy: StoragePolicy | None = None) -> None:
        self.written = 0
        self._policy = policy or StoragePolicy()
        self._lock = threading.Lock()
        self._ready = False
        self._broken: str | None = None
        with ExitStack() as opened:
            try:
                # Its last words; a pipe would fill up with nobody to read it.
                self._said = opened.enter_context(tempfile.TemporaryFile())
                self._channel, theirs = Pipe()
                opened.enter_context(self._channel)
                # Behind this the other end is the process's alone: where it dies, this end hears of it.
                with theirs:
                    self._process = self._started(rule, of, theirs)
            except OSError as error:
                raise StorageError(
                    f"the process beside the storage cannot be started ({sys.executable}: {error}); choose another "
                    f"policy, or set the update of the plan's placements to step"
                ) from error
            opened.pop_all()

    def _started(self, rule: UpdateRule, of: Territory, theirs: Connection[Any, Any]) -> subprocess.Popen[bytes]:
        given = (theirs.fileno(), of.memory.descriptor, *of.file.descriptors)
        memory = of.memory.descriptor, of.memory.nbytes, of.widening
        setup = Setup(rule, of.update_chunk, of.density, of.blocks, of.file, *memory, os.getpid())
        # A file and not the channel: that holds so much, and nobody reads it before the process is there.
        with tempfile.TemporaryFile() as told:
            pickle.dump(setup, told)
            told.seek(0)
            return subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, repr(sys.path), str(theirs.fileno())],
                stdin=told,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                pass_fds=given,
                # Ctrl-C in a terminal goes to all processes of a group: this one ends when the session has.
                start_new_session=True,
            )

    @property
    def process_id(self) -> int:
        """Of the process."""
        return self._process.pid

    def update(self, order: Order) -> None:
        """Has a chunk updated; blocks until it is. Raises ``StorageError`` for what went wrong there, for a process
        that is dead or does not answer, and from then on."""
        with self._lock:
            if not self._ready:
                self._answer("to be started")
                self._ready = True
            asked = f"to update block {order.block}"
            self._tell(order, asked)
            self.written += self._answer(asked).written

    def close(self) -> None:
        """Ends the process and waits until it has ended. The caller has waited for all jobs; a second call does
        nothing."""
        self._channel.close()
        try:
            self._process.wait(self._policy.grace)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _tell(self, what: Order, asked: str) -> None:
        self._expect_whole()
        try:
            self._channel.send(what)
        except OSError as error:
            raise self._died(asked) from error

    def _answer(self, asked: str) -> Done:
        self._expect_whole()
        try:
            # At once when there is an answer, or when there will be none: the kernel closes the ends of who has died.
            if not self._answers():
                raise self._given_up(asked)
            answer: Done | Failed = self._channel.recv()
        except (EOFError, OSError) as error:
            raise self._died(asked) from error
        if isinstance(answer, Failed):
            raise self._fail(f"failed, asked {asked}: {answer.why}")
        return answer

    def _answers(self) -> bool:
        """Whether there is an answer, or will be none, before patience ends. A container that is paused, or a machine
        that sleeps, stops both processes: the time of that is one look's, and the process has the others."""
        return any(self._channel.poll(self._policy.patience / LOOKS) for _ in range(LOOKS))

    def _given_up(self, asked: str) -> StorageError:
        stopped = _is_stopped(self._process.pid)
        # It may go on at any time, and write states that nobody expects any more.
        self._process.kill()
        why = "a signal has stopped it (SIGSTOP)" if stopped else "check the disk"
        return self._fail(f"has not answered for {self._policy.patience:.4g} seconds, asked {asked}; {why}")

    def _expect_whole(self) -> None:
        if self._broken is not None:
            raise StorageError(self._broken)

    def _died(self, asked: str) -> StorageError:
        try:
            code = self._process.wait(self._policy.grace)
        except subprocess.TimeoutExpired:
            return self._fail(f"has closed its channel, asked {asked}")
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with exit code {code}"
        self._said.seek(0)
        words = self._said.read().decode(errors="replace").strip()[-LAST_WORDS:]
        return self._fail(f"{how}, asked {asked}" + (f"; its last words: {words}" if words else ""))

    def _fail(self, what: str) -> StorageError:
        self._broken = (
            f"the process beside the storage ({self._process.pid}) {what}. The states on disk are no longer those of a "
            f"whole step: prepare the model again and resume from what was saved"
        )
        return StorageError(self._broken)


def _is_stopped(process: int) -> bool:
    """Whether a signal has stopped it; False where the system does not say."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False


_PROGRAM: Final = (
    "import sys; sys.path[:] = __import__('ast').literal_eval(sys.argv[1]); "
    "from forebay.runtime.storage_worker import serve; serve(int(sys.argv[2]))"
)
"""Not this program's own main module, which may train when it is run: nothing of it is looked at."""


@final
class StorageSide:
    """Updates of blocks whose states stay on disk: the cells through which they pass, and who updates them there."""

    def __init__(self, device: Device, rule: UpdateRule, of: Territory) -> None:
        self._memory = of.memory.memory
        self._start = self._memory.data_ptr()
        self._cells = Cells(StorageWay(device, of.density), self._memory, of.cell, of.widening)
        self.worker = StorageWorker(rule, of)

    def update(self, load: Load, number: int, tasks: Mapping[str, Task], touched: int) -> tuple[Completion, Completion]:
        """Queues the update of ``load``, chunk ``number`` of its block; see ``Cells.update``."""
        return self._cells.update(load, partial(self._run, load.block, number, tasks), touched)

    def _run(self, block: str, number: int, tasks: Mapping[str, Task], cell: Cell, buffer: torch.Tensor) -> None:
        self.worker.update(Order(block, number, buffer.data_ptr() - self._start, tasks))

    def close(self) -> None:
        """Ends the process and lets go of the memory. The caller has waited for all jobs."""
        self._cells.close()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self.worker.close()
