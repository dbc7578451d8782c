"""Calls of a transfer in the kernel's queue: the same bytes as without, whatever fails, and nothing left under way."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.calls import Calls
from forebay.errors import DiskFull, ForebayError, StorageError
from forebay.memory import Ledger, Tier
from forebay.tiers import kernel_queue
from forebay.tiers.diskfile import DiskFile, DiskPolicy, Meter, TierFile
from forebay.tiers.handed import hand_over, taken_over
from forebay.tiers.io import Io, SystemIo
from forebay.tiers.kernel_queue import CallQueue, KernelQueue, QueuedCall
from forebay.tiers.stripes import DiskTier, Folder, StripedFile
from tests.faults.interrupting import NEVER, interrupt_at
from tests.faults.residue import kernel_queues
from tests.faults.scripted_io import PAGE, ScriptedIo, Tiers, pattern, tensor_at
from tests.faults.simulated_queue import SimulatedQueue

PAGES = 32
POLICY = DiskPolicy(reads=Calls(4 * PAGE, 3), writes=Calls(2 * PAGE, 2), stripe=8 * PAGE)

FREE = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def has_queue() -> bool:
    try:
        KernelQueue(1).close()
    except OSError:
        return False
    return True


in_kernel = pytest.mark.skipif(not has_queue(), reason="this kernel has no queue for us")


@contextmanager
def made(
    path: Path, folders: int = 1, *, io: Io | None = None, policy: DiskPolicy = POLICY, pages: int = PAGES
) -> Iterator[tuple[DiskTier, StripedFile]]:
    """A tier over so many folders, and a file that goes past the page cache."""
    places = [path / f"part-{number}" for number in range(folders)]
    for place in places:
        place.mkdir(exist_ok=True)
    with DiskTier([Folder(place, 1 << 24) for place in places], Ledger(Tier.DISK), policy=policy, io=io) as tier:
        file = tier.create("moments", pages * PAGE)
        assert isinstance(file, StripedFile)
        if not tier.direct:
            pytest.skip("this file system refuses O_DIRECT")
        yield tier, file


def aligned(nbytes: int, seed: int = 0) -> torch.Tensor:
    tensor = tensor_at(0, nbytes)
    tensor.copy_(pattern(nbytes, seed))
    return tensor


def whole(file: TierFile) -> torch.Tensor:
    target = tensor_at(0, file.nbytes)
    file.read(0, target)
    return target


def disk_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("forebay-disk")]


calls = st.builds(Calls, st.integers(1, 9).map(lambda n: n * PAGE), st.integers(1, 6))
"""Any way to read or write."""


@pytest.mark.parametrize("kind", ["simulated", pytest.param("kernel", marks=in_kernel)])
@FREE
@given(data=st.data(), reads=calls, writes=calls, folders=st.integers(1, 3), stripe=st.integers(1, 9))
def test_what_is_written_is_read(
    tmp_path: Path, kind: str, data: st.DataObject, reads: Calls, writes: Calls, folders: int, stripe: int
) -> None:
    """Whatever the calls, their order, and where some of them stop: every byte is where it belongs, and no other is."""
    stops = st.sampled_from([PAGE, 2 * PAGE, 100, PAGE + 1])
    points = st.tuples(st.sampled_from(["preadv", "pwritev"]), st.integers(0, 20))
    io: Io = SystemIo()
    if kind == "simulated":
        faults = data.draw(st.dictionaries(points, stops, max_size=3))
        if data.draw(st.booleans()):
            faults["pwritev", 0] = -errno.EINVAL  # no O_DIRECT after all
        io = ScriptedIo(faults=faults)
    policy = DiskPolicy(reads=reads, writes=writes, stripe=stripe * PAGE)
    if reads.depth == writes.depth == folders == 1:
        return  # plain calls
    with made(tmp_path, folders, io=io, policy=policy) as (tier, file):
        expected, written = torch.zeros(PAGES * PAGE, dtype=torch.uint8), 0
        for seed in range(3):
            start = data.draw(st.integers(0, PAGES))
            nbytes = data.draw(st.integers(0, PAGES - start)) * PAGE
            content = aligned(nbytes, seed)
            file.write(start * PAGE, content)
            expected[start * PAGE : start * PAGE + nbytes] = content
            target = tensor_at(0, nbytes)
            file.read(start * PAGE, target)
            assert torch.equal(target, content)
            written += nbytes
        assert torch.equal(whole(file), expected)
        assert tier.written == written
        if tier.direct:
            assert not disk_threads()
    if isinstance(io, ScriptedIo):
        assert all(queue.closed and queue.under_way == 0 for queue in io.queues)


def test_as_many_calls_are_in_flight_as_were_asked_for_and_no_more(tmp_path: Path) -> None:
    io = ScriptedIo()
    with made(tmp_path, io=io) as (_, file):
        file.write(0, aligned(PAGES * PAGE))
        (queue,) = io.queues
        assert queue.most == 2
        whole(file)
        assert io.queues == [queue] and queue.most == 3
        assert (io.count("pwritev"), io.count("preadv")) == (PAGES // 2, PAGES // 4)
    io = ScriptedIo()
    with made(tmp_path, 2, io=io) as (_, file):  # in each folder
        whole(file)
        assert [queue.most for queue in io.queues] == [6]
    assert not disk_threads()


def test_a_single_call_needs_no_queue(tmp_path: Path) -> None:
    io = ScriptedIo()
    with made(tmp_path, io=io, policy=replace(POLICY, writes=Calls(PAGE))) as (_, file):
        file.write(0, aligned(PAGES * PAGE))
        file.read(0, tensor_at(0, 3 * PAGE))
    assert not io.queues and not disk_threads()


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EAGAIN, errno.ENOMEM])
@pytest.mark.parametrize("folders", [1, 2])
def test_without_a_queue_threads_make_the_calls(tmp_path: Path, code: int, folders: int) -> None:
    io = ScriptedIo(always={"open_queue": -code})
    with made(tmp_path, folders, io=io) as (_, file):
        content = aligned(PAGES * PAGE)
        file.write(0, content)
        assert torch.equal(whole(file), content)
        assert disk_threads()
        io.always.clear()  # whoever took all the room has given some back
        file.write(PAGE, content[: 8 * PAGE])
        assert len(io.queues) == 1
    assert not disk_threads()


@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_call_that_a_signal_has_ended_is_made_again(tmp_path: Path, name: str) -> None:
    io = ScriptedIo(faults={(name, number): -errno.EINTR for number in (0, 2, 3)})
    with made(tmp_path, io=io) as (tier, file):
        content = aligned(PAGES * PAGE)
        file.write(0, content)
        assert torch.equal(whole(file), content)
        assert tier.direct and not disk_threads()
    assert io.count(name) == {"preadv": PAGES // 4, "pwritev": PAGES // 2}[name] + 3


@pytest.mark.parametrize("folders", [1, 2])
def test_memory_that_is_not_aligned_goes_through_bounce_buffers(tmp_path: Path, folders: int) -> None:
    io = ScriptedIo()
    with made(tmp_path, folders, io=io) as (tier, file):
        source, target = tensor_at(64, PAGES * PAGE), tensor_at(1, PAGES * PAGE)
        source.copy_(pattern(PAGES * PAGE))
        file.write(0, source)
        file.read(0, target)
        assert torch.equal(source, target) and tier.direct
    assert not io.queues


def test_a_file_in_the_page_cache_needs_no_queue(tmp_path: Path) -> None:
    io = ScriptedIo(faults={("pwritev", 3): -errno.EINVAL})
    with made(tmp_path, 2, io=io) as (tier, file):
        content = aligned(PAGES * PAGE)
        file.write(0, content)  # in the midst of it one of the two turns out to have no O_DIRECT
        assert not tier.direct and len(io.queues) == 1 and not disk_threads()
        begun = io.count("open_queue")
        assert torch.equal(whole(file), content)
        assert io.count("open_queue") == begun and disk_threads()


@pytest.mark.parametrize("folders", [1, 2])
@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [
        ("preadv", -errno.EIO, StorageError),
        ("pwritev", -errno.EIO, StorageError),
        ("pwritev", -errno.ENOSPC, DiskFull),
        ("preadv", 0, StorageError),
    ],
)
def test_an_error_of_any_call(tmp_path: Path, folders: int, name: str, code: int, kind: type[ForebayError]) -> None:
    """It is told when all calls are out, with file, offset and reason; the file is as good as before."""
    words = errno.errorcode[-code] if code else "the file ends there"
    verb, calls = ("read", PAGES // 4) if name == "preadv" else ("write", PAGES // 2)
    for number in range(calls):
        io = ScriptedIo()
        with made(tmp_path, folders, io=io) as (tier, file):
            content = aligned(PAGES * PAGE, number)
            file.write(0, content)
            before, made_before = tier.written, io.count("pwritev")
            io.faults[name, io.count(name) + number] = code
            with pytest.raises(kind, match=rf"cannot {verb} \d+ bytes at offset \d+ of .*/moments: .*{words}"):
                (file.read if verb == "read" else file.write)(0, aligned(PAGES * PAGE))
            assert all(queue.closed and queue.under_way == 0 for queue in io.queues)
            refused = int(verb == "write")
            assert tier.written - before == (io.count("pwritev") - made_before - refused) * 2 * PAGE * refused
            file.write(0, content)
            assert torch.equal(whole(file), content)
            assert tier.direct and not disk_threads()


@final
class Altered(CallQueue):
    """``queue``, where something happens behind a call, of which ``then`` is given the name and the number. ``before``
    says how many of so many calls it takes."""

    def __init__(
        self,
        queue: CallQueue,
        then: Callable[[str, int], None] = lambda *_: None,
        before: Callable[[int], int] = lambda asked: asked,
    ) -> None:
        self._queue = queue
        self._before = before
        self._then = then
        self._counts = {"submit": 0, "wait": 0}

    def submit(self, calls: Sequence[QueuedCall]) -> int:
        taken = self._queue.submit(calls[: self._before(len(calls))])
        self._behind("submit")
        return taken

    def wait(self, least: int) -> list[tuple[int, int]]:
        ended = self._queue.wait(least)
        self._behind("wait")
        return ended

    def close(self) -> None:
        self._queue.close()

    def _behind(self, name: str) -> None:
        number, self._counts[name] = self._counts[name], self._counts[name] + 1
        self._then(name, number)


@in_kernel
def test_what_the_kernel_does_not_take_is_called_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = itertools.count()

    def refuse(asked: int) -> int:
        """All, then one, then none."""
        turn = next(turns) % 3
        if turn == 2:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return 1 if turn else asked

    monkeypatch.setattr(SystemIo, "open_queue", lambda _, size: Altered(KernelQueue(size), before=refuse))
    with made(tmp_path, 2) as (tier, file):
        content = aligned(PAGES * PAGE)
        file.write(0, content)
        assert torch.equal(whole(file), content)
        assert tier.direct and tier.written == PAGES * PAGE and not disk_threads()


@in_kernel
def test_a_file_that_someone_has_cut(tmp_path: Path) -> None:
    with made(tmp_path) as (_, file):
        (part,) = file.parts
        assert part is not None
        for length in (3 * PAGE, 3 * PAGE + 100):
            os.ftruncate(part.descriptor, length)
            with pytest.raises(StorageError, match=r"the file ends there, .*131072 bytes"):
                whole(file)


@pytest.mark.parametrize("when", ["submit", "wait"])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_an_interrupt_is_told_when_all_calls_are_out(
    tmp_path: Path, when: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before anybody has noted that a call is under way, or out."""
    queues: list[SimulatedQueue] = []
    armed = [False]

    def interrupt(name: str, count: int) -> None:
        if armed[0] and (name, count) == (when, number):
            raise KeyboardInterrupt

    def opened(io: SystemIo, size: int) -> CallQueue:
        queues.append(SimulatedQueue(io))
        return Altered(queues[-1], interrupt)

    monkeypatch.setattr(SystemIo, "open_queue", opened)
    with made(tmp_path, 2) as (tier, file):
        content = aligned(PAGES * PAGE)
        armed[0] = True
        with pytest.raises(KeyboardInterrupt):
            file.write(0, content)
        assert queues[0].closed and queues[0].under_way == 0
        armed[0] = False
        file.write(0, content)
        assert torch.equal(whole(file), content)
        assert len(queues) == 2
    assert tier.direct and queues[1].closed


@in_kernel
def test_interrupts_at_any_moment(tmp_path: Path) -> None:
    """Signals that come while the kernel moves bytes: nothing is moved any more when the interrupt is told."""
    policy = replace(POLICY, reads=Calls(16 * PAGE, 4), writes=Calls(16 * PAGE, 4))
    with made(tmp_path, policy=policy, pages=64 * PAGES) as (_, file):
        content = aligned(file.nbytes)
        file.write(0, content)
        target, told = tensor_at(0, file.nbytes), 0
        # Not by an alarm: that is the clock of the tests' own limit, which a test that hangs is ended by.
        before = signal.signal(signal.SIGUSR1, signal.default_int_handler)
        told_of = threading.get_ident(), signal.SIGUSR1
        try:
            for turn in range(40):
                timer = threading.Timer(0.0002 * (1 + turn % 20), signal.pthread_kill, told_of)
                try:
                    timer.start()
                    file.read(0, target)
                    timer.cancel()
                    timer.join()
                except KeyboardInterrupt:
                    target.zero_()
                    told += 1
                    time.sleep(0.001)
                    assert not target.any()
                else:
                    assert torch.equal(target, content)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert told
        assert torch.equal(whole(file), content)


def test_an_interrupt_between_any_two_instructions_does_not_hold_close_back(tmp_path: Path) -> None:
    """Of what says that a transfer is under way: the thread that closes is in none of its own any more."""
    code = DiskFile.in_use.__wrapped__.__code__  # type: ignore[attr-defined]
    number, interrupted = 0, True
    while interrupted:
        folder = tmp_path / str(number)
        folder.mkdir()
        with made(folder, pages=1, policy=replace(POLICY, reads=Calls(PAGE, 1))) as (_, file):
            content = aligned(PAGE)
            file.write(0, content)
            interrupted = False
            sys.settrace(interrupt_at(NEVER, code))
            file.read(0, tensor_at(0, PAGE))
            sys.settrace(interrupt_at(number, code, anywhere=True))
            try:
                file.read(0, tensor_at(0, PAGE))
            except KeyboardInterrupt:
                interrupted = True
            finally:
                sys.settrace(None)
            assert torch.equal(whole(file), content)
        number += 1
    assert number > 50


@in_kernel
def test_a_signal_whose_handler_raises_nothing_is_not_seen(tmp_path: Path) -> None:
    seen: list[int] = []
    with made(tmp_path, pages=64 * PAGES) as (_, file):
        content = aligned(file.nbytes)
        before = signal.signal(signal.SIGALRM, lambda number, _: seen.append(number))
        signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
        try:
            while len(seen) < 10:
                file.write(0, content)
                assert torch.equal(whole(file), content)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


@in_kernel
def test_fewer_ended_than_were_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a signal comes when some are out: the others are waited for, and no more than those."""
    asked: list[int] = []
    call = kernel_queue._made

    def one_at_a_time(libc: ctypes.CDLL, number: int, *arguments: Any) -> int:
        if number != kernel_queue._system_calls()[3]:
            return call(libc, number, *arguments)
        context, least, _, *others = arguments
        asked.append(least.value)
        assert least.value + len(asked) <= 4, "more than are under way: it would never return"
        return call(libc, number, context, ctypes.c_long(1), ctypes.c_long(1), *others)

    monkeypatch.setattr(kernel_queue, "_made", one_at_a_time)
    path, page = tmp_path / "file", memoryview(bytearray(PAGE))
    path.write_bytes(bytes(PAGE))
    queue = KernelQueue(3)
    with path.open("rb") as file:
        calls = [QueuedCall(number, "read", file.fileno(), page, 0) for number in range(3)]
        assert queue.submit(calls) == 3
        assert sorted(queue.wait(3)) == [(number, PAGE) for number in range(3)]
    queue.close()
    assert asked == [3, 2, 1]


@in_kernel
def test_a_forked_child_gives_no_queue_of_its_parent_back() -> None:
    """The number of one that it has inherited may be that of one of its own."""
    child = os.fork()
    if child == 0:
        queue = KernelQueue(1)
        there, pid = kernel_queues(), os.getpid()
        os.getpid = lambda: pid + 1
        queue.close()
        os._exit(0 if kernel_queues() == there else 1)
    assert os.waitpid(child, 0)[1] == 0


@in_kernel
def test_queues_are_for_those_who_transfer_at_one_time_and_all_are_given_back(tmp_path: Path) -> None:
    before = kernel_queues()
    with made(tmp_path, 2) as (_, file):
        contents = [aligned(8 * PAGE, seed) for seed in range(4)]
        gate = threading.Barrier(4, timeout=10)

        def work(part: int) -> None:
            gate.wait()
            target = tensor_at(0, 8 * PAGE)
            for _ in range(20):
                file.write(part * 8 * PAGE, contents[part])
                file.read(part * 8 * PAGE, target)
                assert torch.equal(target, contents[part])

        threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert before < kernel_queues() <= before + 4
        assert torch.equal(whole(file), torch.cat(contents))
        assert not disk_threads()
    assert kernel_queues() == before


@in_kernel
def test_a_tier_that_nobody_holds_gives_its_queues_back(tmp_path: Path) -> None:
    before = kernel_queues()
    tier = DiskTier([Folder(tmp_path)], Ledger(Tier.DISK), policy=POLICY)
    file = tier.create("moments", PAGES * PAGE)
    file.write(0, aligned(PAGES * PAGE))
    assert kernel_queues() == before + 1
    del tier, file
    gc.collect()
    assert kernel_queues() == before


def test_a_queue_in_use_is_given_back_when_the_transfer_is_done(tmp_path: Path) -> None:
    """Close waits for the transfer under way; its queue is not left behind."""
    io, inside, go = ScriptedIo(), threading.Event(), threading.Event()
    with made(tmp_path, io=io) as (tier, file):
        content, target = aligned(PAGES * PAGE), tensor_at(0, PAGES * PAGE)
        file.write(0, content)

        def hold() -> None:
            inside.set()
            go.wait()

        io.before_read = hold
        reader = threading.Thread(target=file.read, args=(0, target))
        reader.start()
        inside.wait()
        closer = threading.Thread(target=tier.close)
        closer.start()
        (part,) = file.parts
        assert part is not None
        while not part.closed:
            time.sleep(0.001)
        (queue,) = io.queues
        assert not queue.closed
        os.fstat(part.descriptor)  # still open
        with pytest.raises(StorageError, match="is closed"):
            file.read(0, target)
        go.set()
        reader.join()
        closer.join()
        assert torch.equal(target, content)
        assert all(queue.closed for queue in io.queues)


FORKING = """
import mmap, os, sys
import torch
from forebay.calls import Calls
from forebay.memory import Ledger, Tier
from forebay.tiers.diskfile import DiskPolicy
from forebay.tiers.stripes import DiskTier, Folder

calls = Calls(16384, 3)
with DiskTier([Folder(sys.argv[1])], Ledger(Tier.DISK), policy=DiskPolicy(reads=calls, writes=calls)) as tier:
    file = tier.create("moments", 1 << 20)
    source = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    source.random_(generator=torch.Generator().manual_seed(0))
    file.write(0, source)
    target = torch.frombuffer(mmap.mmap(-1, 1 << 20), dtype=torch.uint8)
    if os.fork() == 0:
        file.read(0, target)
        os._exit(int(not torch.equal(source, target)))
    _, status = os.wait()
    file.read(0, target)
    print(os.waitstatus_to_exitcode(status), torch.equal(source, target))
"""


@in_kernel
def test_a_forked_child_has_queues_of_its_own(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FORKING, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True"], done.stderr


@pytest.mark.parametrize("folders", [1, 2])
def test_what_is_read_is_held_against_what_was_written(tmp_path: Path, folders: int) -> None:
    policy = replace(POLICY, verified=True)
    for number in range(PAGES):
        with made(tmp_path, folders, policy=policy) as (_, file):
            content = aligned(PAGES * PAGE)
            file.write(0, content)
            assert torch.equal(whole(file), content)
            zone = file.zones[0]
            index, offset, _ = zone.find(number * PAGE)
            part = file.parts[index]
            assert part is not None
            descriptor = os.open(f"/proc/self/fd/{part.descriptor}", os.O_RDWR)
            os.pwrite(descriptor, bytes([int(content[number * PAGE + 5]) ^ 1]), offset + 5)
            os.fsync(descriptor)
            os.close(descriptor)
            with pytest.raises(StorageError, match=rf"the bytes at offset {offset} are not those that were written"):
                whole(file)


@in_kernel
def test_another_process_has_queues_of_its_own(tmp_path: Path, tiers: Tiers) -> None:
    with made(tmp_path, 2) as (_, file):
        handed = hand_over(file)
        parts = tuple(None if one is None else replace(one, descriptor=os.dup(one.descriptor)) for one in handed.parts)
        before, meter = kernel_queues(), Meter()
        with taken_over(replace(handed, parts=parts), meter) as theirs:
            content = aligned(PAGES * PAGE)
            theirs.write(0, content)
            assert meter.nbytes == PAGES * PAGE and kernel_queues() == before + 1
            assert torch.equal(whole(file), content)
        assert kernel_queues() == before + 1  # this side's
    assert not disk_threads()


@pytest.mark.parametrize(("system", "machine"), [("Linux", "riscv64"), ("Darwin", "x86_64")])
def test_where_no_system_calls_are_known_there_is_no_queue(
    system: str, machine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    with pytest.raises(OSError, match="not implemented") as caught:
        KernelQueue(1)
    assert caught.value.errno == errno.ENOSYS


@in_kernel
def test_a_machine_without_room_for_more_calls_says_so() -> None:
    most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    before = kernel_queues()
    with pytest.raises(OSError, match="unavailable") as caught:
        KernelQueue(most + 1)
    assert caught.value.errno == errno.EAGAIN and kernel_queues() == before
