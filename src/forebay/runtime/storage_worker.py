"""The process beside the storage: reads the states of a chunk from disk, updates it, writes the states back.

It is started by ``storage_side`` with one end of a channel, and what it has to know on its standard input; it ends when
the other end is closed, or when the process that started it is no more. Gradients and parameters are in a cell in
shared memory, behind a part for the states of the same elements (``layout.Cell``). That part is left alone, so that it
takes no memory: shared memory has no huge pages, without which the disk is slower (``tiers.pages``). States pass
through memory of this process in its place. The update is that of any cell, by the same code as on the host, bit for
bit. Where only the largest elements of gradients come, the gradients are made of them first, as on a drive that expands
what it is sent (``sparse``).
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Final, final

import torch

from forebay.cells import cell_of
from forebay.kernels.team import Team, cores
from forebay.layout import StateLayout, state_layout
from forebay.optim.choosing import host_arithmetic
from forebay.runtime.applying import update_cell
from forebay.runtime.sparse import gather_sent
from forebay.runtime.storage_orders import Answer, Done, Failed, Order, Setup
from forebay.states import Masters
from forebay.tiers.diskfile import Meter
from forebay.tiers.handed import taken_over
from forebay.tiers.pages import map_pages
from forebay.tiers.shared import mapped

__all__ = ["serve"]

LOOK: Final = 1.0
"""Seconds after which it is asked whether the session is still there: a child of the session may hold its end of the
channel open."""


@final
class _Updating:
    """What is needed for any order."""

    def __init__(self, setup: Setup) -> None:
        self._names = setup.rule.state_names
        self._density = setup.density
        self._layouts: dict[str, tuple[StateLayout, int]] = {
            # A plan whose parameters are the upper halves of masters has no updates here (``Plan``).
            block.name: (state_layout(block, setup.rule.state_names, setup.update_chunk, Masters.WHOLE), start)
            for block, start in setup.blocks
        }
        with ExitStack() as opened:
            self._meter = Meter()
            self._file = opened.enter_context(taken_over(setup.file, self._meter))
            team = Team(cores())
            opened.callback(team.close)
            self._memory = mapped(setup.memory, setup.nbytes)
            os.close(setup.memory)
            widening = self._memory[setup.nbytes - setup.widening :] if setup.widening else None
            self._arithmetic = host_arithmetic(setup.rule, team, widening)
            # No more than the parts for states of all cells, which are counted, and of which there is one or more.
            largest = max(chunk.nbytes for layout, _ in self._layouts.values() for chunk in layout.chunks)
            self._states = torch.frombuffer(map_pages(largest), dtype=torch.uint8)
            self._opened = opened.pop_all()

    def answer(self, order: Order) -> Answer:
        """Does what ``order`` says."""
        try:
            with torch.no_grad():
                return Done(self._update(order))
        except Exception as error:  # told to whoever waits for it, whatever it is
            return Failed(f"{type(error).__name__}: {error}")

    def _update(self, order: Order) -> int:
        layout, start = self._layouts[order.block]
        chunk, before = layout.chunks[order.chunk], self._meter.nbytes
        buffer = self._memory[order.start :]
        states = self._states[: chunk.nbytes]
        self._file.read(start + chunk.offset, states)
        if self._density is not None:
            gather_sent(chunk, cell_of(chunk, self._density), buffer, order.tasks.keys())
        update_cell(layout, self._names, chunk, order.tasks, states, buffer, self._arithmetic)
        self._file.write(start + chunk.offset, states)
        return self._meter.nbytes - before

    def __enter__(self) -> _Updating:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()


def serve(channel: int) -> None:
    """Answers until nobody asks any more. ``channel`` is the descriptor of this end of the channel."""
    # Whoever stops the session stops this with it, in its own time: an interrupt is none of its business.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # The session may end at any moment: then there is nobody to tell.
    with Connection(channel) as connection, suppress(EOFError, ConnectionError):
        setup: Setup = pickle.load(sys.stdin.buffer)
        with _Updating(setup) as updating:
            connection.send(Done(0))
            while _asked(connection, setup.session):
                connection.send(updating.answer(connection.recv()))


def _asked(connection: Connection, session: int) -> bool:
    """Waits for an order; False when there will be none."""
    while not connection.poll(LOOK):
        if os.getppid() != session:
            return False
    return True
