"""Seconds of an update where the cores and not the bytes are the limit. No torch."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.errors import ConfigError
from forebay.machine import Machine
from forebay.model import Block, Model, Parameter
from forebay.simulation.costs import Costs
from forebay.states import Masters, Moments, moment_states, update_kind
from tests.null.simulating import MACHINE, RATE, seconds_trace, update

NAMES = ("exp_avg", "exp_avg_sq")
NUMEL = 512
SCALES = 2 * NUMEL // 256 * 4
"""Bytes of the scales of both moments: one of 4 bytes for every 256 elements of each."""


def costs(states: tuple[str, ...], machine: Machine = MACHINE, dtype: str = "float32", numel: int = NUMEL) -> Costs:
    itemsize = 4 if dtype == "float32" else 2
    parameter = Parameter("w", (numel,), (1,), dtype, numel * itemsize, 0, True)
    model = Model((Block("b", (parameter,), ("b",), parameter.nbytes),) if numel else ())
    return Costs(replace(seconds_trace([], state_names=states), model=model), machine, Masters.WHOLE)


def known(states: tuple[str, ...], elements: float) -> Machine:
    return replace(MACHINE, update_elements={update_kind(states): elements})


@pytest.mark.parametrize(
    ("states", "kind"),
    [
        (NAMES, "exp_avg+exp_avg_sq:float32"),
        (moment_states(NAMES, "bfloat16"), "exp_avg+exp_avg_sq:bfloat16"),
        (moment_states(NAMES, "8bit"), "exp_avg+exp_avg_sq:8bit"),
        (("exp_avg",), "exp_avg:float32"),
        ((), ""),
    ],
)
def test_kinds_of_updates_have_names(states: tuple[str, ...], kind: str) -> None:
    assert update_kind(states) == kind


@pytest.mark.parametrize(
    ("dtype", "per_element"),
    [
        ("float32", 2 * 2 + 3 * 4),  # two codes in and out; parameter in and out, gradient in
        ("bfloat16", 2 * (4 + 2) + 3 * 2),  # the same with a master
    ],
)
def test_measured_elements_a_second_go_before_bytes(dtype: str, per_element: int) -> None:
    states = moment_states(NAMES, "8bit")
    touched = NUMEL * per_element + 2 * SCALES
    found = costs(states, known(states, elements=2.0), dtype)
    assert found.action(update(touched)) == pytest.approx(NUMEL / 2.0)
    assert found.update_rate == pytest.approx(2.0 * touched / NUMEL)


def test_no_update_is_faster_than_its_bytes() -> None:
    states = moment_states(NAMES, "4bit")
    assert costs(states, known(states, elements=1e9)).update_rate == RATE


@pytest.mark.parametrize("moments", ["bfloat16", "8bit", "4bit"])
def test_what_nobody_measured_takes_as_long_an_element_as_fp32_moments(moments: Moments) -> None:
    states = moment_states(NAMES, moments)
    own, wide = costs(states), costs(NAMES)
    assert wide.update_rate == RATE
    # 2 · 8 bytes of moments, 2 · 4 of parameters, 4 of gradients.
    seconds = NUMEL * 28 / RATE
    nbytes = {"bfloat16": NUMEL * 20, "8bit": NUMEL * 16 + 2 * SCALES, "4bit": NUMEL * 14 + 2 * SCALES}[moments]
    assert own.action(update(nbytes)) == pytest.approx(seconds)
    assert wide.action(update(NUMEL * 28)) == pytest.approx(seconds)


def test_a_rate_of_one_kind_says_nothing_of_another() -> None:
    machine = known(("exp_avg",), elements=1.0)
    assert costs(("exp_avg",), machine).update_rate == 2 * 4 + 3 * 4
    assert costs(NAMES, machine).update_rate == RATE
    assert costs((), machine).update_rate == RATE


def test_a_model_that_trains_nothing_has_the_rate_of_bytes() -> None:
    assert costs(moment_states(NAMES, "8bit"), numel=0).update_rate == RATE


def test_rates_are_kept_and_must_be_above_0() -> None:
    machine = known(NAMES, elements=7.0)
    assert Machine.from_json(machine.to_json()) == machine
    with pytest.raises(ConfigError, match=r"update_elements.exp_avg\+exp_avg_sq:float32"):
        known(NAMES, elements=0.0)
