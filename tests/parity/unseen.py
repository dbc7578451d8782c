"""What a test collects while a model runs, where forebay takes nothing back."""

from __future__ import annotations

from typing import Any, final

__all__ = ["Unseen"]


@final
class Unseen:
    """Notes what it is given. Lists that forwards and hooks write to are what they were behind a recording; objects
    without fields are not looked into (``runtime/inside.py``)."""

    __slots__ = ("found",)

    def __init__(self) -> None:
        self.found: list[Any] = []

    def note(self, value: Any) -> Any:
        """Notes ``value``, and returns it."""
        self.found.append(value)
        return value
