"""The verbs ``plan`` and ``compare``: their flags, and what they print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli.completion import models
from forebay.cli.flags import (
    Accumulate,
    AsJson,
    Batch,
    Bits,
    Checksums,
    DeviceMemory,
    Devices,
    DiskPath,
    Dtype,
    HostMemory,
    LossWay,
    MachineName,
    Optimizer,
    PlanPolicy,
    Policies,
    Seq,
    TileSize,
    UpdateIn,
    one_disk,
)
from forebay.cli.messages import EXIT_NO, errors_as_messages
from forebay.recipes import settings_of

__all__ = ["compare", "plan"]


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A recipe, a folder with config.json, a config.json, or package.module:function, called on the meta "
            "device, that returns (model, batch), or a model of transformers.",
            autocompletion=models,
        ),
    ],
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    accumulate: Accumulate = None,
    optimizer: Optimizer = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: DiskPath = None,
    machine: MachineName = None,
    policy: PlanPolicy = None,
    loss: LossWay = None,
    compress: Bits = None,
    update: UpdateIn = None,
    tile: TileSize = None,
    checksums: Checksums = None,
    devices: Devices = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan there, as JSON.")] = None,
    json: AsJson = False,
) -> None:
    """Say whether a training run fits, on which tiers, and how fast it will be. Needs neither weights nor a GPU."""
    with errors_as_messages():
        flags = _flags(locals())
        if not _plan(flags, out, json):
            raise typer.Exit(EXIT_NO)


def _flags(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a verb, of which ``make_settings`` takes those that it knows; all of its disks as one."""
    return {**given, "disk": one_disk(given["disk"])}


def _plan(flags: Mapping[str, Any], out: Path | None, as_json: bool) -> bool:
    """Prints the answer and returns whether the run fits."""
    from forebay.cli.console import print_answer, print_json
    from forebay.cli.devices import print_plan
    from forebay.cli.plan import make_settings, write_plan
    from forebay.cli.plan import plan as make_report
    from forebay.reporting.files import expect_folder_of
    from forebay.reporting.plan import plan_table

    if out is not None:
        expect_folder_of(out, "--out")  # before what may be minutes of planning
    settings = make_settings(settings_of(flags["model"]), flags)
    if settings.devices is not None:
        return print_plan(settings, out, as_json=as_json)
    report = make_report(settings)
    if as_json:
        print_json(report.to_json_dict())
    else:
        print_answer(plan_table(report))
    if out is not None and report.fits:
        write_plan(report, out)  # last: a file that cannot be written takes no figure with it
    return report.fits


def compare(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As for forebay plan.", autocompletion=models)],
    policies: Policies = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE,...|LOW:HIGH", help="Device budgets, or shares of what everything takes; else what there is."
        ),
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    accumulate: Accumulate = None,
    optimizer: Optimizer = None,
    host_memory: HostMemory = None,
    disk: DiskPath = None,
    machine: MachineName = None,
    update: UpdateIn = None,
    devices: Devices = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also run each policy that fits for a few steps, on this machine.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Draw step time over device budget (.png, .svg) or over device peak (.html)."
        ),
    ] = None,
    json: AsJson = False,
) -> None:
    """Put policies side by side: the step, what each tier holds, what crosses each link."""
    with errors_as_messages():
        flags = _flags(locals())
        if not _compare(flags, budgets, policies, measure, plot, json):
            raise typer.Exit(EXIT_NO)


def _compare(
    flags: Mapping[str, Any],
    budgets: str | None,
    policies: str | None,
    measure: bool,
    plot: Path | None,
    as_json: bool,
) -> bool:
    """Prints the answer and returns whether any policy fits and, if they were to be run, any ran."""
    from forebay.cli.compare import compare as make_comparison
    from forebay.cli.compare import draw, expect_picture, parse_budgets, parse_policies
    from forebay.cli.console import console, print_answer, print_json
    from forebay.cli.devices import print_comparison
    from forebay.cli.plan import make_settings
    from forebay.cli.progress import choose_view
    from forebay.reporting.comparison import comparison_tables

    settings = make_settings(settings_of(flags["model"]), flags)
    if settings.devices is not None:
        return print_comparison(settings, budgets, policies, as_json=as_json, measure=measure, plot=plot)
    if plot is not None:
        expect_picture(plot)  # before minutes of planning
    tell = choose_view(console(stderr=True)).note
    asked = parse_policies(policies)
    found = make_comparison(settings, parse_budgets(budgets), policies=asked, measure=measure, tell=tell)
    if as_json:
        print_json([candidate.to_json_dict() for candidate in found.candidates])
    else:
        print_answer(comparison_tables(found.title, found.candidates, found.notes))
    if plot is not None:
        draw(found, plot)  # last: a file that cannot be written takes no figure with it
    return any(candidate.served for candidate in found.candidates)
