"""Who makes the calls of a transfer of which several are under way: the lane's own thread, or threads beside it.

One thread keeps as many calls under way as it likes where they go to the kernel's queue: past the page cache, from or
to memory that is aligned, where the operating system has such a queue and gives one. Elsewhere a call holds a thread
until it is done, and each that is under way has one.

Some file systems move the bytes before they give the thread back that asked: there a depth gains nothing, and long
calls are as fast, which ``forebay doctor`` sees.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TypeAlias, final

from forebay.errors import ForebayError
from forebay.tiers.crew import Crew
from forebay.tiers.diskfile import DiskFile, DiskPolicy
from forebay.tiers.io import Io
from forebay.tiers.kernel_queue import CallQueue, QueuedCall, Verb

__all__ = ["Callers", "Piece", "Pieces"]


@final
@dataclass(slots=True, eq=False)
class Piece:
    """One call that is to be made: the file, where in it, the memory, and how much of that is ``done``."""

    file: DiskFile
    offset: int
    view: memoryview
    done: int = 0


Pieces: TypeAlias = deque[Piece]
"""Those of one file, in one folder."""


@final
class Callers:
    """Moves pieces of files over ``folders`` folders, as many calls at a time in each as ``policy`` says.

    A transfer has a queue for itself while it lasts, which ``size`` calls of either direction fit into; so there are as
    many queues as there were transfers at one time. Threads, by direction, so that neither waits for the other anywhere
    but in the disk, are started where there is no queue. Usable from several threads at once.
    """

    def __init__(self, folders: int, policy: DiskPolicy, io: Io) -> None:
        self._policy = policy
        self._io = io
        verbs: tuple[Verb, ...] = ("read", "write")
        most = {verb: folders * policy.calls(verb).depth for verb in verbs}
        self._size = max(most.values())
        # The caller's thread makes calls too.
        self._crews = {verb: Crew(max(1, most[verb] - 1), f"forebay-disk-{verb}") for verb in verbs}
        # Of which process each is: a forked child has none of its parent's. Whoever appends looks at ``_closed`` behind
        # it, and whoever closes takes all away behind that: no lock, which a child might inherit locked.
        self._idle: deque[tuple[int, CallQueue]] = deque()
        self._closed = False

    def move(self, verb: Verb, folders: Sequence[Pieces]) -> None:
        """Moves all ``folders``. The error of a piece is raised when every call is out; the rest is not moved then.
        Raises what ``DiskFile.read`` and ``DiskFile.write`` raise."""
        depth = self._policy.calls(verb).depth
        if sum(min(depth, len(pieces)) for pieces in folders) > 1 and all(_for_queue(pieces) for pieces in folders):
            # The queue within: its calls are out before a file may be closed.
            with _held(verb, folders), self._queue() as queue:
                if queue is not None:
                    _Flight(verb, queue).make(folders, depth)
                    return
        self._by_threads(verb, folders, depth)

    def close(self) -> None:
        """Gives the queues back and ends the threads; what is under way has both until it is done. A second call does
        nothing."""
        self._closed = True
        self._clear()
        for crew in self._crews.values():
            crew.close()

    @contextmanager
    def _queue(self) -> Iterator[CallQueue | None]:
        queue = self._taken()
        try:
            yield queue
        except BaseException:
            # An interrupt may come between a call and the note of it. To close the queue waits for whatever is under
            # way: the buffer is the caller's own again, and nobody takes the ends of these calls for those of others.
            if queue is not None:
                queue.close()
            raise
        if queue is not None:
            self._idle.append((os.getpid(), queue))
            if self._closed:
                self._clear()

    def _taken(self) -> CallQueue | None:
        """A queue of this process; None where the operating system gives none."""
        while self._idle:
            try:
                process, queue = self._idle.pop()
            except IndexError:  # another transfer was faster
                break
            if process == os.getpid():
                return queue
        try:
            return self._io.open_queue(self._size)
        except OSError:
            return None

    def _clear(self) -> None:
        while self._idle:
            try:
                self._idle.pop()[1].close()
            except IndexError:
                return

    def _by_threads(self, verb: Verb, folders: Sequence[Pieces], depth: int) -> None:
        # Who is done with one call takes the next of that folder: the last ones end together, although no two calls
        # take the same time.
        takers = [pieces for pieces in folders for _ in range(min(depth, len(pieces)))]
        move = DiskFile.read if verb == "read" else DiskFile.write
        # The caller's thread is one of them: with a single call in flight there is nobody to wait for.
        others = [self._crews[verb].submit(partial(_drain, pieces, move)) for pieces in takers[1:]]
        try:
            _drain(takers[0] if takers else deque(), move)
        finally:
            # All calls are out before anybody hears of an error: the buffer is the caller's own again.
            wait(others)
        for other in others:
            other.result()


def _for_queue(pieces: Pieces) -> bool:
    """Whether the kernel makes such calls beside the thread that asks. Files are cut at multiples of the alignment: one
    piece tells of all."""
    return not pieces or (pieces[0].file.direct and pieces[0].file.aligned(pieces[0].view))


def _drain(pieces: Pieces, move: Callable[[DiskFile, int, memoryview], None]) -> None:
    """Makes calls until none is left, or one fails. Others may do the same: a piece is taken by one of them."""
    while True:
        try:
            piece = pieces.popleft()
        except IndexError:
            return
        try:
            move(piece.file, piece.offset, piece.view)
        except BaseException:
            pieces.clear()  # the transfer has failed: nobody needs the rest of it
            raise


@contextmanager
def _held(verb: Verb, folders: Sequence[Pieces]) -> Iterator[None]:
    """Looks at all pieces, and holds back whoever would close their files."""
    with ExitStack() as held:
        for pieces in filter(None, folders):
            for piece in pieces:
                piece.file.check(verb, piece.offset, piece.view)
            held.enter_context(pieces[0].file.in_use())
        yield


@final
class _Flight:
    """The calls of one transfer in ``queue``. When ``make`` returns or raises a ``ForebayError``, all are out."""

    def __init__(self, verb: Verb, queue: CallQueue) -> None:
        self._verb = verb
        self._queue = queue
        self._numbers = count()
        self._summing = False
        self._under_way: dict[int, tuple[Pieces, Piece]] = {}
        self._ended: deque[tuple[int, int]] = deque()

    def make(self, folders: Sequence[Pieces], depth: int) -> None:
        self._summing = any(pieces[0].file.sums is not None for pieces in folders if pieces)
        try:
            self._begin([pieces for pieces in folders for _ in range(depth)])
            while self._under_way:
                # Whoever wakes up may have to wait for the interpreter: once for the last calls, unless each is looked
                # at while the others are under way.
                least = 1 if self._summing or any(folders) else len(self._under_way)
                self._ended.extend(self._queue.wait(least))
                turns, whole = self._counted()
                # The next calls first: the disk has something to do while this thread sums up.
                self._begin(turns)
                for piece in whole:
                    piece.file.compare(self._verb, piece.offset, piece.view)
        except ForebayError:
            self._let_end()
            raise

    def _begin(self, turns: Iterable[Pieces]) -> None:
        """Has one more call under way for each of ``turns``, which name its folder, as far as there are calls left."""
        left = deque(turns)
        asked: list[tuple[Pieces, Piece]] = []
        while left:
            pieces = left.popleft()
            if pieces:
                piece = pieces.popleft()
                if piece.done == 0:
                    piece.file.note(self._verb, piece.offset, piece.view)
                if piece.file.direct:
                    asked.append((pieces, piece))
                else:
                    self._make(piece)
                    left.append(pieces)
            # While this thread sums up the next one, the disk has it.
            if self._summing or not left:
                left += self._submit(asked)
                asked = []

    def _submit(self, asked: Sequence[tuple[Pieces, Piece]]) -> list[Pieces]:
        """Has calls under way; where the kernel takes none, for want of room or for what is wrong with it, the call
        itself is made, and will say what. Returns whose turn it is again."""
        made: list[Pieces] = []
        while asked:
            calls = [self._call(piece) for _, piece in asked]
            try:
                taken = self._queue.submit(calls)
            except OSError:
                pieces, piece = asked[0]
                self._make(piece)
                made.append(pieces)
                asked = asked[1:]
                continue
            self._under_way |= {call.number: one for call, one in zip(calls[:taken], asked, strict=False)}
            asked = asked[taken:]
        return made

    def _call(self, piece: Piece) -> QueuedCall:
        left = piece.view[piece.done :]
        return QueuedCall(next(self._numbers), self._verb, piece.file.descriptor, left, piece.offset + piece.done)

    def _make(self, piece: Piece) -> None:
        """Moves what is left of ``piece`` here and now."""
        piece.file.move(self._verb, piece.offset + piece.done, piece.view[piece.done :])
        piece.file.compare(self._verb, piece.offset, piece.view)

    def _counted(self) -> tuple[list[Pieces], list[Piece]]:
        """Adds up what the calls that are out have moved: whose turn it is now, and the pieces that are whole."""
        turns: list[Pieces] = []
        whole: list[Piece] = []
        while self._ended:
            number, result = self._ended.popleft()
            pieces, piece = self._under_way.pop(number)
            self._count(piece, result)
            turns.append(pieces)
            if piece.done < len(piece.view):
                pieces.appendleft(piece)
            else:
                whole.append(piece)
        return turns, whole

    def _count(self, piece: Piece, result: int) -> None:
        # A call that a signal has ended is made again, as ``os.preadv`` makes it.
        if result != -errno.EINTR:
            left = piece.view[piece.done :]
            piece.done += piece.file.moved(self._verb, piece.offset + piece.done, left, result, direct=True)

    def _let_end(self) -> None:
        """Waits for the calls of a transfer that has failed: what they have written counts."""
        while self._under_way:
            self._ended.extend(self._queue.wait(len(self._under_way) - len(self._ended)))
            while self._ended:
                number, result = self._ended.popleft()
                _, piece = self._under_way.pop(number)
                if result > 0:
                    self._count(piece, result)
