"""The exception tree is part of the public surface: who catches a class today catches the same tomorrow."""

from __future__ import annotations

import inspect
import pickle

import pytest

from forebay import errors

TREE = {
    "ForebayError": ("Exception",),
    "UsageError": ("ForebayError",),
    "UnitError": ("UsageError", "ValueError"),
    "ConfigError": ("UsageError", "ValueError"),
    "ModelError": ("UsageError",),
    "CaptureFailed": ("ModelError",),
    "PlanInvalid": ("UsageError",),
    "OptimizerError": ("UsageError",),
    "MissingLibrary": ("UsageError", "ImportError"),
    "DoesNotFit": ("ForebayError",),
    "CannotServe": ("DoesNotFit",),
    "NoRoomTogether": ("DoesNotFit",),
    "BudgetExceeded": ("ForebayError",),
    "DeviceOutOfMemory": ("BudgetExceeded",),
    "HostOutOfMemory": ("BudgetExceeded",),
    "DiskFull": ("BudgetExceeded",),
    "StorageError": ("ForebayError",),
    "NotFinite": ("ForebayError",),
    "ParameterReleased": ("ForebayError",),
    "GradientUsedUp": ("ForebayError",),
    "SessionClosed": ("ForebayError",),
}


def test_the_tree_is_the_one_that_is_promised() -> None:
    classes = {n: cls for n, cls in vars(errors).items() if inspect.isclass(cls) and cls.__module__ == errors.__name__}
    assert {name: tuple(base.__name__ for base in cls.__bases__) for name, cls in classes.items()} == TREE
    assert sorted(errors.__all__) == sorted(TREE)


def test_the_drawing_shows_every_class_under_its_parent() -> None:
    drawing = inspect.getdoc(errors) or ""
    depth = {"ForebayError": 0}
    for name, bases in list(TREE.items())[1:]:
        depth[name] = depth[bases[0]] + 1
    drawn = {}
    for line in drawing.splitlines():
        bare = line.lstrip(" │├└─")
        if bare.split(" ")[0] in TREE and line != bare:
            drawn[bare.split(" ")[0]] = (len(line) - len(bare) - 4) // 4
    assert drawn == depth


def test_a_message_is_one_line_whatever_it_quotes() -> None:
    assert str(errors.ConfigError("no block 'a\nb\x1b[2J\ud800'")) == "no block 'a\\nb\\x1b[2J\\ud800'"
    long = str(errors.StorageError(f"begin{'x' * 10**6}end"))
    assert long.startswith("begin") and long.endswith("end") and len(long) < errors.LONGEST


def test_a_refusal_carries_its_bytes() -> None:
    refused = errors.DoesNotFit("too small", tier="device", needed=10, allowed=5)
    assert (str(refused), refused.tier, refused.needed, refused.allowed) == ("too small", "device", 10, 5)


@pytest.mark.parametrize("cls", [errors.DeviceOutOfMemory, errors.HostOutOfMemory, errors.DiskFull])
def test_out_of_memory_carries_its_bytes(cls: type[errors.BudgetExceeded]) -> None:
    error = cls("full", needed=10, allowed=5)
    assert (str(error), error.needed, error.allowed) == ("full", 10, 5)


@pytest.mark.parametrize("name", TREE)
def test_it_comes_whole_from_another_process(name: str) -> None:
    fields = {"tier": "host", "needed": 3, "allowed": 2, "action": 7, "subject": "a", "alone": None}
    kind = getattr(errors, name)
    asked = inspect.signature(kind.__init__).parameters
    error = kind("too small", **{key: value for key, value in fields.items() if key in asked})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind and str(again) == "too small" and vars(again) == vars(error)
