"""A machine that was not timed: capacities as they are here, rates typical for the kind."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from forebay.catalogue import for_device
from forebay.machine import Curve, Link, Machine
from forebay.units import KiB, MiB

__all__ = ["typical"]

_CPU: Final = MappingProxyType({"float32": 150e9, "bfloat16": 40e9, "float16": 1e9})
"""FLOP/s of two cores without matrix units; 16 bits are slower than 32 without them."""


def typical(kind: str, name: str, device_capacity: int, host_capacity: int, pinned_capacity: int) -> Machine:
    """A machine of ``kind`` (``cpu``, ``cuda``) with these capacities in bytes and rates that depend on nothing else.

    ``name`` is torch's name of a GPU: one that the catalogue knows gets the rates of its entry.
    """
    if kind == "cuda":
        entry = for_device(name)
        return replace(
            entry,
            name=name,
            device_capacity=device_capacity,
            host_capacity=host_capacity,
            pinned_capacity=pinned_capacity,
            disk=None,
            sources=(f"not timed: rates of the catalogue's {entry.name}, capacities as they are here", *entry.sources),
        )
    copy = Link(Curve(((64 * KiB, 4e9), (4 * MiB, 8e9))), latency=30e-6)
    return Machine(
        name=name,
        source="catalogue",
        device_kind="cpu",
        device_capacity=device_capacity,
        host_capacity=host_capacity,
        pinned_capacity=0,
        compute=dict(_CPU),
        device_bandwidth=15e9,
        host_bandwidth=20e9,
        update_rate=25e9,
        h2d=copy,
        d2h=copy,
        duplex=0.8,
        shared_cores=0.4,
        launch_seconds=15e-6,
        watch_seconds=40e-6,
        sources=("not timed: rates typical for two cores of a server, capacities as they are here",),
    )
