"""Memory of activations that are on their way: what a copy still uses is nobody else's, and no more than there is room
for is made."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from forebay.device.base import Completion, NoWatch
from forebay.device.completions import DONE
from forebay.device.cpu import CpuDevice
from forebay.layout import MOVED_LEAST, PAGE
from forebay.plans import Streaming
from forebay.runtime.depots import DiskDepot, HostDepot
from forebay.runtime.stash import Stash
from forebay.tiers.diskfile import TierFile
from forebay.timeline import Lane
from forebay.treatments import Fate, Treatment
from tests.faults.test_offload_faults import LATE, coming_back, looking, offload, stash_over
from tests.parity.recomputing import AMPLE


class OnItsWay(Completion):
    """Of a copy that takes until somebody waits for it, or the test says that it is over."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target = weakref.ref(target)
        self.over = False

    def wait(self) -> None:
        self.over = True

    def done(self) -> bool:
        return self.over


class Card:
    """As a card: a copy to it holds nothing, and compute that waits for one leaves the host to go on. Nothing is copied
    here; ``after`` is what each was to wait for, by lane."""

    def __init__(self) -> None:
        self.copies: dict[Lane, list[OnItsWay]] = defaultdict(list)
        self.after: dict[Lane, list[Completion]] = {}

    def copy(
        self, lane: Lane, target: torch.Tensor, source: torch.Tensor, *, after: tuple[Completion, ...], **_: object
    ) -> OnItsWay:
        self.after[lane] = list(after)
        self.copies[lane].append(OnItsWay(target))
        return self.copies[lane][-1]

    def submit(self, lane: Lane, job: object, *, after: tuple[Completion, ...], **_: object) -> OnItsWay:
        self.after[lane] = list(after)
        self.copies[lane].append(OnItsWay(torch.empty(0)))
        return self.copies[lane][-1]

    def mark(self) -> Completion:
        return DONE

    def hold_compute(self, completion: Completion) -> None:
        """Compute waits, and the host does not."""


@pytest.mark.parametrize("demanded", [False, True])
def test_memory_that_a_copy_fills_is_no_other_ops(demanded: bool) -> None:
    """Who gets it next may run before the copy is over, unless compute is behind that."""
    card: Any = Card()
    stash = stash_over(torch.empty(MOVED_LEAST, dtype=torch.uint8), card, AMPLE, ahead=AMPLE)
    ticket = coming_back(stash, demanded=demanded)
    del ticket
    (copied,) = card.copies[Lane.H2D]
    assert (copied.target() is None) is demanded
    assert stash.taken == MOVED_LEAST  # the copy still reads there
    copied.over = True
    assert stash.taken == 0 and copied.target() is None


def test_what_nobody_wants_any_more_while_it_leaves_does_not_come_back() -> None:
    card: Any = Card()
    stash = stash_over(torch.empty(MOVED_LEAST, dtype=torch.uint8), card, AMPLE, ahead=AMPLE)
    assert offload(stash, torch.ones(MOVED_LEAST, dtype=torch.uint8), "a") is not None
    stash.end_forward()
    assert stash.taken == MOVED_LEAST
    stash.begin_backward()
    assert card.copies[Lane.D2H][0].over and not card.copies[Lane.H2D]
    assert stash.taken == 0


@pytest.mark.parametrize("fate", [Fate.OFFLOAD, Fate.DISK])
def test_copies_wait_for_compute_and_for_each_other(fate: Fate) -> None:
    """A kernel may still make what leaves, or use the memory that it comes back to."""
    card: Any = Card()
    memory, file = torch.empty(4 * PAGE, dtype=torch.uint8), SimpleNamespace(nbytes=4 * PAGE)
    depots = {Fate.OFFLOAD: HostDepot(card, memory), Fate.DISK: DiskDepot(card, memory, cast(TierFile, file))}
    stash = Stash(card, NoWatch(), memory.device, depots, Streaming(offload_window=AMPLE))
    ticket = stash.treat(torch.ones(MOVED_LEAST, dtype=torch.uint8), Treatment("op", 0, fate), "a")
    assert ticket is not None
    assert DONE in card.after[Lane.D2H]
    stash.begin_backward()
    ticket.tensor()
    way = [Lane.D2H, *([Lane.DISK_WRITE, Lane.DISK_READ] if fate is Fate.DISK else []), Lane.H2D]
    for before, lane in pairwise(way):
        assert card.copies[before][0] in card.after[lane]
    assert DONE in card.after[Lane.H2D]


def test_codes_are_made_when_the_window_has_room_for_them() -> None:
    """Those before are still on their way: with room for one, there are no two of them."""
    device, go = CpuDevice(), threading.Event()
    watch, values = looking(device), torch.rand(MOVED_LEAST)
    window = Stash(device, watch, values.device, {}, Streaming()).coder.nbytes(values, values.nbytes, 8)
    stash = stash_over(torch.empty(8 * MOVED_LEAST, dtype=torch.uint8), device, window, watch=watch)
    peaks, tickets = [], []
    watch.install()  # every storage is counted that is made from here on
    device.submit(Lane.D2H, go.wait)
    for what in "ab":
        if tickets:
            threading.Timer(LATE, go.set).start()
        device.reset_peak()
        tickets.append(stash.treat(torch.rand(MOVED_LEAST), Treatment("op", 0, Fate.OFFLOAD, 8), what))
        peaks.append(device.usage().peak)
    watch.close()
    assert None not in tickets and peaks[0] == peaks[1] > MOVED_LEAST * 4
    device.close()
