"""The verbs ``layout`` and ``fragmentation``: their flags, and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.completion import among
from forebay.cli.flags import AsJson
from forebay.cli.messages import EXIT_NO, errors_as_messages

if TYPE_CHECKING:
    from forebay.buffers import Addresses

__all__ = ["fragmentation", "layout"]


def layout(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Buffers as CSV: id,lower,upper,size, as minimalloc reads them.")
    ],
    capacity: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes that there are; else as few as possible.")
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="arena, best-fit, exact, periodic or roam.",
            autocompletion=among("arena", "best-fit", "exact", "periodic", "roam"),
        ),
    ] = "arena",
    seconds: Annotated[
        float | None, typer.Option(help="How long to search; else 60 until it fits, 5 without a capacity.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the buffers there, with offsets.")] = None,
    json: AsJson = False,
) -> None:
    """Give buffers with known lives addresses in one piece of memory. No two that are live together overlap."""
    with errors_as_messages():
        if not _layout(file, capacity, layout, seconds, out, json):
            raise typer.Exit(EXIT_NO)


def _layout(
    file: Path, capacity: str | None, layout: str, seconds: float | None, out: Path | None, as_json: bool
) -> bool:
    """Prints the answer and returns whether it fits."""
    from json import dumps

    from rich.console import Console

    from forebay.buffer_csv import write_offsets
    from forebay.reporting.addresses import addresses_table
    from forebay.reporting.files import expect_folder_of

    if out is not None:
        expect_folder_of(out, "--out")  # before the search, which may take a minute
    found = _found(file, capacity, layout, seconds)
    if out is not None and found.feasible:
        write_offsets(found, out)
    if as_json:
        print(dumps(found.to_json_dict()))
    else:
        Console().print(addresses_table(found, file.name, out))
    return found.feasible


def _found(file: Path, capacity: str | None, layout: str, seconds: float | None) -> Addresses:
    """The addresses, checked. Raises a ``UsageError`` for what cannot be used."""
    from forebay.buffer_csv import read_buffers
    from forebay.buffers import BufferSet
    from forebay.checking.addresses import check_addresses
    from forebay.errors import ConfigError, UnitError
    from forebay.units import parse_bytes

    try:
        room = None if capacity is None else parse_bytes(capacity)
    except UnitError as error:
        raise ConfigError(f"--capacity: {error}") from None
    given = BufferSet(read_buffers(file), room)
    from forebay.planners.layout import lay_out  # after all that could be wrong with the input: it takes a moment

    found = lay_out(given, layout, seconds)
    check_addresses(found)
    return found


def fragmentation(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SNAPSHOT|RUN",
            help="A memory snapshot of PyTorch, the folder of a run, a trace as JSON, or buffers as CSV.",
        ),
    ],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw addresses over time, a .png or .svg file.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show what allocators would have reserved for what a program asked for, and who kept it from being given back."""
    with errors_as_messages():
        from json import dumps

        from rich.console import Console

        from forebay.cli.fragmentation import examine
        from forebay.reporting.address_plot import plot_addresses
        from forebay.reporting.fragmentation import fragmentation_table
        from forebay.reporting.plot import expect_plottable

        if plot is not None:
            expect_plottable(plot)
        found = examine(source)
        if json:
            print(dumps(found.to_json_dict()))
        else:
            Console().print(fragmentation_table(found))
        if plot is not None:
            plot_addresses(found.title, found.replays, plot)
