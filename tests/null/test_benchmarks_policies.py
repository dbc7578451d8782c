"""The benchmark of policies: who is best, who is behind, what the table says, what is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from math import inf
from pathlib import Path

import pytest

from benchmarks.case import BenchmarkError
from benchmarks.host import Code, Hardware
from benchmarks.policies.record import ARCHIVE, Comparison, Instance, Outcome, latest
from benchmarks.policies.run import MACHINES, MODELS, SHARES, Batch, compare, in_words, instances
from benchmarks.policies.table import render, write
from forebay.catalogue import machine_names
from forebay.planners import STATES
from tests.null.planning import chain, machine

GiB = 1 << 30


def instance(auto: float | None, **published: float | None) -> Instance:
    return Instance(
        model="small",
        batch=2,
        seq=1024,
        machine="t4",
        share=0.5,
        device=7 * GiB,
        auto=Outcome("auto", auto),
        published=tuple(Outcome(name, seconds) for name, seconds in published.items()),
        why=("compute binds",),
    )


def comparison(*found: Instance, day: int = 21) -> Comparison:
    return Comparison(
        date=datetime(2026, 11, day, tzinfo=UTC),
        command="scripts/bench policies --models small",
        hardware=Hardware("a processor", 2, 1 << 34),
        versions={},
        code=Code("abcdef0123456789", False, "fedcba9876543210"),
        instances=found,
    )


def test_it_is_held_against_the_best_of_those_that_fit() -> None:
    one = instance(1.02, l2l=2.0, elixir=1.0, lohan=None)
    assert one.best is not None and one.best.policy == "elixir"
    assert one.ratio == pytest.approx(1.02) and one.behind and not one.ties
    assert instance(1.0099, elixir=1.0).ties and not instance(1.0099, elixir=1.0).behind
    assert not instance(0.9, elixir=1.0).ties


def test_other_numbers_do_not_count() -> None:
    one = instance(1.0, elixir=1.5)
    cheat = Outcome("delayed", 0.5, exact=False)
    assert Instance(**{**vars(one), "published": (*one.published, cheat)}).best == one.published[0]


def test_where_only_another_fits_it_is_behind_and_where_none_fits_nothing_is_said() -> None:
    assert instance(None, elixir=1.0).ratio == inf and instance(None, elixir=1.0).behind
    none = instance(1.0, elixir=None)
    assert none.ratio is None and not none.behind and not none.ties
    assert "no published policy fits" in in_words(none) and "BEHIND" in in_words(instance(2.0, elixir=1.0))


def test_the_newest_of_every_instance_is_kept(tmp_path: Path) -> None:
    old, new = comparison(instance(2.0, elixir=1.0)), comparison(instance(0.5, elixir=1.0), day=22)
    for one in (old, new):
        ARCHIVE.save(one, tmp_path)
    assert ARCHIVE.every(tmp_path) == (old, new)
    assert latest(ARCHIVE.every(tmp_path)) == new.instances


def test_table(tmp_path: Path) -> None:
    text = render([comparison(instance(1.5, elixir=1.0, l2l=2.0, lohan=None))])
    assert "| t4 | 7.0 GiB (50 %) | 1.500 s | elixir 1.000 s | **1.500** | l2l 2.00, lohan - |" in text
    assert "behind the best of them by more than 1 % in 1, within that of it in 0 and ahead in 0" in text
    assert "- small on t4 within 7.0 GiB: `auto` is **behind** `elixir` (1.500): compute binds." in text
    assert "1 of them: commit abcdef012345, sources fedcba987654; 2026-11-21 00:00 UTC" in text
    assert "`auto` ties with `elixir` (1.005)" in render([comparison(instance(1.005, elixir=1.0))])
    assert "- small" not in render([comparison(instance(0.5, elixir=1.0))])
    assert render([]) == "No comparison is kept yet.\n"
    readme = tmp_path / "README.md"
    readme.write_text("<!-- policies: begin -->\nold\n<!-- policies: end -->\n")
    write(readme)
    assert "\nold\n" not in readme.read_text()


def test_an_instance_is_planned_by_auto_and_by_everyone() -> None:
    trace, on = chain(4), machine()
    everything = next(instances("chain", Batch(1, 8), trace, [on], [1.0]))
    # For models with experts, for several micro-batches, and for a disk.
    others = {"moesys", "harmony", "mobius", "smart-infinity"}
    assert [one.policy for one in everything.published] == [name for name in STATES if name not in others]
    assert everything.auto.step_seconds and not everything.behind
    assert everything.simulations > 0 and "binds" in everything.why[0]
    least = next(instances("chain", Batch(1, 8), trace, [on], [1e-15]))
    assert least.auto.step_seconds is None and "device memory" in least.auto.refusal and least.why == ()


def test_what_is_compared_is_there() -> None:
    assert len(MODELS) == 5 and len(MACHINES) == 8 and len(SHARES) == 3
    assert set(MACHINES) <= set(machine_names())


def test_unknown_names_and_shares_are_refused() -> None:
    with pytest.raises(BenchmarkError, match="no model gpt2-xxl here; did you mean gpt2-xl"):
        compare(["gpt2-xxl"], [], "", print, SHARES)
    with pytest.raises(BenchmarkError, match="no machine abacus"):
        compare([], ["abacus"], "", print, SHARES)
    with pytest.raises(BenchmarkError, match="above 0 and at most 1"):
        compare([], [], "", print, [1.5])
