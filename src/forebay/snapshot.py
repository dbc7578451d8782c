"""PyTorch's memory snapshots (``torch.cuda.memory._dump_snapshot``) as recordings. No torch.

A snapshot is a pickle of plain lists and dicts. Only those are read: a pickle that names a class or a function is
refused before anything of it runs.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, final

from forebay.buffers import LARGEST
from forebay.errors import ConfigError
from forebay.recording import Recording, Request
from forebay.units import format_bytes

__all__ = ["read_snapshot"]

_HOW = (
    "call torch.cuda.memory._record_memory_history() before what is to be seen and "
    "torch.cuda.memory._dump_snapshot(FILE) after it"
)

_ACTIVE = ("active_allocated", "active_awaiting_free", "active_pending_free")

_PYTORCH = ("/torch/", "torch/csrc", "??")
"""In the names of files that are not the user's."""


@final
class _Plain(pickle.Unpickler):
    """Reads what consists of plain values alone."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ConfigError(f"it names {module}.{name}, and a memory snapshot holds plain values alone")


def read_snapshot(path: Path) -> Recording:
    """What the device with the longest history asked for, from the beginning of that history on; without any history,
    the one that has most reserved.

    What was there before comes first, as far as the snapshot tells: it was given back in the history, or is still
    there. A request is called after the innermost line of the user's that made it. Raises ``ConfigError`` for what is
    no snapshot, or one of nothing.
    """
    try:
        with path.open("rb") as file:
            snapshot = _loaded(file)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except ConfigError as error:
        raise ConfigError(f"{path} is not a memory snapshot of PyTorch: {error}") from None
    try:
        traces, segments = snapshot["device_traces"], snapshot["segments"]
        held = Counter[int]()
        for segment in segments:
            held[segment.get("device", 0)] += segment["total_size"]
        device = max(range(len(traces)), key=lambda index: (len(traces[index]), held[index]), default=-1)
        if device < 0 or not (traces[device] or held[device]):
            raise ConfigError(f"{path} has no history of allocations, and nothing is there; {_HOW}")
        own = [segment for segment in segments if segment.get("device", 0) == device]
        return _recording(traces[device], own, device)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise ConfigError(f"{path} is not a memory snapshot that forebay knows ({error!r}); {_HOW}") from None


def _loaded(file: IO[bytes]) -> Any:
    try:
        return _Plain(file).load()
    except ConfigError:
        raise
    except Exception as error:  # a broken pickle raises anything
        raise ConfigError(f"it cannot be read ({type(error).__name__})") from None


def _recording(trace: Sequence[Mapping[str, Any]], segments: Sequence[Mapping[str, Any]], device: int) -> Recording:
    requests: list[Request] = []
    events: list[int] = []
    before: list[int] = []
    short: list[str] = []
    there: dict[int, int] = {}  # numbers by address

    def new(entry: Mapping[str, Any], nbytes: Any, stream: Any) -> int:
        if not isinstance(nbytes, int) or not 0 <= nbytes <= LARGEST or not isinstance(stream, int):
            raise ValueError(f"a request of {nbytes!r} bytes on stream {stream!r}")
        requests.append(Request(_what(entry), nbytes, stream))
        return len(requests) - 1

    for entry in trace:
        if entry["action"] == "alloc":
            there[entry["addr"]] = new(entry, entry["size"], entry["stream"])
            events.append(there[entry["addr"]])
        elif entry["action"] == "free_completed":
            number = there.pop(entry["addr"], None)
            if number is None:
                number = new(entry, entry["size"], entry["stream"])
                before.append(number)
            events.append(-1 - number)
        elif entry["action"] == "oom":
            short.append(f"it ran out when {format_bytes(entry['size'])} more were asked for: {_what(entry)}")
    for segment in segments:
        for address, block in _blocks(segment):
            if block["state"] in _ACTIVE and address not in there:
                before.append(new(block, block.get("requested_size", block["size"]), segment["stream"]))
    notes = (f"device {device}: {len(trace)} entries, {len(before)} requests were there before", *short)
    observed = sum(segment["total_size"] for segment in segments)
    return Recording(tuple(requests), (*before, *events), notes, observed)


def _blocks(segment: Mapping[str, Any]) -> list[tuple[int, Mapping[str, Any]]]:
    """The blocks of a segment with their addresses, which older snapshots do not have."""
    found, address = [], segment["address"]
    for block in segment["blocks"]:
        found.append((block.get("address", address), block))
        address += block["size"]
    return found


def _what(entry: Mapping[str, Any]) -> str:
    """The innermost line of the user's, or of anybody's."""
    frames = entry.get("frames") or []
    own = [frame for frame in frames if not any(part in frame["filename"] for part in _PYTORCH)]
    for frame in own or frames:
        line = f":{frame['line']}" if frame["line"] else ""
        return f"{Path(frame['filename']).name}{line} {frame['name']}"
    return "unknown"
