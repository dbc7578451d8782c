"""Models of allocators, to which a recording is played: what they would have reserved, and what nobody could use.

caching           PyTorch's caching allocator: size classes, segments that are split, streams, garbage collection
expandable        the same with expandable segments: one range of addresses a pool, pages mapped as they are needed
gmlake            GMLake (ASPLOS 2024): physical blocks stitched into one range of addresses
zero-contiguous   what lives long in a region of its own (ZeRO-R, SC 2020), the rest as ``caching``
planned           addresses from a layout

No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forebay.recording import Recording
from forebay.simulation.allocators.base import Allocator, Segment
from forebay.simulation.allocators.caching import CachingAllocator, CachingSettings
from forebay.simulation.allocators.contiguous import ContiguousAllocator
from forebay.simulation.allocators.expandable import ExpandableAllocator
from forebay.simulation.allocators.gmlake import GmlakeAllocator
from forebay.simulation.allocators.limits import least
from forebay.simulation.allocators.planned import PlannedAllocator
from forebay.simulation.allocators.replay import replay, room_for

__all__ = [
    "ALLOCATORS",
    "Allocator",
    "CachingAllocator",
    "ContiguousAllocator",
    "ExpandableAllocator",
    "GmlakeAllocator",
    "PlannedAllocator",
    "Segment",
    "least",
    "replay",
    "room_for",
]

ALLOCATORS: Mapping[str, Callable[[Recording, int | None], Allocator]] = MappingProxyType(
    {
        "caching": lambda recording, limit: CachingAllocator(CachingSettings(limit)),
        "expandable": lambda recording, limit: ExpandableAllocator(limit),
        "gmlake": lambda recording, limit: GmlakeAllocator(),
        "zero-contiguous": ContiguousAllocator,
    }
)
"""The models by name, each new for one recording on a device of so many bytes (None: as many as are asked for); before
they go over that, all but ``gmlake`` give back what they can. ``planned`` needs a layout beside it."""
