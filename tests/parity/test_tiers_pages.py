"""What the kernel knows of the memory that arenas and bounce buffers are made of."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import pytest

from forebay.memory import Kind, Ledger, Tier
from forebay.tiers.arena import HostArena
from forebay.tiers.disk import DiskFolder
from forebay.tiers.pages import map_pages

MiB = 1 << 20


def flags_at(address: int) -> set[str]:
    """``VmFlags`` of the mapping that ``address`` is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and ":" not in head:
            low, high = (int(number, 16) for number in head.split("-"))
            inside = low <= address < high
        elif inside and head == "VmFlags:":
            return set(line.split()[1:])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def address_of(pages: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(pages))


needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages"
)


@needs_huge_pages
def test_memory_of_arenas_is_private_advised_to_be_huge_and_no_childs() -> None:
    # hg: MADV_HUGEPAGE; dc: not copied when forking; sh: shared, of which there are no huge pages.
    with HostArena(5 * MiB, Kind.STATE, ledger=Ledger(Tier.HOST), what="arena") as arena:
        flags = flags_at(arena.memory.data_ptr())
        assert {"hg", "dc"} <= flags and "sh" not in flags


@needs_huge_pages
def test_bounce_buffers_of_the_disk_are_the_same(tmp_path: Path) -> None:
    with DiskFolder(tmp_path, ledger=Ledger(Tier.DISK)) as folder:
        block = folder._bounce.get()
        flags = flags_at(address_of(block))
        assert len(block) == folder.policy.bounce_nbytes
        assert {"hg", "dc"} <= flags and "sh" not in flags


def test_pages_are_zero_and_as_many_as_asked_for() -> None:
    pages = map_pages(3 * mmap.PAGESIZE + 1)
    assert len(pages) == 3 * mmap.PAGESIZE + 1 and not any(pages[:])
