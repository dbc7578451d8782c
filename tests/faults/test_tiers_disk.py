"""Disk files: round trips, faults of the file system injected through the Io seam, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.errors import ConfigError, DiskFull, ForebayError, HostOutOfMemory, StorageError, UsageError
from forebay.memory import Kind, Ledger, Tier
from forebay.tiers.disk import DiskFile, DiskFolder, DiskPolicy
from forebay.tiers.io import Io, SystemIo
from forebay.units import KiB, MiB

PAGE = 4096
SMALL = DiskPolicy(block=4 * PAGE)  # several system calls in a small file


@final
@dataclass
class ScriptedIo(Io):
    """The real calls, except where ``faults`` says what happens instead of the n-th (from 0) call of a name.

    A fault is a negative error number, or the number of bytes that a transfer stops after. ``always`` holds for every
    call of a name.
    """

    faults: dict[tuple[str, int], int] = field(default_factory=dict)
    always: dict[str, int] = field(default_factory=dict)
    calls: list[tuple[str, int]] = field(default_factory=list)
    free: int | None = None
    before_read: Callable[[], object] = lambda: None
    system: SystemIo = field(default_factory=SystemIo)

    def free_bytes(self, path: Path) -> int:
        return self.system.free_bytes(path) if self.free is None else self.free

    def make_folder(self, path: Path) -> None:
        self._fail("make_folder")
        self.system.make_folder(path)

    def open_new(self, path: Path, direct: bool) -> int:
        try:
            self._fail("open_direct" if direct else "open")
        except OSError:
            path.touch()  # as kernels do: the file is made, then O_DIRECT is refused
            raise
        return self.system.open_new(path, direct)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._fail("allocate")
        self.system.allocate(fd, nbytes)

    def set_direct(self, fd: int, direct: bool) -> None:
        self.system.set_direct(fd, direct)

    def preadv(self, fd: int, buffer: memoryview, offset: int) -> int:
        self.before_read()
        return self._transfer("preadv", self.system.preadv, fd, buffer, offset)

    def pwritev(self, fd: int, buffer: memoryview, offset: int) -> int:
        return self._transfer("pwritev", self.system.pwritev, fd, buffer, offset)

    def _transfer(
        self, name: str, call: Callable[[int, memoryview, int], int], fd: int, buffer: memoryview, offset: int
    ) -> int:
        stop = self._next(name)
        if stop is None:
            return call(fd, buffer, offset)
        if stop < 0:
            raise OSError(-stop, os.strerror(-stop))
        # A transfer that stops early: all the bytes move, so that the test sees whether the caller believes the count.
        return min(stop, call(fd, buffer, offset))

    def _fail(self, name: str) -> None:
        code = self._next(name)
        if code is not None:
            raise OSError(-code, os.strerror(-code))

    def _next(self, name: str) -> int | None:
        count = sum(1 for called, _ in self.calls if called == name)
        self.calls.append((name, count))
        return self.faults.get((name, count), self.always.get(name))


@dataclass
class Tiers:
    disk: Ledger = field(default_factory=lambda: Ledger(Tier.DISK, 64 * MiB))
    host: Ledger = field(default_factory=lambda: Ledger(Tier.HOST, 64 * MiB))


@pytest.fixture
def tiers() -> Tiers:
    return Tiers()


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path, tiers: Tiers) -> Iterator[None]:
    """Whatever a test does: no descriptor, no file, no byte in a ledger survives it."""
    before = set(os.listdir("/proc/self/fd"))

    def left() -> list[object]:
        folders = [p for p in tmp_path.iterdir() if p.name.startswith("forebay-")]
        return [
            *folders,
            *(set(os.listdir("/proc/self/fd")) - before),
            *filter(None, [tiers.disk.live, tiers.host.live]),
        ]

    yield
    if left():  # a traceback in a reference cycle may hold a file; only what survives the collector is left behind
        gc.collect()
    assert left() == []


def pattern(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def tensor_at(skew: int, nbytes: int) -> torch.Tensor:
    """A tensor whose memory starts ``skew`` bytes after a page."""
    return torch.frombuffer(mmap.mmap(-1, skew + nbytes + 1), dtype=torch.uint8)[skew : skew + nbytes]


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "buffered"])
def shared_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DiskFile]:
    policy = DiskPolicy(block=SMALL.block, direct=request.param)
    with DiskFolder(tmp_path_factory.mktemp("disk"), ledger=Ledger(Tier.DISK), policy=policy) as folder:
        file = folder.create("moments", 64 * PAGE)
        if file.direct is not request.param:
            pytest.skip("this file system refuses O_DIRECT")
        yield file


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, 63),
    length=st.integers(0, 64),
    skew=st.sampled_from([0, 1, 64, 512, 4095]),
    as_view=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_round_trip(shared_file: DiskFile, start: int, length: int, skew: int, as_view: bool, seed: int) -> None:
    nbytes = min(length, 64 - start) * PAGE
    before, after = torch.empty(64 * PAGE, dtype=torch.uint8), torch.empty(64 * PAGE, dtype=torch.uint8)
    shared_file.read(0, before)
    source, target = tensor_at(skew, nbytes), tensor_at(skew, nbytes)
    source.copy_(pattern(nbytes, seed))
    direct = shared_file.direct
    shared_file.write(start * PAGE, source.numpy().data if as_view else source)
    shared_file.read(start * PAGE, target.numpy().data if as_view else target)
    assert torch.equal(source, target)
    shared_file.read(0, after)
    before[start * PAGE : start * PAGE + nbytes] = source
    assert torch.equal(before, after)  # nothing outside of the range changed
    assert shared_file.direct is direct  # and nobody fell back in silence


def test_read_only_memory_can_be_written_to_disk_and_not_read_into(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        file = folder.create("text", PAGE)
        file.write(0, memoryview(b"ab" * (PAGE // 2)))
        target = torch.zeros(PAGE, dtype=torch.uint8)
        file.read(0, target)
        assert bytes(target.numpy()) == b"ab" * (PAGE // 2)
        with pytest.raises(StorageError, match="read-only"):
            file.read(0, memoryview(bytes(PAGE)))


def test_sizes_are_padded_preallocated_and_charged(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        file = folder.create("moments", 2 * MiB + 1, Kind.STATE)
        assert (file.nbytes, file.padded(1), file.padded(PAGE)) == (2 * MiB + PAGE, PAGE, PAGE)
        assert tiers.disk.usage().at_peak[Kind.STATE] == 2 * MiB + PAGE
        stat = os.fstat(file._fd)
        assert (stat.st_size, stat.st_blocks * 512) >= (2 * MiB + PAGE, 2 * MiB + PAGE)
        target = torch.ones(file.nbytes, dtype=torch.uint8)
        file.read(0, target)
        assert not target.any()
        file.close()
        file.close()
        assert tiers.disk.live == 0
        again = folder.create("moments", PAGE)  # the name is free again
        assert again.nbytes == PAGE


def test_folder_is_private_and_named_after_the_process(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        assert folder.path.parent == tmp_path
        assert folder.path.name.startswith(f"forebay-{os.getpid()}-")
        assert folder.path.stat().st_mode & 0o777 == 0o700


def test_an_exception_leaves_nothing(tmp_path: Path, tiers: Tiers) -> None:
    folder = DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host)

    def fail() -> None:
        with folder:
            files = [folder.create("a", MiB), folder.create("b", MiB)]
            raise KeyError(files)

    with pytest.raises(KeyError):
        fail()
    with pytest.raises(StorageError, match="is closed"):
        folder.create("c", MiB)
    folder.close()


def test_what_nobody_closed_goes_when_nobody_holds_it(tmp_path: Path, tiers: Tiers) -> None:
    folder = DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host)
    file = folder.create("a", MiB)
    folder.create("b", MiB)  # nobody holds this one
    gc.collect()
    assert tiers.disk.live == MiB
    del folder, file


@pytest.mark.parametrize(("end", "folders"), [("pass", 0), ("raise SystemExit(3)", 0), ("os.kill(os.getpid(), 9)", 1)])
def test_end_of_the_process(tmp_path: Path, end: str, folders: int) -> None:
    """However it ends, the bytes are free again; after a kill an empty folder remains."""
    code = (
        "import os, sys\n"
        "from forebay.memory import Ledger, Tier\n"
        "from forebay.tiers.disk import DiskFolder\n"
        "folder = DiskFolder(sys.argv[1], ledger=Ledger(Tier.DISK))\n"
        "file = folder.create('a', 1 << 20)\n"
        "if os.fork() == 0: sys.exit()\n"  # a child that ends in the ordinary way takes nothing away
        "os.wait()\n"
        "assert folder.path.exists()\n"
        f"{end}\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    left = [p for p in tmp_path.rglob("*")]
    assert [p.is_dir() for p in left] == [True] * folders
    for folder in left:
        folder.rmdir()


def test_missing_path(tmp_path: Path, tiers: Tiers) -> None:
    with pytest.raises(ConfigError, match=r"cannot be used: No such file or directory \(ENOENT\); make the folder"):
        DiskFolder(tmp_path / "missing", ledger=tiers.disk)


def test_path_is_a_file(tmp_path: Path, tiers: Tiers) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="is not a folder"):
        DiskFolder(tmp_path / "file", ledger=tiers.disk)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_path_that_cannot_be_written(tmp_path: Path, tiers: Tiers, code: int) -> None:
    io = ScriptedIo(always={"make_folder": -code})
    with pytest.raises(UsageError, match=f"cannot be written: .*{errno.errorcode[code]}.*name another folder"):
        DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host, io=io)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_path_without_permission(tmp_path: Path, tiers: Tiers) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match="EACCES"):
        DiskFolder(tmp_path, ledger=tiers.disk)
    tmp_path.chmod(0o700)


def test_too_little_space_is_refused_before_anything_is_made(tmp_path: Path, tiers: Tiers) -> None:
    with pytest.raises(DiskFull, match=r"needs 9\.0 MiB .* and 8\.0 MiB are free; make room") as caught:
        DiskFolder(tmp_path, ledger=tiers.disk, needed=9 * MiB, io=ScriptedIo(free=8 * MiB))
    assert (caught.value.needed, caught.value.allowed) == (9 * MiB, 8 * MiB)
    DiskFolder(tmp_path, ledger=tiers.disk, needed=8 * MiB, io=ScriptedIo(free=8 * MiB)).close()


def test_bounce_buffers_are_host_memory(tmp_path: Path, tiers: Tiers) -> None:
    policy = DiskPolicy(block=MiB, bounce_buffers=3)
    with DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=tiers.host, policy=policy):
        assert tiers.host.usage().at_peak[Kind.STAGING] == 3 * MiB
    with pytest.raises(HostOutOfMemory, match="bounce buffers"):
        DiskFolder(tmp_path, ledger=tiers.disk, host_ledger=Ledger(Tier.HOST, MiB), policy=policy)


def test_budget_refuses_a_file(tmp_path: Path) -> None:
    disk = Ledger(Tier.DISK, 8 * KiB)
    with DiskFolder(tmp_path, ledger=disk) as folder:
        with pytest.raises(DiskFull, match="moments needs"):
            folder.create("moments", 8 * KiB + 1)
        assert list(folder.path.iterdir()) == []
        assert disk.usage().peak == 0


@pytest.mark.parametrize(
    ("io", "error", "words"),
    [
        (ScriptedIo(always={"allocate": -errno.ENOSPC}), DiskFull, "ENOSPC.*are free; make room"),
        (ScriptedIo(always={"allocate": -errno.EDQUOT}), DiskFull, "EDQUOT.*are free; make room"),
        (ScriptedIo(always={"allocate": -errno.EFBIG}), StorageError, "EFBIG"),
        (ScriptedIo(always={"open_direct": -errno.EIO}), StorageError, "EIO"),
        (ScriptedIo(always={"open_direct": -errno.EINVAL, "open": -errno.EROFS}), StorageError, "EROFS"),
    ],
)
def test_file_that_cannot_be_made(
    tmp_path: Path, tiers: Tiers, io: ScriptedIo, error: type[ForebayError], words: str
) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, io=io) as folder:
        with pytest.raises(error, match=rf"cannot make 1\.0 MiB of .*/moments: .*{words}"):
            folder.create("moments", MiB)
        assert tiers.disk.live == 0


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "taken", "x" * 300])
def test_bad_names(tmp_path: Path, tiers: Tiers, name: str) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        taken = folder.create("taken", PAGE)
        with pytest.raises(StorageError):
            folder.create(name, PAGE)
        with pytest.raises(StorageError, match="1 byte or more"):
            folder.create("empty", 0)
        taken.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_without_preallocation_the_file_has_its_size_all_the_same(tmp_path: Path, tiers: Tiers, code: int) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, io=ScriptedIo(always={"allocate": -code})) as folder:
        round_trip(folder.create("moments", MiB))


def round_trip(file: DiskFile, skew: int = 0) -> None:
    source, target = tensor_at(skew, file.nbytes), tensor_at(skew, file.nbytes)
    source.copy_(pattern(file.nbytes))
    file.write(0, source)
    file.read(0, target)
    assert torch.equal(source, target)


def test_o_direct_refused_at_open(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, io=ScriptedIo(always={"open_direct": -errno.EINVAL})) as folder:
        file = folder.create("moments", MiB)
        assert not file.direct
        round_trip(file, skew=1)


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize("skew", [0, 64])
def test_o_direct_refused_at_the_first_transfer(tmp_path: Path, tiers: Tiers, name: str, skew: int) -> None:
    io = ScriptedIo(faults={(name, 0): -errno.EINVAL})
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL, io=io) as folder:
        file = folder.create("moments", 16 * PAGE)
        assert file.direct
        round_trip(file, skew)
        assert not file.direct


def test_einval_without_o_direct_is_an_error(tmp_path: Path, tiers: Tiers) -> None:
    io = ScriptedIo(always={"pwritev": -errno.EINVAL})
    with DiskFolder(tmp_path, ledger=tiers.disk, io=io) as folder:
        file = folder.create("moments", PAGE)
        with pytest.raises(StorageError, match="EINVAL"):
            file.write(0, pattern(PAGE))


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
@pytest.mark.parametrize(("stop", "direct"), [(PAGE, True), (3 * PAGE, True), (100, False), (PAGE + 1, False)])
@pytest.mark.parametrize("skew", [0, 64])
def test_short_transfers_go_on_where_they_stopped(
    tmp_path: Path, tiers: Tiers, name: str, stop: int, direct: bool, skew: int
) -> None:
    io = ScriptedIo(faults={(name, 0): stop, (name, 2): stop})
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL, io=io) as folder:
        file = folder.create("moments", 32 * PAGE)
        round_trip(file, skew)
        assert file.direct is direct  # inside an aligned unit only the page cache can go on
        assert len([c for c in io.calls if c[0] == name]) > 32 // 4


@pytest.mark.parametrize(
    ("name", "code", "error", "words"),
    [
        ("preadv", errno.EIO, StorageError, "cannot read 16384 bytes at offset 20480 of .*/moments: .*EIO.*check the"),
        (
            "pwritev",
            errno.EIO,
            StorageError,
            "cannot write 16384 bytes at offset 20480 of .*/moments: .*EIO.*check the",
        ),
        ("pwritev", errno.EROFS, StorageError, "EROFS"),
        ("pwritev", errno.EBADF, StorageError, "EBADF"),
        ("pwritev", errno.ENOSPC, DiskFull, "ENOSPC.*are free; make room"),
        ("pwritev", errno.EDQUOT, DiskFull, "EDQUOT.*are free; make room"),
    ],
)
@pytest.mark.parametrize("skew", [0, 64])
def test_io_errors_name_file_offset_and_reason(
    tmp_path: Path, tiers: Tiers, name: str, code: int, error: type[ForebayError], words: str, skew: int
) -> None:
    io = ScriptedIo(faults={(name, 1): -code})
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL, io=io) as folder:
        file = folder.create("moments", 16 * PAGE)
        transfer = file.read if name == "preadv" else file.write
        with pytest.raises(error, match=words):
            transfer(PAGE, tensor_at(skew, 12 * PAGE))
        round_trip(file, skew)  # the file is as good as before, and so are the bounce buffers


def test_a_file_cut_short_by_someone_else(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=SMALL) as folder:
        file = folder.create("moments", 8 * PAGE)
        for length in (3 * PAGE, 3 * PAGE + 100):
            os.ftruncate(file._fd, length)
            with pytest.raises(StorageError, match=f"at offset {length} of .* the file ends there, .*32768 bytes"):
                file.read(0, torch.empty(8 * PAGE, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("offset", "buffer", "words"),
    [
        (1, torch.zeros(PAGE, dtype=torch.uint8), "offset must be a multiple of 4096, got 1; use padded"),
        (0, torch.zeros(PAGE + 512, dtype=torch.uint8), "size must be a multiple of 4096, got 4608; use padded"),
        (-PAGE, torch.zeros(PAGE, dtype=torch.uint8), "not inside a file of 8192 bytes"),
        (PAGE, torch.zeros(2 * PAGE, dtype=torch.uint8), "not inside a file of 8192 bytes"),
        (0, torch.zeros(PAGE), "contiguous uint8 tensor"),
        (0, torch.zeros(2 * PAGE, dtype=torch.uint8)[::2], "contiguous uint8 tensor"),
        (0, memoryview(bytearray(2 * PAGE))[::2], "contiguous memoryview"),
    ],
)
def test_misuse(tmp_path: Path, tiers: Tiers, offset: int, buffer: torch.Tensor | memoryview, words: str) -> None:
    for policy in (SMALL, DiskPolicy(direct=False)):  # the same rules, or a fallback would hide a mistake
        with DiskFolder(tmp_path, ledger=tiers.disk, policy=policy) as folder:
            file = folder.create("moments", 2 * PAGE)
            for transfer in (file.read, file.write):
                with pytest.raises(StorageError, match=words):
                    transfer(offset, buffer)


@pytest.mark.parametrize(
    "fields", [{"alignment": 1000}, {"alignment": 256}, {"block": 0}, {"block": 4097}, {"bounce_buffers": 0}]
)
def test_policies_are_validated_at_birth(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        DiskPolicy(**fields)


def test_closed_file_says_so(tmp_path: Path, tiers: Tiers) -> None:
    with DiskFolder(tmp_path, ledger=tiers.disk) as folder:
        file = folder.create("moments", PAGE)
    with pytest.raises(StorageError, match="is closed"):
        file.read(0, torch.empty(PAGE, dtype=torch.uint8))


def test_close_waits_for_the_transfer_under_way(tmp_path: Path, tiers: Tiers) -> None:
    inside, go = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        go.wait()

    io = ScriptedIo(before_read=hold)
    folder = DiskFolder(tmp_path, ledger=tiers.disk, io=io)
    file = folder.create("moments", PAGE)
    file.write(0, pattern(PAGE))
    target = torch.zeros(PAGE, dtype=torch.uint8)
    reader = threading.Thread(target=file.read, args=(0, target))
    reader.start()
    inside.wait()
    closer = threading.Thread(target=folder.close)
    closer.start()
    while not file.closed:  # from here on close waits, and new transfers are refused
        time.sleep(0.001)
    with pytest.raises(StorageError, match="is closed"):
        file.write(0, target)
    assert tiers.disk.live == PAGE
    os.fstat(file._fd)  # still open
    go.set()
    reader.join()
    closer.join()
    assert torch.equal(target, pattern(PAGE))


def test_more_unaligned_callers_than_bounce_buffers(tmp_path: Path, tiers: Tiers) -> None:
    policy = DiskPolicy(block=PAGE, bounce_buffers=1)
    with DiskFolder(tmp_path, ledger=tiers.disk, policy=policy) as folder:
        file = folder.create("moments", 4 * 8 * PAGE)
        parts = [tensor_at(64, 8 * PAGE) for _ in range(4)]

        def work(part: int) -> None:
            for seed in range(5):
                file.write(part * 8 * PAGE, pattern(8 * PAGE, 10 * part + seed))
                file.read(part * 8 * PAGE, parts[part])

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for part in range(4):
            assert torch.equal(parts[part], pattern(8 * PAGE, 10 * part + 4))
