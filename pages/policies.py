"""``docs/policies``: a page for each policy, in the words of its planner's docstring, with what it decides.

That is asked of the planners themselves, for a model and a machine that are made up (``pages.example``).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

from forebay.errors import DoesNotFit
from forebay.figures import with_figures
from forebay.machine import Link
from forebay.memory import Tier
from forebay.planners import INEXACT, LITERATURE, PLANNERS, SEVERAL, STATES, Bench, make_plan
from forebay.planners.parallel import ON_DEVICES
from forebay.planners.room import leave_room
from forebay.planning import problem_of
from forebay.plans import Plan
from forebay.reporting.plan_rows import PLAN_HEADER, plan_rows
from forebay.units import format_bytes, format_rate, format_seconds
from pages.example import MACHINE, Case, budget, dense, experts, written_out
from pages.uses import USES

__all__ = ["FOLDER", "names", "pages", "told"]

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "policies"
HEAD = "<!-- written by scripts/docs from the docstrings of the planners, and from what they decide; change those -->\n"

TOGETHER: Final = 4
"""Micro-batches of a step, for policies that group them."""

GROUPING = ("harmony", "mobius")

ACTIVATIONS = (*LITERATURE, "recompute", "chen", "keep", "offload-all")
"""Those that are shown with room for everything but activations."""

CASES: Final = MappingProxyType({"moesys": experts, "selective": written_out})
"""Those that are for another model."""

Planner = Callable[..., object]


def names() -> tuple[str, ...]:
    """Every policy, in the order of the index."""
    return tuple(dict.fromkeys((*PLANNERS, *ON_DEVICES)))


def pages() -> dict[Path, str]:
    """Every page of ``docs/policies`` with its text."""
    return {FOLDER / "README.md": _index(), **{FOLDER / f"{name}.md": _page(name) for name in names()}}


def told(name: str) -> str:
    """What the docstring of the planner of ``name`` says: that of its file where the file is about it, its part of that
    of the simple ones."""
    planner = PLANNERS.get(name) or ON_DEVICES[name]
    doc = _doc(planner)
    if planner.__module__ != "forebay.planners.policies":
        return doc
    entries = dict(re.findall(r"^``([\w-]+)`` +(.+?)(?=^``[\w-]+`` |\n\n)", doc, re.MULTILINE | re.DOTALL))
    return " ".join(entries[name].split())


def _doc(planner: Planner) -> str:
    return inspect.cleandoc(inspect.getmodule(planner).__doc__ or "")  # type: ignore[union-attr]


def _index() -> str:
    groups: Mapping[str, tuple[str, ...]] = {
        "Simple ones": tuple(name for name in PLANNERS if name not in (*LITERATURE, *STATES, *INEXACT, *SEVERAL)),
        "Published, for parameters, gradients and states": (*STATES, *INEXACT),
        "Published, for activations": tuple(LITERATURE),
        "For several models or devices": (
            "hydra",
            *(name for name in ON_DEVICES if name not in (*STATES, *LITERATURE)),
        ),
    }
    lines = [HEAD, "# Every policy", "", "[Policies](../policies.md) compares them; a page here is about one.", ""]
    for title, members in groups.items():
        lines += [f"## {title}", "", "| policy | when to use it |", "|---|---|"]
        lines += [f"| [`{name}`]({name}.md) | {USES[name]} |" for name in members]
        lines.append("")
    return "\n".join(lines)


def _page(name: str) -> str:
    parts = [HEAD, f"# `{name}`\n", "## When to use it\n", f"{USES[name]}\n"]
    own = PLANNERS.get(name)
    parts += ["## What it is\n", f"{told(name)}\n", f"[The planner]({_source(own or ON_DEVICES[name])})\n"]
    if own is not None:
        parts += ["## What it decides\n", _decided(name)]
    if name in ON_DEVICES:
        parts.append("## Over several devices\n")
        if own is not None:
            parts += [f"{_doc(ON_DEVICES[name])}\n", f"[The planner]({_source(ON_DEVICES[name])})\n"]
        parts.append(f"```console\n$ forebay plan gpt2-xl --machine rtx-3090 --devices 4 --policy {name}\n```\n")
        parts.append("Simulated, and not run: [several devices](../devices.md).\n")
    return "\n".join(parts)


def _source(planner: Planner) -> str:
    path = Path(inspect.getsourcefile(planner) or "")
    return f"../../{path.relative_to(ROOT)}"


def _decided(name: str) -> str:
    case = CASES.get(name, dense)()
    everything = _plan("resident", case, MACHINE.device_capacity)
    device = everything.device if name == "resident" else _room(case, for_activations=name in ACTIVATIONS)
    together = TOGETHER if name in GROUPING else 1
    intro = (
        f"{case.words[0].upper()}{case.words[1:]}, in fp32. The machine: {_machine()}. With everything on the device a "
        f"step takes {format_bytes(everything.device)} of it and {_seconds(everything)}; all figures are simulated.\n\n"
        f"With {format_bytes(device)} of the device"
    )
    intro += f", and {together} micro-batches a step," if together > 1 else ""
    try:
        plan = _plan(name, case, device, together)
    except DoesNotFit as refusal:
        return f"{intro} it refuses: {refusal}\n"
    taken = plan.seconds_of_step(together, together)
    shown = "an unknown time" if taken is None else format_seconds(taken)
    return "\n".join([f"{intro} a step takes {shown}:\n", *_table(plan, case), *_figures(plan, together), *_why(plan)])


def _machine() -> str:
    rates = {"on the device": MACHINE.device_bandwidth, "each way over the link": _rate(MACHINE.h2d)}
    rates |= {"in updates on the host": MACHINE.update_rate}
    rates |= {"each way to the disk": _rate(MACHINE.disk.read)} if MACHINE.disk is not None else {}
    told = ", ".join(f"{format_rate(rate)} {where}" for where, rate in rates.items())
    return f"{MACHINE.compute['float32'] / 1e12:.0f} TFLOP/s, {told}"


def _rate(link: Link) -> float:
    return link.curve.best


def _seconds(plan: Plan) -> str:
    return "an unknown time" if plan.step_seconds is None else format_seconds(plan.step_seconds)


@cache
def _plan(name: str, case: Case, device: int, together: int = 1) -> Plan:
    problem = problem_of(case.trace, MACHINE, budget(device))
    if together == 1:
        return make_plan(problem, name, _bench(case).with_limits(problem))
    room = leave_room(problem, together, lambda asked, bench: make_plan(asked, name, bench))
    return with_figures(case.trace, MACHINE, room.plan, liveness=room.bench.liveness, micro_batches=together)


@cache
def _bench(case: Case) -> Bench:
    """What is worked out of ``case`` for one policy is there for the next."""
    return Bench(problem_of(case.trace, MACHINE, budget(MACHINE.device_capacity)))


@cache
def _room(case: Case, *, for_activations: bool) -> int:
    """Bytes of the device: half of what activations take, beside everything else; or half of everything."""
    everything = _plan("resident", case, MACHINE.device_capacity).device
    if not for_activations:
        return everything // 2
    return (everything + _plan("recompute", case, MACHINE.device_capacity).device) // 2


def _table(plan: Plan, case: Case) -> list[str]:
    rows = plan_rows(plan, {block.name: block.nbytes for block in case.trace.model.blocks})
    lines = [PLAN_HEADER, ("---",) * len(PLAN_HEADER), *rows]
    return [*(f"| {' | '.join(line)} |" for line in lines), ""]


def _figures(plan: Plan, together: int) -> list[str]:
    peaks = plan.peaks(together)
    held = ", ".join(
        f"{format_bytes(peaks[t])} on the {t.value}" for t in (Tier.DEVICE, Tier.HOST, Tier.DISK) if peaks[t]
    )
    other = [f"**Other numbers** than those of plain PyTorch: {'; '.join(plan.changes_numbers)}.", ""]
    return [f"At its fullest: {held}.", "", *(other if plan.changes_numbers else [])]


def _why(plan: Plan) -> list[str]:
    return [*(f"- {reason}" for reason in plan.reasons), ""]
