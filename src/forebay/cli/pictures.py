"""The verb ``report``: its flags, and what it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.flags import AsJson
from forebay.cli.messages import errors_as_messages

__all__ = ["report"]


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a run, or a report as JSON (RunReport.to_json).")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the page there; else as report.html into the folder.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it too, a .png or .svg file.")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a trace too, which ui.perfetto.dev opens.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Make one page of a run that opens without a network: what was predicted, what was measured, what was learned."""
    with errors_as_messages():
        from forebay.cli.console import print_json, print_lines
        from forebay.cli.report import report as make

        made = make(run, out, plot, trace)
        if json:
            print_json(made.to_json_dict())
            return
        print_lines(*(f"to know: {words}" for words in made.shown.cautions), *made.shown.notes)
        print_lines(*(f"Written to {path}" for path in (made.page, made.plot, made.trace) if path is not None))
