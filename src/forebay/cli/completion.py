"""What a shell offers for the names that flags and arguments take: asked for when the tab key is pressed.

Where no name begins with what has been typed the shell offers files: a model and a machine may be one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

__all__ = ["among", "machines", "models", "policies", "policy_lists", "simulated_policies"]

GROUPS = ("all", "states", "activations")
"""Names that stand for several policies (``forebay compare``)."""


def among(*names: str) -> Callable[[str], list[str]]:
    """Offers ``names``, which are written where the flag is: asking the room that takes them would load it."""

    def offered(typed: str) -> list[str]:
        return _begun(names, typed)

    return offered


def models(typed: str) -> list[str]:
    """Offers recipes."""
    from forebay.recipes import recipe_names

    return _begun(recipe_names(), typed)


def machines(typed: str) -> list[str]:
    """Offers the catalogue, and this machine."""
    from forebay.catalogue import machine_names

    return _begun(("here", *machine_names()), typed)


def policies(typed: str) -> list[str]:
    """Offers every planner."""
    from forebay.planners import PLANNERS

    return _begun(PLANNERS, typed)


def simulated_policies(typed: str) -> list[str]:
    """Offers every planner, and the policies for several devices that are none."""
    from forebay.planners import PLANNERS
    from forebay.planners.parallel import ON_DEVICES

    return _begun(dict.fromkeys((*PLANNERS, *ON_DEVICES)), typed)


def policy_lists(typed: str) -> list[str]:
    """Offers policies that are not named yet in a list with commas, or at its beginning what stands for several."""
    before, comma, last = typed.rpartition(",")
    if not comma:
        return [*_begun(GROUPS, last), *simulated_policies(last)]
    named = before.split(",")
    return [f"{before},{name}" for name in simulated_policies(last) if name not in named]


def _begun(names: Iterable[str], typed: str) -> list[str]:
    return [name for name in names if name.startswith(typed)]
