"""Programs of their own, and waiting for what they do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["ENVIRONMENT", "ROOT", "SOON", "until"]

ROOT: Final = Path(__file__).resolve().parents[2]

ENVIRONMENT: Final = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
"""Finds forebay and these tests, wherever the program runs."""

SOON: Final = 30.0
"""Seconds in which whatever is to end has ended, on a machine that is busy."""


def until(true: Callable[[], bool]) -> bool:
    """Whether it comes to be true, soon."""
    end = time.monotonic() + SOON
    while not true() and time.monotonic() < end:
        time.sleep(0.01)
    return true()
