"""Refusals that name the largest weight in tiles and the loss in pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forebay.errors import DoesNotFit
from forebay.loss import Cut, logits_nbytes
from forebay.planners import Problem, make_plan
from forebay.remedies import Remedy
from forebay.trace import Trace
from forebay.units import KiB, MiB
from tests.null.planning import asked, machine
from tests.null.synthetic import ADAM, block
from tests.null.tracing import Layer, chain_trace

ON = machine(disk=1e8)
LOGITS = logits_nbytes(64, 8192)
CUT = Cut(64 * KiB, LOGITS, exact=False)


def with_head(rows: int, out: int) -> Trace:
    """Two small layers and a head of ``rows`` by 1024, which saves ``out`` bytes and makes as many."""
    blocks = [block(f"layer{i}", ((64, 64), "float32", True)) for i in range(2)]
    blocks.append(block("head", ((rows, 1024), "float32", True)))
    layers = [Layer(b.name, saved=(4096,), out=4096) for b in blocks[:2]]
    layers.append(Layer("head", saved=(out,), out=out))
    return chain_trace(tuple(blocks), layers, input_nbytes=4096, state_names=ADAM)


def remedies(wanted: Problem) -> tuple[DoesNotFit, dict[str, Remedy]]:
    with pytest.raises(DoesNotFit) as caught:
        make_plan(wanted, "auto")
    return caught.value, {r.what: r for r in caught.value.nearest}


def test_logits_that_are_too_large_are_told_of_pieces() -> None:
    wanted = replace(asked(with_head(64, LOGITS), ON, device=2 * MiB), cut=CUT)
    error, found = remedies(wanted)
    assert "--loss chunked" in found["loss"].words and "64.0 KiB" in found["loss"].words
    assert found["loss"].needed <= 2 * MiB < error.needed - CUT.logits and found["loss"].estimate
    # Where nobody can cut the loss nobody is told to.
    assert "loss" not in remedies(replace(wanted, cut=None))[1]


def test_a_weight_that_is_too_large_is_told_of_tiles_with_a_size() -> None:
    _, found = remedies(asked(with_head(8192, 4096), ON, device=16 * MiB))
    assert "--tile 4MiB" in found["tile"].words and found["tile"].needed <= 16 * MiB
    assert "loss" not in found


def test_both_where_neither_does_alone() -> None:
    logits = 48 * MiB
    wanted = replace(asked(with_head(8192, logits), ON, device=16 * MiB), cut=Cut(64 * KiB, logits, exact=False))
    _, found = remedies(wanted)
    assert "--tile" in found["tile"].words and "--loss chunked" in found["tile"].words
    assert "loss" not in found and found["tile"].needed <= 16 * MiB
    alone = remedies(replace(wanted, cut=None))[1].get("tile")
    assert alone is None or alone.needed > 16 * MiB


def test_what_does_not_do_either_is_named_with_the_memory_that_it_takes() -> None:
    wanted = asked(with_head(8192, 4096), ON, device=64 * KiB)
    error, found = remedies(wanted)
    assert found["tile"].words.startswith("device_memory ") and "--tile" in found["tile"].words
    assert 64 * KiB < found["tile"].needed < error.needed // 2
