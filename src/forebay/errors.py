"""The exceptions that forebay raises on purpose.

    ForebayError
    ├── UsageError               the call or the input is wrong; nothing was changed
    │   ├── UnitError            a size, a time or a rate that cannot be read
    │   ├── ConfigError          a configuration file, flag or record that cannot be used
    │   ├── ModelError           a model, batch or device that cannot be prepared
    │   │   └── CaptureFailed    a model whose step cannot run under fake tensors
    │   ├── OptimizerError       an optimizer, or an option of one, that forebay does not run
    │   ├── MissingLibrary       a library that is not installed, with the line that installs it
    │   └── PlanInvalid          a plan that would read what is not there, or do something twice or never
    ├── DoesNotFit               no plan keeps the promise that the budget asks for
    │   ├── CannotServe          a policy is not for this model or this machine, whatever the budget
    │   └── NoRoomTogether       no plan has room for so many micro-batches at a time, and there is one for one
    ├── BudgetExceeded           a tier went over its budget while running
    │   ├── DeviceOutOfMemory
    │   ├── HostOutOfMemory
    │   └── DiskFull
    ├── StorageError             a disk tier cannot be read or written
    ├── NotFinite                a loss, or a norm of gradients, that is no number to learn from
    ├── ParameterReleased        a parameter was read while its bytes were elsewhere
    ├── GradientUsedUp           a gradient, or another step, is asked for after the update in backward that used it up
    └── SessionClosed            the model was closed, or its run was abandoned after a fault

Every message says what was needed, what was there and what to change. The command line turns
``UsageError`` into exit code 2 and every other ``ForebayError`` into exit code 1, without a traceback.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forebay.remedies import Remedy

__all__ = [
    "BudgetExceeded",
    "CannotServe",
    "CaptureFailed",
    "ConfigError",
    "DeviceOutOfMemory",
    "DiskFull",
    "DoesNotFit",
    "ForebayError",
    "GradientUsedUp",
    "HostOutOfMemory",
    "MissingLibrary",
    "ModelError",
    "NoRoomTogether",
    "NotFinite",
    "OptimizerError",
    "ParameterReleased",
    "PlanInvalid",
    "SessionClosed",
    "StorageError",
    "UnitError",
    "UsageError",
]


LONGEST: Final = 2000
"""Characters of a message: what a file is quoted with may be anything."""


class ForebayError(Exception):
    """Base of every error that forebay raises on purpose. Its message is one line, whatever it quotes."""

    def __str__(self) -> str:
        text = super().__str__()
        if len(text) > LONGEST:
            text = f"{text[: LONGEST // 2]} ... {text[-LONGEST // 4 :]}"
        if text.isprintable():
            return text
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is made again from its message alone, and those with fields ask for them by name: from another
        # process there would come a TypeError in their place.
        return _again, (type(self), self.args), self.__dict__


class UsageError(ForebayError):
    """The call or the input is wrong; nothing was changed."""


class UnitError(UsageError, ValueError):
    """A size, a time or a rate that cannot be read."""


class ConfigError(UsageError, ValueError):
    """A configuration file, a flag or a record that cannot be used."""


class ModelError(UsageError):
    """A model, a batch or a device that cannot be prepared."""


class CaptureFailed(ModelError):
    """A model whose step cannot run under fake tensors: its control flow depends on values that are not there."""


class OptimizerError(UsageError):
    """An optimizer, or an option of one, that forebay does not run."""


class MissingLibrary(UsageError, ImportError):
    """A library that this needs is not installed."""


class PlanInvalid(UsageError):
    """A plan, or the program made from it, that would read what is not there, or do something twice or never.

    ``action`` is the number of the action or op at fault, ``subject`` the tensor, parameter or block.
    """

    def __init__(self, message: str, *, action: int, subject: str) -> None:
        super().__init__(message)
        self.action = action
        self.subject = subject


class DoesNotFit(ForebayError):
    """No plan keeps the promise that the budget asks for.

    ``tier`` names the tier that is too small, ``needed`` and ``allowed`` are bytes; ``nearest`` are changes with which
    it would fit.
    """

    def __init__(self, message: str, *, tier: str, needed: int, allowed: int, nearest: tuple[Remedy, ...] = ()) -> None:
        super().__init__(message)
        self.nearest = nearest
        self.tier = tier
        self.needed = needed
        self.allowed = allowed


class CannotServe(DoesNotFit):
    """A policy is not for this model or this machine, whatever the budget allows; ``nearest`` names policies that are.

    No tier is too small: ``tier`` is empty, ``needed`` and ``allowed`` are 0.
    """

    def __init__(self, message: str, *, nearest: tuple[Remedy, ...] = ()) -> None:
        super().__init__(message, tier="", needed=0, allowed=0, nearest=nearest)


class NoRoomTogether(DoesNotFit):
    """No plan has room for so many micro-batches that pass the model together. ``alone``, a ``plans.Plan``
    (which this module must not know), has it for one at a time."""

    def __init__(self, message: str, *, tier: str, needed: int, allowed: int, alone: Any) -> None:
        super().__init__(message, tier=tier, needed=needed, allowed=allowed)
        self.alone = alone

    def having(self, alone: Any) -> NoRoomTogether:
        """The same with another plan for one at a time."""
        return NoRoomTogether(str(self), tier=self.tier, needed=self.needed, allowed=self.allowed, alone=alone)


class BudgetExceeded(ForebayError):
    """A tier went over its budget while running; ``needed`` and ``allowed`` are bytes."""

    def __init__(self, message: str, *, needed: int, allowed: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.allowed = allowed


class DeviceOutOfMemory(BudgetExceeded):
    """The device tier went over its budget.

    ``snapshot`` is what the device held then, and what it was asked for before, as PyTorch's memory snapshots have it:
    plain values, for ``pickle.dump`` into a file that ``forebay fragmentation`` reads. None where nobody has kept it.
    """

    snapshot: Mapping[str, Any] | None = None


class HostOutOfMemory(BudgetExceeded):
    """The host tier, or the pinned part of it, went over its budget."""


class DiskFull(BudgetExceeded):
    """The disk tier went over its budget, or the file system has no room."""


class StorageError(ForebayError):
    """A disk tier cannot be read or written."""


class NotFinite(ForebayError):
    """A loss, or the norm of the gradients, is infinite or NaN: an update would spoil every parameter."""


class ParameterReleased(ForebayError):
    """A parameter was read while its bytes were elsewhere."""


class GradientUsedUp(ForebayError):
    """A gradient is asked for that an update in backward has used up, or something that would need it: a step with
    other hyperparameters, a second backward, values from between backward and step."""


class SessionClosed(ForebayError):
    """The model was closed, or its run was abandoned after a fault."""


def _again(kind: type[ForebayError], args: tuple[Any, ...]) -> ForebayError:
    return kind.__new__(kind, *args)
