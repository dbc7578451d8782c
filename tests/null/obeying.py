"""What a refusal names, done: the problem and the policy that a user has who follows one of its remedies. No torch."""

from __future__ import annotations

from dataclasses import replace

from forebay.budgets import DiskBudget
from forebay.planners import Problem
from forebay.remedies import Remedy
from forebay.states import moment_states
from tests.null.strategies import roomy_machine

__all__ = ["can_be_obeyed", "obeyed"]

STATES = {
    "sgd with momentum": ("momentum_buffer",),
    "sgd": (),
    "adamw-8bit": moment_states(("exp_avg", "exp_avg_sq"), "8bit"),
    "adafactor": ("row_var:rows", "col_var:columns", "variance:vector"),
}
"""Those of optimizers by name; ``-sr`` behind it says that there are no masters."""


def can_be_obeyed(remedy: Remedy) -> bool:
    """Whether it is exact, and something that a problem says."""
    if any(not can_be_obeyed(other) for other in remedy.at_once):
        return False
    return not remedy.estimate and remedy.what != "machine" and (remedy.what != "policy" or bool(remedy.policy))


def obeyed(problem: Problem, policy: str, remedy: Remedy) -> tuple[Problem, str]:
    """``problem`` and ``policy`` with all that ``remedy`` asks for."""
    for other in remedy.at_once:
        problem, policy = obeyed(problem, policy, other)
    budget, machine, trace, nbytes = problem.budget, problem.machine, problem.trace, remedy.needed
    if remedy.what == "policy":
        return problem, remedy.policy
    if remedy.what == "device":
        return replace(problem, budget=replace(budget, device=nbytes)), policy
    if remedy.what == "host":
        return replace(problem, budget=replace(budget, host=nbytes), host_limit=nbytes), policy
    if remedy.what == "disk":
        assert machine is not None
        there = replace(machine, disk=machine.disk or roomy_machine().disk)
        disk = DiskBudget("folder", nbytes)
        return replace(problem, budget=replace(budget, disk=disk), disk_limit=nbytes, machine=there), policy
    if remedy.what == "update":
        return replace(problem, update="backward"), policy
    assert remedy.what == "optimizer" and trace is not None, remedy
    states = STATES[remedy.optimizer.removesuffix("-sr")]
    model = trace.model.without_masters() if remedy.optimizer.endswith("-sr") else trace.model
    trace = replace(trace, state_names=states, model=model)
    return replace(problem, state_names=states, model=model, trace=trace), policy
