"""``forebay doctor``: what this machine can hold, move and compute, measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from forebay.cli.advice import advice
from forebay.cli.console import print_answer, print_lines
from forebay.cli.messages import say
from forebay.errors import ConfigError
from forebay.machine import Link, Machine
from forebay.units import KiB, MiB, format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["doctor", "machine_table"]

_SIZES = (64 * KiB, MiB, 16 * MiB, 256 * MiB)
"""Transfers whose rates are shown: a small gradient, a state chunk of a small model, a layer, a large layer."""


def doctor(device: str | None, disk: str | None, refresh: bool, out: Path | None, as_json: bool) -> None:
    """Measures this machine (or recalls it), and prints it as a table, or as one JSON object on stdout.

    Raises the ``ForebayError`` of whatever stands in the way.
    """
    _check_out(out)
    if disk is not None and not disk.strip():
        raise ConfigError("--disk: the path is empty; name a folder on the disk to measure")
    from forebay.profiler.probe import examine
    from forebay.tiers.host import available_host_memory

    found = examine(device, disk, refresh, tell=say)
    machine = found.machine
    if out is not None:
        _write(out, machine)
    if as_json:
        print_lines(machine.to_json())
        return
    words = advice(machine, available_host_memory(), _installed())
    if not found.seconds:
        print_lines("Remembered from an earlier measurement; --refresh measures anew.")
    print_answer(machine_table(machine, (*found.remarks, *words)))
    if out is not None:
        print_lines(f"Written to {out}")


def machine_table(machine: Machine, words: Sequence[str] = ()) -> Group:
    """Capacities, rates and curves of ``machine``, what to make of them (``words``), and how they were found.

    Readable at 80 columns and without colour.
    """
    parts: list[RenderableType] = [
        Text(f"{machine.name} ({machine.device_kind}, {machine.source})", style="bold"),
        _capacities(machine),
        _rates(machine),
        _curves(machine),
    ]
    for title, sentences in (("Worth knowing", words), ("How these were found", machine.sources)):
        if sentences:
            parts += [Text(title, style="bold"), *_bullets(sentences)]
    return Group(*parts)


def _capacities(machine: Machine) -> Table:
    table = _table("Capacities")
    table.add_column("tier", no_wrap=True)
    table.add_column("free for training", justify="right", no_wrap=True)
    table.add_row("device", format_bytes(machine.device_capacity))
    table.add_row("host", format_bytes(machine.host_capacity))
    pinned = format_bytes(machine.pinned_capacity) if machine.pinned_capacity else "not needed"
    table.add_row("page-locked", pinned)
    table.add_row("disk", "-" if machine.disk is None else format_bytes(machine.disk.capacity))
    return table


def _rates(machine: Machine) -> Table:
    table = _table("Rates")
    table.add_column("what", no_wrap=True)
    table.add_column("rate", justify="right", no_wrap=True)
    for dtype, rate in machine.compute.items():
        table.add_row(f"compute, {dtype}", _flops(rate))
    table.add_row("device memory", format_rate(machine.device_bandwidth))
    table.add_row("host memory", format_rate(machine.host_bandwidth))
    table.add_row("optimizer update on the host", format_rate(machine.update_rate))
    table.add_row("kept with both directions busy", f"{machine.duplex:.0%}")
    if machine.disk is not None:
        table.add_row("kept with the disk read and written", f"{machine.disk.duplex:.0%}")
        table.add_row("lost where the disk takes cores", f"{machine.disk.shared_cores:.0%}")
        table.add_row("kept where it is read and written by turns", f"{machine.disk.alternation:.0%}")
        table.add_row("for each chunk updated beside it", format_seconds(machine.disk.order_seconds))
    table.add_row("lost where cores are shared", f"{machine.shared_cores:.0%}")
    table.add_row("host's part of an op", format_seconds(machine.launch_seconds))
    table.add_row("more where blocks stream", format_seconds(machine.watch_seconds))
    table.add_row("for each transfer of an activation", format_seconds(machine.handover_seconds))
    table.add_row("more for an op that runs again", format_seconds(machine.replay_seconds))
    table.add_row("more for an op of a block whose ops are treated", format_seconds(machine.treat_seconds))
    table.add_row("more for an op where micro-batches pass together", format_seconds(machine.together_seconds))
    return table


def _curves(machine: Machine) -> Table:
    links: dict[str, Link] = {"h2d": machine.h2d, "d2h": machine.d2h}
    if machine.offload is not None:
        links["offload"] = machine.offload
    if machine.disk is not None:
        links |= {"disk read": machine.disk.read, "disk write": machine.disk.write}
    table = _table("One transfer of so many bytes, latency included")
    table.add_column("link", no_wrap=True)
    for size in _SIZES:
        table.add_column(format_bytes(size).replace(".0", ""), justify="right", no_wrap=True)
    table.add_column("latency", justify="right", no_wrap=True)
    for name, link in links.items():
        rates = [format_rate(size / link.seconds(size)) for size in _SIZES]
        table.add_row(name, *rates, format_seconds(link.latency))
    return table


def _table(title: str) -> Table:
    return Table(box=SIMPLE_HEAD, title=title, title_justify="left", title_style="bold")


def _flops(rate: float) -> str:
    for unit, name in ((1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if rate >= unit:
            return f"{rate / unit:.1f} {name}"
    return f"{rate / 1e6:.1f} MFLOP/s"


def _bullets(sentences: Sequence[str]) -> list[RenderableType]:
    # The hanging indent keeps a wrapped sentence apart from the next one where there is no colour.
    rows: list[RenderableType] = []
    for sentence in sentences:
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_row("-", Text(sentence))
        rows.append(Padding(row, (0, 0, 0, 2)))
    return rows


def _check_out(out: Path | None) -> None:
    """Refuses what cannot be written before anything is measured."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out {out}: this is not a file in a folder that exists")


def _write(out: Path, machine: Machine) -> None:
    try:
        out.write_text(machine.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out}: cannot be written: {error.strerror}") from None


def _installed() -> int:
    """Bytes of memory that the machine has, whatever this process may use of it."""
    import psutil

    return int(psutil.virtual_memory().total)
