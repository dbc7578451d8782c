"""The benchmark of papers: shapes, the search for the largest, what is kept and printed. Not what it finds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest

from benchmarks.case import BenchmarkError
from benchmarks.host import Code, Hardware
from benchmarks.papers import activations, devices, shapes
from benchmarks.papers.activations import ACTIVATIONS, DRIVES
from benchmarks.papers.claims import CLAIMS, EIGHT_WIDE, FOUR_WIDE, THREE_WIDE, TWO_WIDE
from benchmarks.papers.nets import Megatron, ResNet
from benchmarks.papers.record import ARCHIVE, Comparison, Point, Row
from benchmarks.papers.run import compare, in_words
from benchmarks.papers.segments import ENDLESS, largest_segmented, segmented
from benchmarks.papers.shapes import HEAD, SEQ, Gpt, best, largest, last_that_fits, with_device
from benchmarks.papers.table import render, write
from forebay.catalogue import load_machine
from forebay.machine import Machine

CARD = load_machine("v100-32gb")


def point(parameters: int = 10, seconds: float | None = 2.0, batch: int = 1) -> Point:
    return Point("lohan", "v100-32gb", "a model", parameters, batch, seconds, 8e12, refusal="" if seconds else "small")


def row(name: str = "a-claim", *, agrees: bool = True, ours: str = "12B") -> Row:
    return Row(name, "System", "largest model", "13B", ours, agrees, "one card", (point(),))


def comparison(*rows: Row, day: int = 21) -> Comparison:
    return Comparison(
        date=datetime(2026, 11, day, tzinfo=UTC),
        command="scripts/bench papers",
        hardware=Hardware("a processor", 2, 1 << 34),
        versions={"forebay": "0.1.0"},
        code=Code("abcdef", False, "123"),
        rows=rows,
    )


def test_sizes_are_those_that_papers_name() -> None:
    for shape, billions in ((Gpt(50, 4096), 10), (Gpt(65, 4096), 13), (Gpt(500, 2560), 39.5), (Gpt(96, 12288), 175)):
        assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.04)
    assert Gpt(1, HEAD).flops(2) == 8.0 * Gpt(1, HEAD).parameters * 2 * SEQ
    for ladder in (TWO_WIDE, FOUR_WIDE, THREE_WIDE, EIGHT_WIDE):
        sizes = [shape.parameters for shape in ladder]
        assert sizes == sorted(sizes) and all(shape.hidden % HEAD == 0 for shape in ladder)


@pytest.mark.parametrize("fitting", [0, 1, 4, 7])
def test_the_largest_that_fits_is_found(fitting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = [Gpt(layers, HEAD) for layers in range(1, 8)]

    def planned(policy: str, shape: Gpt, batch: int, machine: Machine) -> Point:
        return point(shape.layers, 1.0 if shape.layers <= fitting else None)

    monkeypatch.setattr(shapes, "point", planned)
    found, tried = largest("lohan", ladder, 1, CARD)
    assert (found.parameters if found else 0) == fitting
    assert len(tried) <= 3 and any(not one.fits for one in tried) == (fitting < 7)


def test_what_asks_for_more_than_one_that_does_not_fit_is_not_tried() -> None:
    asked: list[int] = []

    def planned(size: int) -> Point:
        asked.append(size)
        return point(size, 1.0 if size < 5 else None)

    found, tried = last_that_fits([partial(planned, size) for size in range(16)])
    assert found is not None and found.parameters == 4
    assert [one.parameters for one in tried] == sorted(asked) and len(asked) <= 5
    assert last_that_fits([]) == (None, ())


def test_the_best_batch_has_the_most_flops_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: dict[int, float | None] = {1: 4.0, 2: 1.0, 4: None}
    monkeypatch.setattr(shapes, "point", lambda policy, shape, batch, *_: point(1, seconds[batch], batch))
    found, tried = best("lohan", Gpt(1, HEAD), tuple(seconds), CARD)
    assert found is not None and found.batch == 2 and found.teraflops == 8.0 and len(tried) == 3
    assert best("lohan", Gpt(1, HEAD), (4,), CARD)[0] is None


def test_a_small_model_is_planned() -> None:
    pytest.importorskip("transformers")
    one = shapes.point("l2l", Gpt(2, HEAD), 1, CARD)
    assert one.fits and one.teraflops > 0 and 0 < one.device < CARD.device_capacity
    # 16 bytes a parameter and no less: two of it and of its gradient, fp32 master and moments.
    assert one.host >= 16 * one.parameters * 0.99 and one.disk == 0


def test_policies_over_several_devices_are_set_beside_each_other() -> None:
    pytest.importorskip("transformers")
    shape = Gpt(4, HEAD)
    asked = devices.bench(shape, 1, CARD, "2:25GB")
    gain, points = devices.pair(shape, asked, ("dapple", "dapple-recompute"))
    assert gain > 1 and [one.policy for one in points] == ["dapple", "dapple-recompute"]
    assert all(one.batch == 2 * devices.EACH and one.flops == shape.flops(one.batch) and one.device for one in points)
    small = devices.bench(shape, 1, replace(CARD, device_capacity=1 << 20), "2")
    gain, points = devices.pair(shape, small, ("mobius", "harmony"))
    assert gain == 0 and not any(one.fits for one in points)


NET = ResNet((2, 2, 2, 2))


def test_segments_are_between_everything_kept_and_every_block_by_itself() -> None:
    pytest.importorskip("transformers")
    batch, card = 8, with_device(CARD, ENDLESS)
    kept, blocks = (shapes.point(policy, NET, batch, card) for policy in ("resident", "recompute"))
    whole, pairs, single = (segmented(NET, batch, card, size) for size in (8, 2, 1))
    # One segment is the last one, which does not run again.
    assert whole.device == kept.device and whole.step_seconds == pytest.approx(kept.step_seconds)
    assert whole.device > pairs.device and whole.step_seconds < pairs.step_seconds < single.step_seconds
    # A segment of one block is what a plan says too, but for the last block, which need not run again.
    assert single.device == blocks.device
    assert blocks.step_seconds * 0.95 <= single.step_seconds <= blocks.step_seconds
    small = with_device(CARD, (whole.device + pairs.device) // 2)
    assert not segmented(NET, batch, small, 8).fits and segmented(NET, batch, small, 2).fits
    found, tried = largest_segmented(NET, (4, 8, 64), small)
    assert found is not None and found.batch == 8 and len(tried) == 2


def test_networks_have_the_sizes_of_their_names() -> None:
    pytest.importorskip("transformers")
    assert str(ResNet((3, 4, 6, 3))) == "ResNet-50" and str(ResNet((3, 4, 23, 3))) == "ResNet-101"
    assert ResNet((3, 4, 6, 3)).parameters / 1e6 == pytest.approx(25.6, rel=0.01)
    # Four multiply-adds a thousand million an image, three times in a step: forward, and twice as much backward.
    assert ResNet((3, 4, 6, 3)).flops(1) / 1e9 == pytest.approx(3 * 2 * 4.1, rel=0.05)
    assert Megatron(48, 6144, 64).parameters / 1e9 == pytest.approx(22, rel=0.02)
    assert Megatron(96, 12288, 96).parameters / 1e9 == pytest.approx(175, rel=0.02)


def test_a_claim_on_activations_makes_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(activations, "RESNET_101", NET)
    monkeypatch.setattr(activations, "SEGMENT_SIZES", (2,))
    one = ACTIVATIONS["rotor-segments"]()
    assert [each.policy for each in one.points] == ["sqrt(n)", "rotor"] and one.name == "rotor-segments"
    assert one.points[1].fits and one.points[1].device <= one.points[0].device
    assert f"2 blocks {one.points[0].step_seconds / one.points[1].step_seconds - 1:+.1%}" in one.ours


def test_fewer_drives_are_slower() -> None:
    whole, single = (activations._drives(CARD, count) for count in (DRIVES, 1))
    assert whole == CARD and whole.disk is not None and single.disk is not None
    assert single.disk.write.curve.best * DRIVES == pytest.approx(whole.disk.write.curve.best)


def test_table(tmp_path: Path) -> None:
    kept: Sequence[Comparison] = (
        comparison(row(), row("other", agrees=False)),
        comparison(row(ours="14B"), day=22),
    )
    for one in kept:
        ARCHIVE.save(one, tmp_path)
    assert tuple(ARCHIVE.every(tmp_path)) == kept
    text = render(kept)
    # The newer figure of the first claim, and the only one of the second.
    assert "| System | largest model | 13B | 14B | agrees |" in text
    assert "| System | largest model | 13B | 12B | **differs** |" in text and text.count("- System, ") == 2
    assert "commit abcdef; 2026-11-22" in text
    place = tmp_path / "policies.md"
    place.write_text("<!-- papers: begin -->\nto be replaced\n<!-- papers: end -->\nafter")
    write([place])
    assert "to be replaced" not in place.read_text() and place.read_text().endswith("after")
    assert in_words(row()).endswith("13B; ours 12B (agrees)")
    assert render([]) == "No comparison is kept yet.\n"


def test_an_unknown_claim() -> None:
    with pytest.raises(BenchmarkError, match="there is no claim nobody; there are zero-offload-size"):
        compare(["nobody"], "", print)
    assert len(CLAIMS) == len({claim.__name__ for claim in CLAIMS.values()}) and set(ACTIVATIONS) < set(CLAIMS)
