"""``forebay compare``: candidates, tables and flags, without torch."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial

import pytest
import typer
from rich.console import Console

from forebay.budgets import Budget
from forebay.cli.beside import made_beside
from forebay.cli.compare import Shares, candidate_of, compare_policies, parse_budgets, parse_policies
from forebay.cli.main import app
from forebay.errors import ConfigError
from forebay.memory import Tier
from forebay.planners import LITERATURE, PLANNERS, STATES, make_plan
from forebay.reporting.comparison import LINKS, Candidate, comparison_tables
from forebay.simulation import forecast
from forebay.timeline import Lane
from forebay.units import MiB
from tests.null.planning import ENOUGH, asked, chain, machine

TRACE, ON = chain(4), machine()
EVERYTHING = make_plan(asked(TRACE, ON, device=ENOUGH), "resident").device
DEVICES = (EVERYTHING, EVERYTHING // 2, 1)
KEYS = {
    "policy",
    "budget",
    "feasible",
    "step_seconds",
    "peaks",
    "moved",
    "exact",
    "solve_seconds",
    "reason",
    "measured",
}


@cache
def candidates(*devices: int) -> tuple[Candidate, ...]:
    return compare_policies(TRACE, ON, [Budget(device) for device in devices], ("auto", *STATES))


def test_every_policy_is_asked_at_every_budget() -> None:
    found = candidates(*DEVICES)
    assert [(c.budget, c.policy) for c in found] == [(d, p) for d in DEVICES for p in ("auto", *STATES)]


def test_the_figures_are_those_of_the_plan() -> None:
    for one in (c for c in candidates(*DEVICES) if c.budget == EVERYTHING // 2):
        assert one.feasible == (not one.reason)
        if not one.feasible:
            continue
        problem = replace(asked(TRACE, ON, device=EVERYTHING // 2), accumulates=False)  # one micro-batch is asked for
        plan = make_plan(problem, one.policy)
        expected = forecast(TRACE, ON, plan)
        assert one.step_seconds == plan.step_seconds == expected.step_seconds
        assert one.peaks[Tier.DEVICE] <= EVERYTHING // 2
        assert one.moved == {lane: expected.moved[lane] for lane in LINKS}


def test_other_processes_give_the_same_answers() -> None:
    asked = [(policy, Budget(EVERYTHING // 2)) for policy in ("auto", *STATES)]
    found = made_beside(partial(candidate_of, TRACE, ON, 1, "step"), asked, most=2, patience=0.0)
    assert [timeless(one) for one, _ in found] == [timeless(one) for one in candidates(EVERYTHING // 2)]
    assert {one.policy for one, plan in found if plan is not None} == {one.policy for one, _ in found if one.feasible}


def timeless(one: Candidate) -> Candidate:
    return replace(one, solve_seconds=0.0)


def test_micro_batches_pass_together() -> None:
    one, two = (
        {c.policy: c for c in compare_policies(TRACE, ON, [Budget(EVERYTHING // 2)], ("harmony", "l2l"), count)}
        for count in (1, 2)
    )
    assert not one["harmony"].feasible and two["harmony"].feasible
    seconds = one["l2l"].step_seconds, two["l2l"].step_seconds
    assert seconds[0] is not None and seconds[1] is not None and seconds[0] < seconds[1]
    # What streams crosses once for both.
    assert two["l2l"].moved[Lane.H2D] < 2 * one["l2l"].moved[Lane.H2D]


def test_what_does_not_fit_says_why_and_what_would() -> None:
    found = {c.policy: c for c in candidates(make_plan(asked(TRACE, ON, device=ENOUGH), "l2l").device)}
    assert not found["zero-offload"].feasible and found["l2l"].feasible
    assert "keeps all parameters on the device" in found["zero-offload"].reason
    assert "What would fit" in found["zero-offload"].reason


def test_json_has_these_keys_whether_it_fits_or_not() -> None:
    rows = [c.to_json_dict() for c in candidates(*DEVICES)]
    assert all(set(row) == KEYS for row in json.loads(json.dumps(rows)))
    for row in rows:
        assert (row["peaks"] is None) == (row["moved"] is None) == (not row["feasible"]) == (row["reason"] is not None)


def test_tables_name_the_fastest_first_and_the_missing_below() -> None:
    found = candidates(EVERYTHING // 3)
    console = Console(width=80, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(comparison_tables("a model on paper", found, ("a note",)))
    text = capture.get()
    assert "a model on paper" in text and "a note" in text and "…" not in text
    order = sorted((c for c in found if c.step_seconds is not None), key=lambda c: c.step_seconds or 0.0)
    places = [text.index(f" {c.policy} ") for c in order]
    assert places == sorted(places)
    for one in found:
        if not one.feasible:
            assert text.index("Does not fit") < text.index(f"{one.policy}:")


def test_what_holds_for_every_budget_is_said_once() -> None:
    """And what does not is said where it holds."""
    found = candidates(*DEVICES)
    console = Console(width=2000, record=True, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(comparison_tables("a model on paper", found))
    before, _, behind = capture.get().partition("Fits none of these budgets")
    whatever = ("moesys", "harmony", "mobius")
    assert all(behind.count(f"{policy}: ") == 1 and f"{policy}: " not in before for policy in whatever)
    assert "smart-infinity: " in before, "with 1 byte its disk would not help"
    assert "Does not fit with 1 B" in before and "stronghold: device memory" in before and "stronghold" not in behind


def test_a_candidate_has_a_step_or_a_reason() -> None:
    with pytest.raises(ConfigError, match="either has a step or a reason"):
        Candidate("auto", 1, 0.0)
    with pytest.raises(ConfigError, match="either has a step or a reason"):
        Candidate("auto", 1, 0.0, step_seconds=1.0, reason="both")


def test_budgets_are_sizes_with_commas() -> None:
    assert parse_budgets("8MiB,16MiB,8MiB") == (8 * MiB, 16 * MiB)
    assert parse_budgets(None) == ()
    for wrong in ("8MiB,", "x", "0B", ""):
        with pytest.raises(ConfigError, match="--budgets"):
            parse_budgets(wrong)


def test_budgets_are_shares_of_what_everything_takes() -> None:
    shares = parse_budgets("0.2:0.9")
    assert isinstance(shares, Shares) and shares.of(1000) == tuple(range(200, 901, 100))
    assert Shares(0.35, 0.35).of(1000) == (350,) and Shares(0.1, 0.29).of(10) == (1, 2)
    for wrong in ("0.9:0.2", "0:1", "a:b", "0.2:", "0.1:0.2:0.3", "nan:1", "1:inf"):
        with pytest.raises(ConfigError, match=r"--budgets: .*shares"):
            parse_budgets(wrong)


def test_policies_are_sets_or_names_with_commas() -> None:
    assert parse_policies(None) == parse_policies("all") == tuple(PLANNERS)
    assert parse_policies("states") == ("auto", *STATES) and parse_policies("activations") == ("auto", *LITERATURE)
    assert parse_policies("rotor,auto,rotor") == ("rotor", "auto")
    assert parse_policies(" rotor , stream") == ("rotor", "stream")
    assert parse_policies("rotor,states,auto") == ("rotor", "auto", *STATES)
    assert parse_policies("auto,all") == tuple(dict.fromkeys(("auto", *PLANNERS)))
    for wrong in ("rotors", "rotor,", "", "all,none", "rotor stream"):
        with pytest.raises(
            ConfigError, match=r"--policies: there is no policy .*; .*there are all, states, activations"
        ):
            parse_policies(wrong)
    for near, name in {"auto,tspilt": "tsplit", "state": "states"}.items():
        with pytest.raises(ConfigError, match=rf"'{near.split(',')[-1]}'; did you mean {name}\? there are all, states"):
            parse_policies(near)
    with pytest.raises(ConfigError, match=r"'xyz'; there are all, states"):
        parse_policies("xyz")


def test_the_flags_of_compare_are_these() -> None:
    command = typer.main.get_command(app).commands["compare"]  # type: ignore[attr-defined]
    flags = {name for parameter in command.params for name in parameter.opts if name.startswith("--")} - {"--help"}
    asked_for = {"--batch", "--seq", "--dtype", "--optimizer", "--host-memory", "--disk", "--machine"}
    assert flags == asked_for | {
        "--policies",
        "--budgets",
        "--accumulate",
        "--update",
        "--devices",
        "--measure",
        "--plot",
        "--json",
    }
