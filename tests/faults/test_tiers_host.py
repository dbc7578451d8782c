"""Host memory limits, read from trees of /proc and /sys/fs/cgroup that are made up here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.errors import ConfigError
from forebay.tiers.host import HostMemory, available_disk, available_host_memory, free_in
from forebay.units import GiB, MiB

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1_MOUNT = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V1_CPU_MOUNT = "36 31 0:33 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
UNLIMITED_V1 = 9223372036854771712


def write(root: Path, path: str, text: str) -> None:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def machine(root: Path, *, mounts: str = "", groups: str = "") -> None:
    """16 GiB of memory, 12 of them available."""
    write(root, "proc/meminfo", f"MemTotal: {16 * MiB} kB\nMemFree: {1 * MiB} kB\nMemAvailable: {12 * MiB} kB")
    write(root, "proc/self/mountinfo", mounts)
    write(root, "proc/self/cgroup", groups)


def v2(root: Path, group: str, limit: str, current: int, *, inactive_file: int = 0, high: str = "max") -> None:
    folder = f"sys/fs/cgroup/{group}"
    write(root, f"{folder}/memory.max", limit)
    write(root, f"{folder}/memory.high", high)
    write(root, f"{folder}/memory.current", str(current))
    write(root, f"{folder}/memory.stat", f"anon 5\ninactive_file {inactive_file}\nactive_file 7")


def v1(root: Path, group: str, limit: int, usage: int, *, total_inactive_file: int = 0) -> None:
    folder = f"sys/fs/cgroup/memory/{group}"
    write(root, f"{folder}/memory.limit_in_bytes", str(limit))
    write(root, f"{folder}/memory.usage_in_bytes", str(usage))
    write(root, f"{folder}/memory.stat", f"inactive_file 3\ntotal_inactive_file {total_inactive_file}")


def test_without_a_cgroup_the_machine_is_the_limit(tmp_path: Path) -> None:
    machine(tmp_path)
    assert available_host_memory(tmp_path) == HostMemory(16 * GiB, 12 * GiB, "MemAvailable of /proc/meminfo")


def test_v2_limit_counts_and_dropped_page_cache_is_free(tmp_path: Path) -> None:
    machine(tmp_path, mounts=V2_MOUNT, groups="0::/job")
    v2(tmp_path, "job", str(8 * GiB), 5 * GiB, inactive_file=2 * GiB)
    memory = available_host_memory(tmp_path)
    assert memory == HostMemory(8 * GiB, 5 * GiB, "cgroup limit /sys/fs/cgroup/job/memory.max")


def test_an_ancestor_may_be_the_tightest(tmp_path: Path) -> None:
    machine(tmp_path, mounts=V2_MOUNT, groups="0::/slice/job/step")
    v2(tmp_path, "slice", str(6 * GiB), 5 * GiB)
    v2(tmp_path, "slice/job", "max", 1 * GiB)
    v2(tmp_path, "slice/job/step", str(4 * GiB), 1 * GiB)
    memory = available_host_memory(tmp_path)
    assert memory == HostMemory(4 * GiB, 1 * GiB, "cgroup limit /sys/fs/cgroup/slice/memory.max")


def test_memory_high_counts(tmp_path: Path) -> None:
    machine(tmp_path, mounts=V2_MOUNT, groups="0::/job")
    v2(tmp_path, "job", str(8 * GiB), 1 * GiB, high=str(3 * GiB))
    memory = available_host_memory(tmp_path)
    assert memory == HostMemory(3 * GiB, 2 * GiB, "cgroup limit /sys/fs/cgroup/job/memory.high")


def test_a_limit_above_what_the_machine_has_left_changes_nothing_but_the_total(tmp_path: Path) -> None:
    machine(tmp_path, mounts=V2_MOUNT, groups="0::/job")
    v2(tmp_path, "job", str(15 * GiB), 1 * GiB)
    assert available_host_memory(tmp_path) == HostMemory(15 * GiB, 12 * GiB, "MemAvailable of /proc/meminfo")


def test_a_full_group_leaves_nothing_and_not_less(tmp_path: Path) -> None:
    machine(tmp_path, mounts=V2_MOUNT, groups="0::/job")
    v2(tmp_path, "job", str(4 * GiB), 5 * GiB)
    assert available_host_memory(tmp_path).available == 0


def test_v1_limit_with_the_hierarchy_of_hybrid_mounts(tmp_path: Path) -> None:
    machine(
        tmp_path,
        mounts="\n".join([V1_CPU_MOUNT, V1_MOUNT]),
        groups="5:cpu,cpuacct:/elsewhere\n4:memory:/pod/job\n0::/",
    )
    v1(tmp_path, "", UNLIMITED_V1, 9 * GiB)
    v1(tmp_path, "pod", 7 * GiB, 6 * GiB, total_inactive_file=1 * GiB)
    v1(tmp_path, "pod/job", UNLIMITED_V1, 1 * GiB)
    memory = available_host_memory(tmp_path)
    assert memory == HostMemory(7 * GiB, 2 * GiB, "cgroup limit /sys/fs/cgroup/memory/pod/memory.limit_in_bytes")


@pytest.mark.parametrize(
    ("mount_root", "group"),
    [
        ("/docker/abc", "/docker/abc"),  # the host's names, of which the container sees only its own group
        ("/", "/docker/abc"),  # named from outside: no such folder in here
        ("/docker/abc", "/"),  # named from inside a namespace
        ("/", "/../../outside"),  # a group that lies outside of the namespace
    ],
)
def test_a_container_reads_the_group_that_is_mounted(tmp_path: Path, mount_root: str, group: str) -> None:
    machine(tmp_path, mounts=V2_MOUNT.replace(" / ", f" {mount_root} ", 1), groups=f"0::{group}")
    v2(tmp_path, "", str(2 * GiB), 1 * GiB)
    assert available_host_memory(tmp_path).available == 1 * GiB


def test_a_mount_point_with_a_space(tmp_path: Path) -> None:
    machine(tmp_path, mounts=V2_MOUNT.replace("/sys/fs/cgroup", "/my\\040groups"), groups="0::/job")
    write(tmp_path, "my groups/job/memory.max", str(3 * GiB))
    write(tmp_path, "my groups/job/memory.current", str(1 * GiB))
    assert available_host_memory(tmp_path).available == 2 * GiB


@pytest.mark.parametrize(
    ("name", "used", "command"),
    [("Max address space", "VmSize", "ulimit -v"), ("Max data size", "VmData", "ulimit -d")],
)
def test_the_limit_of_a_process_counts_what_it_has_mapped(tmp_path: Path, name: str, used: str, command: str) -> None:
    machine(tmp_path)
    write(tmp_path, "proc/self/status", f"Name:\tpython\n{used}:\t {3 * MiB} kB")
    for limit, free in ((8 * GiB, 5 * GiB), (2 * GiB, 0)):
        write(tmp_path, "proc/self/limits", f"Limit  Soft  Hard  Units\n{name:26}{limit}  unlimited  bytes")
        found = HostMemory(limit, free, f"limit of this process ({command})")
        assert available_host_memory(tmp_path) == found
    write(tmp_path, "proc/self/limits", f"Limit  Soft  Hard  Units\n{name:26}unlimited  unlimited  bytes")
    assert available_host_memory(tmp_path).available == 12 * GiB


def test_no_meminfo_asks_for_host_memory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give host_memory"):
        available_host_memory(tmp_path)


def test_this_machine_has_memory_and_disk(tmp_path: Path) -> None:
    memory = available_host_memory()
    assert 0 < memory.available <= memory.total
    assert available_disk(tmp_path) > 0


def test_missing_path_has_no_room_to_ask_about(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        available_disk(tmp_path / "missing")


def test_a_file_is_no_folder_to_ask_about(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for paths in ([f"{tmp_path}/file"], [str(tmp_path), f"{tmp_path}/file"]):
        with pytest.raises(ConfigError, match=r"file.*: Not a directory; name a folder that exists"):
            free_in(paths)


def test_torch_is_not_loaded() -> None:
    code = "import sys, forebay.tiers.host; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
