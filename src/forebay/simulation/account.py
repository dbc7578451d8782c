"""Bytes of every tier and kind while a program plays. No torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from types import MappingProxyType
from typing import final

from forebay.memory import Kind, Tier, TierUsage
from forebay.program import Action, Change, Program, Verb
from forebay.timeline import Lane

__all__ = ["DeviceAccount", "WithCompute", "standing_usages", "with_compute"]


@final
class DeviceAccount:
    """The device's bytes: what stands, what actions leave or free, and what the running compute adds for a while.

    Gives the same account as a ``memory.Ledger`` without a limit, for actions instead of tensors.
    """

    def __init__(self, standing: Mapping[Kind, int]) -> None:
        self._live = dict.fromkeys(Kind, 0)
        self._live.update(standing)
        self._total = self._peak = self._high = sum(self._live.values())
        self._at_peak = dict(self._live)

    def begin(self, action: Action) -> None:
        """Compute starts: until it ends, the device holds ``action.peak`` bytes more at most."""
        self._high = max(self._high, self._total + action.peak)
        if self._total + action.peak > self._peak:
            self._peak = self._total + action.peak
            self._at_peak = self._with(action)

    def apply(self, changes: tuple[Change, ...]) -> None:
        """An action ended."""
        live = self._live
        for change in changes:
            live[change.kind] += change.nbytes
            self._total += change.nbytes

    def mark(self, running: Action | None) -> None:
        """All that ends at this instant has been applied; ``running`` is the compute that goes on."""
        total = self._total + (running.peak if running is not None else 0)
        self._high = max(self._high, total)
        if total > self._peak:
            self._peak = total
            self._at_peak = dict(self._live) if running is None else self._with(running)

    def level(self) -> tuple[dict[Kind, int], int]:
        """Bytes live now by kind, and the most since the last call; what compute takes for a while counts in these."""
        high, self._high = self._high, self._total
        return {kind: nbytes for kind, nbytes in self._live.items() if nbytes}, high

    def usage(self) -> TierUsage:
        """The account of this moment."""
        return TierUsage(Tier.DEVICE, None, self._total, self._peak, MappingProxyType(dict(self._at_peak)))

    def _with(self, action: Action) -> dict[Kind, int]:
        """What is live and ``action.peak`` more, by kind.

        What the action leaves behind counts as what it is, as far as the peak has room for it; the rest of the peak
        is gone again when it ends, and that is what a temporary is.
        """
        live, room = dict(self._live), action.peak
        for change in action.changes:
            if change.nbytes > 0:
                counted = min(change.nbytes, room)
                live[change.kind] += counted
                room -= counted
        live[Kind.TEMPORARY] += room
        return live


@dataclass(frozen=True)
class WithCompute:
    """Transfers of activations whose bytes are not booked just when they end. All are places in the program.

    What is offloaded goes when it is on the host and compute has let go of it: ``holder`` is the compute action that
    lets go of an offload's tensor, if it comes after, and ``holds`` the same the other way round. What is reloaded
    takes its bytes when it is issued, whenever the lane comes to it: memory comes in the order of compute, and whoever
    issues a reload has waited for the offloads that it names (``scheduling.activations``). ``behind`` are the actions
    that must be done before a reload is issued, ``takes`` the same the other way round.
    """

    holder: Mapping[int, int]
    holds: Mapping[int, Sequence[int]]
    behind: Mapping[int, Sequence[int]]
    takes: Mapping[int, Sequence[int]]


def with_compute(actions: Sequence[Action]) -> WithCompute:
    """Of the actions of a program."""
    holder: dict[int, int] = {}
    holds: dict[int, list[int]] = defaultdict(list)
    behind: dict[int, Sequence[int]] = {}
    takes: dict[int, list[int]] = defaultdict(list)
    held: list[tuple[int, int]] = []  # a heap: the number of the op by which compute has let go, and the offload
    reached, latest = 0, -1  # the number of ops that the pass has issued; the last compute action
    for index, action in enumerate(actions):
        if action.verb is Verb.COMPUTE and not action.recomputed:
            reached = action.ops[1]
            while held and held[0][0] <= reached:
                offload = heappop(held)[1]
                holder[offload] = index
                holds[index].append(offload)
            latest = index
        elif action.verb is Verb.ENCODE:
            # The op that made what is encoded has not returned, and holds what it has read.
            for offload in holds.pop(latest, ()):
                holder[offload] = index
                holds[index].append(offload)
            latest = index
        elif action.verb is Verb.OFFLOAD and action.ops[1] > reached:
            heappush(held, (action.ops[1], index))
        elif action.verb is Verb.RELOAD:
            # Not what its own lane waits for (a read from disk): the bytes are taken all the while.
            behind[index] = [i for i in action.after if actions[i].lane in (Lane.COMPUTE, Lane.D2H)]
            for earlier in behind[index]:
                takes[earlier].append(index)
    return WithCompute(holder, holds, behind, takes)


def standing_usages(program: Program) -> tuple[TierUsage, ...]:
    """The accounts of the tiers beside the device: arenas and files, which are there all the time."""
    usages = []
    for tier in (Tier.HOST, Tier.PINNED, Tier.DISK):
        kinds = dict.fromkeys(Kind, 0) | dict(program.standing.get(tier, {}))
        total = sum(kinds.values())
        if total or tier is not Tier.PINNED:  # like the runtime's: no account of what is not used
            usages.append(TierUsage(tier, None, total, total, MappingProxyType(kinds)))
    return tuple(usages)
