"""forebay trains models that do not fit. ``prepare`` is the way in; see the README.

Importing this package imports neither torch nor anything else that is slow: names are resolved when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.api import (
        accumulate,
        check,
        close,
        gradients,
        initialize,
        load,
        parameters,
        plan,
        prepare,
        probe,
        profile,
        report,
        resume,
        save,
        simulate,
        synchronize,
        tile,
    )
    from forebay.budgets import Budget
    from forebay.errors import ForebayError
    from forebay.exporting import export
    from forebay.machine import Machine
    from forebay.plans import Plan
    from forebay.several import alternate, prepare_several, report_several
    from forebay.timeline import Timeline
    from forebay.trace import Trace

__all__ = [
    "Budget",
    "ForebayError",
    "Machine",
    "Plan",
    "Timeline",
    "Trace",
    "accumulate",
    "alternate",
    "check",
    "close",
    "export",
    "gradients",
    "initialize",
    "load",
    "parameters",
    "plan",
    "prepare",
    "prepare_several",
    "probe",
    "profile",
    "report",
    "report_several",
    "resume",
    "save",
    "simulate",
    "synchronize",
    "tile",
]

__version__ = "0.1.0"

_HOMES = {
    "Budget": "forebay.budgets",
    "ForebayError": "forebay.errors",
    "Machine": "forebay.machine",
    "Plan": "forebay.plans",
    "Timeline": "forebay.timeline",
    "Trace": "forebay.trace",
    "alternate": "forebay.several",
    "export": "forebay.exporting",
    "prepare_several": "forebay.several",
    "report_several": "forebay.several",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "forebay.api")), name)
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
