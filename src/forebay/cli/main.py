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
    Checksums,
    ClipNorm,
    DeviceKind,
    DeviceMemory,
    DiskPath,
    Dtype,
    HostMemory,
    LossWay,
    Optimizer,
    Policy,
    Seq,
    TileSize,
    UpdateIn,
    one_disk,
)
from forebay.cli.forecasting import compare, plan
from forebay.cli.messages import errors_as_messages
from forebay.cli.pictures import report
from forebay.cli.streams import keep_standard_descriptors, print_any_name
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
    keep_standard_descriptors()
    print_any_name()
    app()


@app.callback()
def _verbs() -> None:
    """Before every verb: where the current folder is gone, libraries of torch end the process without a reason."""
    with errors_as_messages():
        try:
            Path.cwd()
        except FileNotFoundError as error:
            raise UsageError("the folder that forebay was started in is gone; change to one that is there") from error


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
    checksums: Checksums = None,
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
        from forebay.cli.preparing import device_of

        asked = demo_settings(host_memory, one_disk(disk), steps, on_card=device_of(None) == "cuda")
        _train(None, asked, json)


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


def _train(config_file: Path | None, flags: Mapping[str, Any], as_json: bool, *, resume: bool = False) -> None:
    from forebay import api
    from forebay.cli.console import console, print_answer, print_json, print_lines
    from forebay.cli.progress import choose_view
    from forebay.cli.train import train as run_training
    from forebay.config import make_config, read_yaml
    from forebay.reporting.table import closing_table

    settings = {} if config_file is None else read_yaml(config_file)
    before = _of_run(flags["run"] or settings.get("run")) if resume else {}
    model = flags["model"] or settings.get("model") or before.get("model")
    if resume and model is None:
        folder = flags["run"] or settings["run"]
        raise UsageError(f"--resume: no run was begun in {folder}; leave --resume out, and give --model, to begin one")
    config = make_config(settings_of(model), before, settings, flags)
    result = run_training(config, api, choose_view(console(stderr=True)), resume=resume)
    if as_json:
        print_json(result.to_json_dict())
        return
    print_answer(closing_table(result.report, result.losses, result.skipped or 0))
    if result.folder is not None:
        print_lines(f"Kept in {result.folder}")


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


app.command()(plan)
app.command()(compare)
app.command()(verify)
app.command()(report)
app.command()(export)
app.command()(layout)
app.command()(fragmentation)
