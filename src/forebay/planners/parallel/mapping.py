"""Which stage is on which device."""

from __future__ import annotations

from forebay.servers import Server

__all__ = ["crossed", "in_order"]


def in_order(server: Server, stages: int) -> tuple[int, ...]:
    """The device of every stage: one after the other, and again from the first."""
    return tuple(stage % server.devices for stage in range(stages))


def crossed(server: Server, stages: int) -> tuple[int, ...]:
    """The same with devices in an order in which neighbours are on different root complexes, as far as can be (Mobius,
    cross mapping)."""
    left: dict[int, list[int]] = {}
    for device, root in enumerate(server.roots):
        left.setdefault(root, []).append(device)
    order: list[int] = []
    for _ in server.roots:
        before = server.roots[order[-1]] if order else None
        # The root complex with the most devices left, that of the device before last of all.
        root = max((root for root in left if left[root]), key=lambda r: (r != before, len(left[r]), -r))
        order.append(left[root].pop(0))
    return tuple(order[stage % len(order)] for stage in range(stages))
