"""The ``forebay`` command. Verbs import what they need when they run: help must not wait for torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli.addresses import fragmentation, layout
from forebay.cli.completion import among, models
from forebay.cli.flags import (
    Accumulate,
    AsJson,
    Batch,
    Bits,
    ClipNorm,
    DeviceKind,
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
    Policy,
    Seq,
    TileSize,
    UpdateIn,
    one_disk,
)
from forebay.cli.messages import EXIT_NO, errors_as_messages
from forebay.cli.pictures import report
from forebay.cli.verbs import export, verify
from forebay.errors import UsageError
from forebay.recipes import settings_of

__all__ = ["app", "main"]

app = typer.Typer(
    name="forebay",
    help="Train models that do not fit in device memory, with the numbers of plain PyTorch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Entry point. Exit code 0: yes, 1: no (it does not fit, it failed), 2: misuse, 130: stopped by Ctrl-C."""
    app()


@app.callback()
def _verbs() -> None:
    """Keeps every verb a verb: typer drops the name of an only one."""


@app.command()
def train(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="CONFIG.yaml|FILE",
            help="Settings as YAML (flags override them), and more text files after --data.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="A recipe, a folder with config.json (and weights), or a config.json.", autocompletion=models
        ),
    ] = None,
    data: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Text files (UTF-8) to train on.")] = None,
    batch: Batch = None,
    seq: Seq = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate, after a warmup over a tenth of the steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides random weights, dropout and the order of the text.")] = None,
    dtype: Dtype = None,
    accumulate: Accumulate = None,
    clip_norm: ClipNorm = None,
    optimizer: Optimizer = None,
    device: DeviceKind = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: DiskPath = None,
    policy: Policy = None,
    loss: LossWay = None,
    compress: Bits = None,
    update: UpdateIn = None,
    tile: TileSize = None,
    nonfinite: Annotated[
        str | None,
        typer.Option(
            metavar="stop|skip",
            help="What to do with a step whose loss or gradients are inf or NaN.",
            autocompletion=among("stop", "skip"),
        ),
    ] = None,
    run: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep plan, report, losses and model; Ctrl-C saves there.")
    ] = None,
    save_every: Annotated[
        int | None, typer.Option(metavar="STEPS", help="Save the run in its folder after every so many steps.")
    ] = None,
    checksums: Annotated[
        bool | None,
        typer.Option("--checksums/--no-checksums", help="Hold what is read from --disk against its checksums."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in the folder of --run, with its settings.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Train a causal language model on text files within the memory you allow."""
    with errors_as_messages():
        config_file, more_data = _split_files(files or [])
        flags = {
            "model": model,
            "data": [*(data or []), *more_data] or None,
            "batch": batch,
            "seq": seq,
            "steps": steps,
            "lr": lr,
            "seed": seed,
            "dtype": dtype,
            "accumulate": accumulate,
            "clip_norm": clip_norm,
            "optimizer": optimizer,
            "device": device,
            "device_memory": device_memory,
            "host_memory": host_memory,
            "disk": one_disk(disk),
            "policy": policy,
            "loss": loss,
            "compress": compress,
            "update": update,
            "tile": tile,
            "nonfinite": nonfinite,
            "run": run,
            "save_every": save_every,
            "checksums": checksums,
        }
        _train(config_file, flags, json, resume=resume)


@app.command()
def demo(
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Host budget, like 512MiB.")] = None,
    disk: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH[:SIZE]", help="Folder for a disk tier; lowers the host budget too."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = None,
    json: AsJson = False,
) -> None:
    """Train a model that needs several times its device memory on the annual messages of the US presidents."""
    with errors_as_messages():
        from forebay.cli.demo import demo_settings

        _train(None, demo_settings(host_memory, one_disk(disk), steps), json)


@app.command()
def doctor(
    device: DeviceKind = None,
    disk: Annotated[str | None, typer.Option(metavar="PATH", help="A folder on the disk to measure.")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure anew what was measured before.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the machine there, as JSON.")] = None,
    json: AsJson = False,
) -> None:
    """Measure what this machine can hold, move and compute (under 20 s, then remembered)."""
    with errors_as_messages():
        from forebay.cli.doctor import doctor as examine

        examine(device, disk, refresh, out, json)


@app.command()
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
    devices: Devices = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the plan there, as JSON.")] = None,
    json: AsJson = False,
) -> None:
    """Say whether a training run fits, on which tiers, and how fast it will be. Needs neither weights nor a GPU."""
    with errors_as_messages():
        flags = {
            "model": model,
            "batch": batch,
            "seq": seq,
            "dtype": dtype,
            "accumulate": accumulate,
            "optimizer": optimizer,
            "device_memory": device_memory,
            "host_memory": host_memory,
            "disk": one_disk(disk),
            "machine": machine,
            "policy": policy,
            "loss": loss,
            "compress": compress,
            "update": update,
            "tile": tile,
            "devices": devices,
        }
        if not _plan(flags, out, json):
            raise typer.Exit(EXIT_NO)


def _plan(flags: Mapping[str, Any], out: Path | None, as_json: bool) -> bool:
    """Prints the answer and returns whether the run fits."""
    from json import dumps

    from rich.console import Console

    from forebay.cli.devices import print_plan
    from forebay.cli.plan import make_settings, write_plan
    from forebay.cli.plan import plan as make_report
    from forebay.reporting.plan import plan_table

    settings = make_settings(settings_of(flags["model"]), flags)
    if settings.devices is not None:
        return print_plan(settings, out, as_json=as_json)
    report = make_report(settings)
    if out is not None and report.fits:
        write_plan(report, out)
    if as_json:
        print(dumps(report.to_json_dict()))
    else:
        Console().print(plan_table(report))
    return report.fits


@app.command()
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
        flags = {
            "model": model,
            "batch": batch,
            "seq": seq,
            "dtype": dtype,
            "accumulate": accumulate,
            "optimizer": optimizer,
            "host_memory": host_memory,
            "disk": one_disk(disk),
            "machine": machine,
            "update": update,
            "devices": devices,
        }
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
    from json import dumps

    from rich.console import Console

    from forebay.cli.compare import compare as make_comparison
    from forebay.cli.compare import draw, expect_picture, parse_budgets, parse_policies
    from forebay.cli.devices import print_comparison
    from forebay.cli.plan import make_settings
    from forebay.cli.progress import choose_view
    from forebay.reporting.comparison import comparison_tables

    settings = make_settings(settings_of(flags["model"]), flags)
    if settings.devices is not None:
        return print_comparison(settings, budgets, policies, as_json=as_json, measure=measure, plot=plot)
    if plot is not None:
        expect_picture(plot)  # before minutes of planning
    tell = choose_view(Console(stderr=True)).note
    asked = parse_policies(policies)
    found = make_comparison(settings, parse_budgets(budgets), policies=asked, measure=measure, tell=tell)
    if as_json:
        print(dumps([candidate.to_json_dict() for candidate in found.candidates]))
    else:
        Console().print(comparison_tables(found.title, found.candidates, found.notes))
    if plot is not None:
        draw(found, plot)  # last: a file that cannot be written takes no figure with it
    return any(candidate.served for candidate in found.candidates)


def _train(config_file: Path | None, flags: Mapping[str, Any], as_json: bool, *, resume: bool = False) -> None:
    from json import dumps

    from rich.console import Console

    from forebay import api
    from forebay.cli.progress import choose_view
    from forebay.cli.train import train as run_training
    from forebay.config import make_config, read_yaml
    from forebay.reporting.table import closing_table

    settings = {} if config_file is None else read_yaml(config_file)
    before = _of_run(flags["run"] or settings.get("run")) if resume else {}
    model = flags["model"] or settings.get("model") or before.get("model")
    config = make_config(settings_of(model), before, settings, flags)
    result = run_training(config, api, choose_view(Console(stderr=True)), resume=resume)
    if as_json:
        print(dumps(result.to_json_dict()))
        return
    console = Console()
    console.print(closing_table(result.report, result.losses, result.skipped or 0))
    if result.folder is not None:
        console.print(f"Kept in {result.folder}", markup=False, highlight=False, soft_wrap=True)


def _of_run(folder: Path | str | None) -> Mapping[str, Any]:
    """Settings of the run in a folder, to go on with."""
    from forebay.cli.runfolder import begun_with

    if folder is None:
        raise UsageError("--resume goes on with a run; give its folder as --run FOLDER")
    return begun_with(Path(folder))


def _split_files(files: list[Path]) -> tuple[Path | None, list[Path]]:
    """The configuration (the one that ends in .yaml or .yml) and the data files: a shell expands ``--data *.txt``
    to one value of the flag and loose names after it."""
    configs = [file for file in files if file.suffix in (".yaml", ".yml")]
    if len(configs) > 1:
        raise UsageError(f"one configuration at a time, got {', '.join(map(str, configs))}")
    return configs[0] if configs else None, [file for file in files if file not in configs]


app.command()(verify)
app.command()(report)
app.command()(export)
app.command()(layout)
app.command()(fragmentation)
