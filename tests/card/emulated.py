"""A card where there is none: torch's CPU build with tensors on ``cuda:0`` whose bytes are the host's (``card.cpp``),
and a ``torch.cuda`` that is theirs. What runs on it has the numbers of the host's kernels.

For pytest, before anything imports torch::

    python -m pytest -p tests.card.emulated tests/gpu

It shows what asks for a tensor where it is not, what a plan's memory comes to, and who does not wait for a copy; not
how fast anything is, nor what a card's own kernels take and round.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from tests.card.building import built

TOTAL = 6 * 2**30
"""Bytes of the card."""
POLLS = 2
"""So often an event that is asked says that it has not happened, before the work before it is done."""
NAME = "Emulated card"

if "torch" in sys.modules:
    raise RuntimeError("torch was imported before the card that it is to see; give -p tests.card.emulated")
_library = ctypes.CDLL(str(built()))
for _name in ("live", "peak", "lost", "put", "done"):
    getattr(_library, f"card_{_name}").restype = ctypes.c_int64
for _name in ("put", "done", "catch_up", "enter", "set_limit", "order", "page_lock"):
    _count = {"catch_up": 2, "order": 3, "page_lock": 2}.get(_name, 1)
    getattr(_library, f"card_{_name}").argtypes = [ctypes.c_int64] * _count

import torch  # noqa: E402

_EVER = 2**62
_numbers = count(1)
_fraction = [1.0]


def lost() -> int:
    """Copies whose memory was given back before they ran."""
    return int(_library.card_lost())


class Stream:
    """A queue of the card; copies wait there until somebody waits for them."""

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None) -> None:
        self.number = next(_numbers) if number is None else number
        self.device = torch.device("cuda", 0)
        self.cuda_stream = self.number

    def wait_event(self, event: Event) -> None:
        if event.until:
            _library.card_order(self.number, event.stream, event.until)

    def wait_stream(self, stream: Stream) -> None:
        _library.card_order(self.number, stream.number, int(_library.card_put(stream.number)))

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _library.card_catch_up(self.number, _EVER)

    def query(self) -> bool:
        return int(_library.card_put(self.number)) == int(_library.card_done(self.number))


class Event:
    """What a stream has had to do when it was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.stream, self.until, self.at, self._asked = 0, 0, 0.0, 0

    def record(self, stream: Stream | None = None) -> None:
        self.stream = (stream or current_stream()).number
        self.until, self.at, self._asked = int(_library.card_put(self.stream)), time.perf_counter(), 0

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        if int(_library.card_done(self.stream)) >= self.until:
            return True
        self._asked += 1
        if self._asked <= POLLS:
            return False
        self.synchronize()
        return True

    def synchronize(self) -> None:
        _library.card_catch_up(self.stream, self.until)

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) * 1e3


_DEFAULT = Stream(number=0)
_of_thread = threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(_of_thread, "stream", _DEFAULT)


@contextmanager
def stream(wanted: Stream | None) -> Iterator[None]:
    before = current_stream()
    _enter(before if wanted is None else wanted)
    try:
        yield
    finally:
        _enter(before)


def _enter(wanted: Stream) -> None:
    _of_thread.stream = wanted
    _library.card_enter(wanted.number)


def _synchronize(device: Any = None) -> None:
    for number in range(next(_numbers)):
        _library.card_catch_up(number, _EVER)


def _limit(fraction: float, device: Any = None) -> None:
    _fraction[0] = fraction
    _library.card_set_limit(int(fraction * TOTAL))


class _Runtime:
    """Of the CUDA runtime what page-locks memory."""

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        _library.card_page_lock(address, nbytes)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        _library.card_page_lock(address, 0)
        return 0


def _live(device: Any = None) -> int:
    return int(_library.card_live())


def _peak(device: Any = None) -> int:
    return int(_library.card_peak())


def _storage(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> torch.UntypedStorage:
    """torch's CPU build makes none on a card."""
    if device is not None and torch.device(device).type == "cuda":
        return torch.empty(args[0] if args else 0, dtype=torch.uint8, device="cuda").untyped_storage()
    made: torch.UntypedStorage = _new_storage(cls, *args, **kwargs, **({} if device is None else {"device": device}))
    return made


_new_storage = torch.UntypedStorage.__new__

_PROPERTIES = SimpleNamespace(name=NAME, total_memory=TOTAL, multi_processor_count=8, major=9, minor=0)

_CUDA: dict[str, Any] = {
    "Stream": Stream,
    "Event": Event,
    "current_stream": current_stream,
    "default_stream": lambda device=None: _DEFAULT,
    "stream": stream,
    "synchronize": _synchronize,
    "init": lambda: None,
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "_exchange_device": lambda index: 0,
    "_maybe_exchange_device": lambda index: 0,
    "get_device_name": lambda device=None: NAME,
    "get_device_capability": lambda device=None: (9, 0),
    "get_device_properties": lambda device=None: _PROPERTIES,
    "cudart": _Runtime,
    "_sleep": lambda cycles: None,
    "mem_get_info": lambda device=None: (TOTAL - _live(), TOTAL),
    "get_per_process_memory_fraction": lambda device=None: _fraction[0],
    "set_per_process_memory_fraction": _limit,
    "empty_cache": lambda: None,
    "memory_allocated": _live,
    "memory_reserved": _live,
    "max_memory_allocated": _peak,
    "max_memory_reserved": _peak,
    "reset_peak_memory_stats": lambda device=None: _library.card_reset_peak(),
    "_snapshot": lambda *args, **kwargs: {"segments": [], "device_traces": [[]]},
    "_record_memory_history": lambda *args, **kwargs: None,
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "get_rng_state": lambda device="cuda": torch.get_rng_state(),
    "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
}
_BINDINGS: dict[str, Any] = {
    "_cuda_getDevice": lambda: 0,
    "_cuda_setDevice": lambda device: None,
    "_cuda_getDeviceCount": lambda: 1,
    "_cuda_getCurrentRawStream": lambda device: 0,
    "_cuda_clearCublasWorkspaces": lambda: None,
}


def _install() -> None:
    rooms = (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams)
    for name, value in _CUDA.items():
        for room in rooms:
            if room is torch.cuda or name in vars(room):
                setattr(room, name, value)
    for name, value in _BINDINGS.items():
        setattr(torch._C, name, value)
    torch.UntypedStorage.__new__ = staticmethod(_storage)  # type: ignore[assignment]


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skips what asks for kernels, speed or an allocator of a card's own."""
    for item in items:
        if item.get_closest_marker("real") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a card of silicon"))


@pytest.fixture(autouse=True)
def _no_copy_too_late() -> Iterator[None]:
    """Fails a test in which a copy came too late for its memory; in whatever process of pytest's it runs."""
    before = lost()
    yield
    _synchronize()
    assert lost() == before, "copies ran when their memory had been given back"


_install()
