"""What is page-locked for several micro-batches that pass the model together is what a plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.device.cpu import CpuDevice
from forebay.figures import with_figures
from forebay.memory import Ledger, Tier
from forebay.planners import make_plan
from forebay.plans import Plan
from forebay.runtime.host_arenas import Ledgers
from forebay.runtime.store import Store
from forebay.units import MiB
from tests.faults.test_tiers_arena import ScriptedPinner
from tests.null.planning import asked, chain, machine

TRACE = chain(4, width=256, activation=65536)
ON = machine()


def moving(pinned: int | None = None) -> Plan:
    """All activations go to the host."""
    wanted = asked(TRACE, ON, device=6 * MiB)
    plan = make_plan(replace(wanted, budget=replace(wanted.budget, pinned=pinned)), "offload-all")
    assert plan.streaming.host_activations
    return with_figures(TRACE, ON, plan)


def locked(plan: Plan, micro_batches: int) -> int:
    """Bytes that a session of ``plan`` has page-locked for so many."""
    ledgers = Ledgers(Ledger(Tier.HOST), Ledger(Tier.PINNED, plan.budget.pinned), Ledger(Tier.DISK))
    store = Store(CpuDevice(None), TRACE.model, plan, TRACE.state_names, ledgers, ScriptedPinner(True))
    store.make_room(micro_batches)
    found = ledgers.pinned.live
    store.close()
    assert ledgers.pinned.live == ledgers.host.live == 0
    return found


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_what_is_page_locked_is_what_was_promised(micro_batches: int) -> None:
    plan = moving()
    promised = plan.peaks(micro_batches)[Tier.PINNED]
    assert promised == plan.pinned + (micro_batches - 1) * plan.streaming.host_activations
    assert locked(plan, micro_batches) == promised <= plan.peaks(micro_batches)[Tier.HOST]


def test_no_more_is_promised_than_may_be_page_locked() -> None:
    budget = moving().pinned + 1
    plan = moving(budget)
    assert plan.peaks(4)[Tier.PINNED] == budget
    assert locked(plan, 4) == plan.pinned <= budget
