"""The verbs ``layout`` and ``fragmentation``: their flags, and what they print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.completion import among, models
from forebay.cli.flags import AsJson, Batch, Dtype, Seq
from forebay.cli.messages import EXIT_NO, errors_as_messages

__all__ = ["fragmentation", "layout"]


def layout(
    source: Annotated[
        str,
        typer.Argument(
            metavar="FILE|MODEL",
            help="Buffers as CSV (id,lower,upper,size, as minimalloc reads them); or a step: a model as for forebay "
            "plan, or a trace or a graph of ops as JSON.",
            autocompletion=models,
        ),
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
    order: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of a step's ops: program, or roam, in which fewer bytes are live at one time.",
            autocompletion=among("program", "roam"),
        ),
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="How long to search; else 60 until it fits, 5 without a capacity, and 10 for an order."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the buffers there, with offsets.")] = None,
    graph: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a step's graph there, as JSON.")] = None,
    json: AsJson = False,
) -> None:
    """Give buffers with known lives addresses in one piece of memory. No two that are live together overlap."""
    with errors_as_messages():
        from forebay.cli.console import print_answer, print_json
        from forebay.cli.layout import Asked, lay
        from forebay.reporting.addresses import addresses_table
        from forebay.reporting.order import order_lines, order_object

        step = {"batch": batch, "seq": seq, "dtype": dtype}
        found = lay(Asked(source, capacity, layout, order, step, seconds, out, graph))
        placed, ordered = found.addresses, found.ordered
        if json:
            print_json(placed.to_json_dict() | ({} if ordered is None else {"order": order_object(ordered)}))
        else:
            lines = () if ordered is None else order_lines(ordered)
            print_answer(addresses_table(placed, found.title, out, lines))
        if not placed.feasible:
            raise typer.Exit(EXIT_NO)


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
        from forebay.cli.console import print_answer, print_json
        from forebay.cli.fragmentation import examine
        from forebay.reporting.address_plot import plot_addresses
        from forebay.reporting.fragmentation import fragmentation_table
        from forebay.reporting.plot import expect_plottable

        if plot is not None:
            expect_plottable(plot)
        found = examine(source)
        if json:
            print_json(found.to_json_dict())
        else:
            print_answer(fragmentation_table(found))
        if plot is not None:
            plot_addresses(found.title, found.replays, plot)
