"""What a public function was given, before anything is done with it: what is not of its kind is told by its name."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from forebay.budgets import Budget
from forebay.errors import ConfigError, UsageError
from forebay.machine import Machine
from forebay.plans import Plan
from forebay.trace import Trace

__all__ = ["expect", "expect_folder", "expect_loss_fn", "expect_micro_batches", "expect_records"]

_RECORDS: Final[dict[str, tuple[type, str]]] = {
    "trace": (Trace, "forebay.Trace: forebay.profile(model, batch) makes one"),
    "machine": (Machine, "forebay.Machine: forebay.probe() makes one of this machine"),
    "budget": (Budget, "forebay.Budget: forebay.Budget.of('24GiB') makes one"),
    "plan": (Plan, "forebay.Plan: forebay.plan(trace, machine, budget) makes one"),
}


def expect(name: str, value: object, kinds: Any, needed: str) -> None:
    """Raises ``UsageError`` where ``value``, given as ``name``, is no instance of ``kinds``: ``needed`` says what it
    is to be."""
    if not isinstance(value, kinds):
        plain = value is None or isinstance(value, str | bytes | int | float)
        raise UsageError(f"{name} is {needed}; got {repr(value) if plain else type(value).__name__}")


def expect_records(**given: object) -> None:
    """Raises ``UsageError`` for a record that is none, each given by its name: ``trace``, ``machine``, ``budget``,
    ``plan``."""
    for name, value in given.items():
        kind, needed = _RECORDS[name]
        expect(name, value, kind, f"a {needed}")


def expect_folder(folder: object, what: str) -> None:
    """Raises ``UsageError`` where ``folder`` is no path; ``what`` says of which folder it is to be."""
    expect("folder", folder, (str, os.PathLike), f"the path of {what}")


def expect_loss_fn(given: object) -> None:
    """Raises ``UsageError`` where ``loss_fn`` is no function."""
    expect("loss_fn", given, Callable, "a function, called as loss_fn(model, batch), that returns the loss")


def expect_micro_batches(given: object) -> None:
    """Raises ``ConfigError`` where ``micro_batches`` is no number of them."""
    if not isinstance(given, int) or given < 1:
        raise ConfigError(f"micro_batches must be an int, 1 or more, got {given!r}")
