"""forebay trains models that do not fit. ``prepare`` is the way in; see the README.

Importing this package imports neither torch nor anything else that is slow: names are resolved when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.api import (
        close,
        gradients,
        initialize,
        load,
        parameters,
        prepare,
        report,
        synchronize,
    )
    from forebay.errors import ForebayError
    from forebay.plans import Plan

__all__ = [
    "ForebayError",
    "Plan",
    "close",
    "gradients",
    "initialize",
    "load",
    "parameters",
    "prepare",
    "report",
    "synchronize",
]

__version__ = "0.1.0"

_HOMES = {"ForebayError": "forebay.errors", "Plan": "forebay.plans"}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "forebay.api")), name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
