"""Proves that no two buffers that are live at the same time overlap. No torch; shares no code with the planners."""

from __future__ import annotations

from bisect import bisect_left, insort

from forebay.buffers import Addresses
from forebay.errors import PlanInvalid

__all__ = ["check_addresses"]


def check_addresses(addresses: Addresses) -> None:
    """Raises ``PlanInvalid`` for an address below 0 or off its alignment, and for two buffers of which some byte is the
    same at some time. That all of it fits into a capacity is ``Addresses.feasible``'s to say.

    One pass through time: what is live lies in order of its address, and a buffer that begins is compared with its
    neighbours. Lives that only touch do not meet: of one point in time, all ends come before all beginnings.
    """
    buffers, offsets = addresses.given.buffers, addresses.offsets
    events: list[tuple[int, bool, int]] = []
    for number, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        if offset < 0 or offset % buffer.alignment:
            raise PlanInvalid(
                f"buffer {buffer.id} is at address {offset}, which is not a multiple of {buffer.alignment} from 0 on",
                action=number,
                subject=buffer.id,
            )
        if buffer.size:
            events += [(buffer.lower, True, number), (buffer.upper, False, number)]
    live: list[tuple[int, int, int]] = []
    for _, begins, number in sorted(events):
        mine = (offsets[number], offsets[number] + buffers[number].size, number)
        at = bisect_left(live, mine)
        if not begins:
            del live[at]
            continue
        for start, end, other in live[max(0, at - 1) : at + 1]:
            if start < mine[1] and mine[0] < end:
                raise PlanInvalid(
                    f"buffers {buffers[number].id} and {buffers[other].id} are live at the same time and overlap in "
                    f"memory: {mine[0]} to {mine[1]} and {start} to {end}",
                    action=number,
                    subject=buffers[number].id,
                )
        insort(live, mine)
