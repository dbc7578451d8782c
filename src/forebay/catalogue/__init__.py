"""Machines that are not here, as data: one JSON file each, with its sources. No torch.

A file holds a ``Machine`` as ``forebay doctor --out`` writes one, so that a measured machine, an entry and a changed
copy of an entry are read in the same way. ``sources`` says of each figure whether it is from a specification, measured
by someone, or typical. Rates are what training code reaches, not peaks; the peak stands beside the share that is
taken of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from forebay.errors import ConfigError
from forebay.machine import MACHINE_SCHEMA, Machine
from forebay.names import meant

__all__ = ["for_device", "in_host", "is_listed", "load_machine", "machine_names", "read_machine"]

_BY_TORCH_NAME: Final = (
    (r"\bGH200\b", "gh200"),
    (r"\bH200\b", "h200"),
    (r"\bH100\b", "h100"),
    (r"\bA100\b.*\b40GB\b", "a100-40gb"),
    (r"\bA100\b", "a100-80gb"),
    (r"\bRTX 5090\b", "rtx-5090"),
    (r"\bRTX 4090\b", "rtx-4090"),
    (r"\bL4\b", "l4"),
    (r"\bT4\b", "t4"),
    (r"\bV100\b.*\b32GB\b", "v100-32gb"),
    (r"\bMI300X\b", "mi300x"),
)
_UNKNOWN: Final = "rtx-3090"
"""The entry for a GPU that the catalogue does not know: the slowest of those that people train on at home."""


def machine_names() -> tuple[str, ...]:
    """The names of all machines, in alphabetical order."""
    found = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".json") for name in found if name.endswith(".json")))


def load_machine(name: str) -> Machine:
    """The machine called ``name`` (``h100``, ``rtx-4090``; spaces and capitals do not matter).

    Raises ``ConfigError`` with the names if there is none.
    """
    plain = _plain(name)
    if plain not in machine_names():
        raise ConfigError(f"there is no machine {name} in the catalogue; {_hint(plain)}")
    return _parse((files(__name__) / f"{plain}.json").read_bytes(), f"the catalogue's {plain}")


def read_machine(source: str | Path) -> Machine:
    """The machine of the catalogue that ``source`` names, or the one in the file ``source``.

    Raises ``ConfigError`` naming file and field for a file that is truncated, of a newer schema, without a link, or
    with a rate that is not above 0; and with the names of the catalogue when there is neither entry nor file.
    """
    if isinstance(source, str) and _plain(source) in machine_names():
        return load_machine(source)
    path = Path(source)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(f"there is no machine and no file {source}; {_hint(_plain(str(source)))}") from None
    except OSError as error:
        raise ConfigError(f"cannot read the machine file {source}: {error.strerror}") from None
    return _parse(content, str(source))


def is_listed(machine: Machine) -> bool:
    """Whether ``machine`` is an entry of the catalogue, by its name: a machine of typical rates is not one."""
    return machine.name in machine_names()


def in_host(machine: Machine, memory: int | None = None, disk: int | None = None) -> Machine:
    """``machine`` in a host with at least ``memory`` bytes of memory and ``disk`` bytes of disk, if it is listed here:
    a card is sold into hosts of all sizes, and it is listed in one of them. Others are what they are."""
    if not is_listed(machine):
        return machine
    if memory is not None and memory > machine.host_capacity:
        # Where all of the listed memory may be page-locked, all of this may.
        all_of_it = machine.pinned_capacity == machine.host_capacity
        pinned = memory if all_of_it else machine.pinned_capacity
        machine = replace(machine, host_capacity=memory, pinned_capacity=pinned)
    if disk is not None and machine.disk is not None and disk > machine.disk.capacity:
        machine = replace(machine, disk=replace(machine.disk, capacity=disk))
    return machine


def for_device(torch_name: str) -> Machine:
    """The entry for the GPU that torch calls ``torch_name``; that of a plain card for one that is not listed."""
    for pattern, name in _BY_TORCH_NAME:
        if re.search(pattern, torch_name):
            return load_machine(name)
    return load_machine(_UNKNOWN)


def _plain(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())


def _hint(name: str) -> str:
    names = machine_names()
    return f"{meant(name, names)} machines are {', '.join(names)}, or the file of forebay doctor --out".lstrip()


def _parse(content: bytes, where: str) -> Machine:
    try:
        given = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where}: this is not whole JSON ({error}); write it again with forebay doctor --out"
        ) from None
    if not isinstance(given, dict):
        raise ConfigError(f"{where}: a machine is one JSON object, got {type(given).__name__}")
    schema = given.get("schema", MACHINE_SCHEMA)
    # First of all: a newer file may have other fields, and their names would only confuse.
    if isinstance(schema, int) and schema > MACHINE_SCHEMA:
        raise ConfigError(
            f"{where}: schema is {schema}, this forebay reads schema {MACHINE_SCHEMA}; update forebay, or measure the "
            f"machine again with forebay doctor"
        )
    for field, value in _numbers(given):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {field} must be a number of 0 or more, got {value}")
    try:
        return Machine.from_json(content)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number inside ``value`` with the path to it: no figure of a machine is below 0."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _numbers(inner, f"{path}.{index}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
