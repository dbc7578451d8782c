"""Plans whose blocks are updated in other ways. No torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from forebay.planners.parts import Draft
from forebay.plans import Plan, Update

__all__ = ["at_home", "updating"]


def updating(plan: Plan, how: Update, blocks: Collection[str] = (), **changes: Any) -> Plan:
    """``plan`` with ``blocks``, and no others, updated so, and with ``changes``."""
    return replace(plan, placements=Draft.of(plan).updating(how, blocks).placements, **changes)


def at_home(plan: Plan, **changes: Any) -> Plan:
    """``plan`` with all updates when their step asks, and with ``changes``."""
    return replace(plan, placements=tuple(p.updating(Update.STEP) for p in plan.placements), **changes)
