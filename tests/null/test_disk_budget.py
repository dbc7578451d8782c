"""The disk of a budget: one folder or several, as written and as JSON."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from forebay.budgets import Budget, DiskBudget, DiskShare
from forebay.calls import Calls
from forebay.cli.flags import one_disk as disks_of_flags
from forebay.errors import ConfigError, UnitError
from forebay.plans import Plan, Streaming
from forebay.units import GiB, MiB


def test_one_folder_is_as_it_was() -> None:
    assert DiskBudget.of("/nvme") == DiskBudget("/nvme")
    assert DiskBudget.of("/nvme:1GiB") == DiskBudget("/nvme", GiB)
    assert DiskBudget("/nvme", GiB).folders == (DiskShare("/nvme", GiB),)


def test_a_path_is_as_its_text() -> None:
    assert DiskBudget.of(Path("/nvme")) == DiskBudget("/nvme")
    assert Budget.of(GiB, disk=Path("/nvme")) == Budget.of(GiB, disk="/nvme")


def test_several_folders_add_up() -> None:
    budget = DiskBudget.of("/a:1GiB,/b:3GiB")
    assert budget == DiskBudget("/a", 4 * GiB, (DiskShare("/b", 3 * GiB),))
    assert budget.folders == (DiskShare("/a", GiB), DiskShare("/b", 3 * GiB))
    free = DiskBudget.of("/a,/b")
    assert free.nbytes is None and free.folders == (DiskShare("/a"), DiskShare("/b"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("/a:0B", "more than 0 bytes, got 0 for /a"),
        ("/a:1GiB,/b:0B", "more than 0 bytes, got 0 for /b"),
        ("/a:1GiB,/b", "either each has a size or none"),
        ("/a,/b:1GiB", "either each has a size or none"),
        ("/a:1GiB,/b:1GiB,/a:2GiB", "/a is named twice"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DiskBudget.of(text)


def test_others_that_leave_nothing_for_the_first_are_refused() -> None:
    with pytest.raises(ConfigError, match="got 0 for /a"):
        DiskBudget("/a", GiB, (DiskShare("/b", GiB),))


def test_a_plan_keeps_the_folders_and_the_way_they_are_read() -> None:
    streaming = Streaming(disk_reads=Calls(2 * MiB, 3), disk_writes=Calls(MiB))
    plan = Plan("test", Budget(GiB, disk=DiskBudget.of("/a:1GiB,/b:3GiB")), (), streaming, GiB, 0, 0)
    assert Plan.from_json(plan.to_json()) == plan
    for field in ("disk_reads", "disk_writes"):
        with pytest.raises(ConfigError, match=f"block of {field} must be whole pages of 4096 bytes, got 100"):
            replace(streaming, **{field: Calls(100)})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [{"block": 0}, {"depth": 0}])
def test_calls_that_move_nothing_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"calls of 1 byte or more, 1 at a time or more, got a block of \d+ and"):
        Calls(**wrong)


def test_calls_in_words() -> None:
    assert str(Calls(2 * MiB, 3)) == "calls of 2.0 MiB, 3 at a time"


def test_several_flags_are_as_one_with_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert disks_of_flags(None) is None and disks_of_flags([]) is None
    assert disks_of_flags(["runs,old"]) == "runs,old"  # one flag stands as it is
    assert disks_of_flags(["/a:1GiB", "/b:3GiB"]) == "/a:1GiB,/b:3GiB"
    # Relative ones too, which a comma alone would not tell from one path with a comma in it.
    text = disks_of_flags(["a,b", "c"])
    assert text is not None
    assert DiskBudget.of(text).folders == (DiskShare(f"{tmp_path}/a,b"), DiskShare(f"{tmp_path}/c"))
    with pytest.raises(UnitError, match="without a path"):
        disks_of_flags(["/a", " "])
