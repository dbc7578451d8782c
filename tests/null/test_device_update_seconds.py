"""How long updates on a card are foretold to take: by the bytes that torch's ops move, or by how many there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.layout import needs_master, touched_nbytes, with_masters
from forebay.model import Model
from forebay.simulation.device_updates import CALL, Ops, device_update_rate, ops_of
from forebay.states import Masters, moment_states
from tests.null.simulating import MACHINE
from tests.null.synthetic import ADAM, block

CARD = replace(MACHINE, device_kind="cuda", device_bandwidth=1e12, launch_seconds=5e-6)


def of(count: int, size: int, dtype: str = "bfloat16") -> Model:
    return Model((block("b", *[((size,), dtype, True)] * count),))


def seconds(model: Model, states: tuple[str, ...] = ADAM, masters: Masters = Masters.WHOLE) -> float:
    """Of an update of all of ``model``."""
    trained = model.blocks[0].parameters
    streams = with_masters(states, masters) if needs_master(trained[0]) else states
    return sum(touched_nbytes(streams, p) for p in trained) / device_update_rate(model.blocks, states, CARD, masters)


@pytest.mark.parametrize(("masters", "nbytes"), [(Masters.WHOLE, 28 + 2 * 6), (Masters.LOWER, 28 + 6 + 70)])
def test_a_large_parameter_takes_what_its_bytes_take(masters: Masters, nbytes: int) -> None:
    """The fused update, a gradient widened, and the parameter written: narrowed, or put together and taken apart."""
    assert seconds(of(1, 8 * CALL), masters=masters) == pytest.approx(nbytes * 8 * CALL / 1e12)


def test_many_small_parameters_take_their_launches() -> None:
    """One for the gradient of each and fifteen for its halves, with the two of the fused update of all."""
    launches = 200 * (1 + 15) + 2 * 200 * 64 / CALL
    assert seconds(of(200, 64), masters=Masters.LOWER) == pytest.approx(launches * 5e-6)


def test_fp32_is_as_fast_as_memory() -> None:
    assert device_update_rate(of(1, 8 * CALL, "float32").blocks, ADAM, CARD, Masters.WHOLE) == pytest.approx(1e12)
    frozen = Model((block("b", ((64,), "float32", False)),))
    assert device_update_rate(frozen.blocks, ADAM, CARD, Masters.WHOLE) == 0


def test_ops_add_up() -> None:
    """Rounding by chance, and moments in 8 bits, each beside the fused update."""
    (drawn,) = of(1, CALL).without_masters().blocks[0].parameters
    (wide,) = of(1, CALL, "float32").blocks[0].parameters
    plain, eight = (ops_of(wide, states, Masters.WHOLE) for states in (ADAM, moment_states(ADAM, "8bit")))
    assert eight.nbytes == pytest.approx(plain.nbytes + 2 * 38.1) and eight.launches(CALL) > 70
    assert ops_of(drawn, ADAM, Masters.WHOLE) == plain + Ops(130, pieces=16) + Ops(12, calls=2)
