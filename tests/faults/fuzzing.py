"""Files that are not what they should be: random changes to a file that is."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Change", "of_bytes", "of_json", "of_safetensors", "of_yaml"]

Change = Callable[[bytes, random.Random], bytes]
"""From the content of a file to another one."""

_HUGE = 1 << 60

_ODD: tuple[Any, ...] = (None, True, -1, 0, 1.5, _HUGE, 10**400, "", "a\nb", "x" * 100_000, [], [[]], {}, {"a\nb": -1})
_ODD_TEXT = ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 50_000, '{"a":' * 50_000, "\x00", '"\\ud800"', "2001-99-99")


def _flipped(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(len(content))]


def _joined(content: bytes, draw: random.Random) -> bytes:
    """Bytes of one place put into another."""
    first, second = sorted(draw.sample(range(len(content)), 2))
    at = draw.randrange(len(content))
    return content[:at] + content[first:second] + content[at:]


def _noise(content: bytes, draw: random.Random) -> bytes:
    return draw.randbytes(draw.randint(0, 300))


def _with_odd_text(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + draw.choice(_ODD_TEXT).encode() + content[at:]


def of_bytes(content: bytes, draw: random.Random) -> bytes:
    """Any file: bits flipped, cut, repeated, noise."""
    return draw.choice((_flipped, _cut, _joined, _noise, _with_odd_text))(content, draw)


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container below ``node`` with every key in it."""
    for key, value in list(node.items() if isinstance(node, dict) else enumerate(node)):
        yield node, key
        if isinstance(value, dict | list):
            yield from _places(value)


def _odd_value(whole: Any, draw: random.Random) -> None:
    """Changes a value somewhere in ``whole``, or its key, or takes it away."""
    place, key = draw.choice(list(_places(whole)))
    how = draw.random()
    if how < 0.6:
        place[key] = draw.choice(_ODD)
    elif how < 0.8 and isinstance(place[key], int | float) and not isinstance(place[key], bool):
        place[key] = draw.choice((-place[key], place[key] + 1, place[key] * 2**40, str(place[key])))
    elif isinstance(place, dict) and how < 0.9:
        place["a\nb" if draw.random() < 0.5 else f"{key}s"] = place.pop(key)
    else:
        del place[key]


def of_json(content: bytes, draw: random.Random) -> bytes:
    """A file of JSON: as ``of_bytes``, or one or two values of it are others."""
    if draw.random() < 0.3:
        return of_bytes(content, draw)
    whole = json.loads(content)
    for _ in range(draw.randint(1, 2)):
        if whole:
            _odd_value(whole, draw)
    return json.dumps(whole).encode()


BOMB = b"".join(b"a%d: &a%d [%s]\n" % (n, n, b",".join([b"*a%d" % (n - 1)] * 9) if n else b"x") for n in range(12))
"""Nine times nine times nine ... references to one list."""


def of_yaml(content: bytes, draw: random.Random) -> bytes:
    """Settings as YAML (of which JSON is a part): as ``of_json``, or with references that grow."""
    if draw.random() < 0.1:
        return (
            BOMB + b"\n".join(line for line in content.splitlines() if not line.startswith(b"data")) + b"\ndata: *a11\n"
        )
    if draw.random() < 0.3:
        return of_bytes(content, draw)
    import yaml

    return of_json(json.dumps(yaml.safe_load(content)).encode(), draw)


def of_safetensors(content: bytes, draw: random.Random) -> bytes:
    """A file of tensors: the length of its header, the header, or any bytes of it are others."""
    length = struct.unpack("<Q", content[:8])[0]
    header, rest = content[8 : 8 + length], content[8 + length :]
    how = draw.random()
    if how < 0.3:
        length = draw.choice((0, 1, len(content), _HUGE, 2**64 - 1, 100_000_000, draw.getrandbits(64)))
        return struct.pack("<Q", length) + header + rest
    if how < 0.8:
        changed = of_json(header, draw)
        return struct.pack("<Q", len(changed)) + changed + rest
    return of_bytes(content, draw)
