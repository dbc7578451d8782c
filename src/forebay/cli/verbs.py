"""The verbs ``verify`` and ``export``: their flags, and what they print."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

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
    UpdateIn,
    one_disk,
)
from forebay.cli.messages import EXIT_NO, errors_as_messages

__all__ = ["export", "verify"]


def verify(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="As for forebay plan; with weights where it has some.", autocompletion=models
        ),
    ],
    data: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Text files (UTF-8) to train on; else made-up data.")
    ] = None,
    batch: Batch = None,
    seq: Seq = None,
    layers: Annotated[
        int | None, typer.Option(help="Only so many layers; else as many as there is memory for.")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps that are looked at one by one, as many again, and as many behind a resume."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides random weights, data and dropout.")] = None,
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
    checksums: Checksums = None,
    json: AsJson = False,
) -> None:
    """Train a model with forebay and in plain PyTorch for a few steps, and say whether the numbers are the same."""
    with errors_as_messages():
        flags = {
            "model": model,
            "data": data,
            "batch": batch,
            "seq": seq,
            "layers": layers,
            "steps": steps,
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
            "checksums": checksums,
        }
        if not _verify(flags, json):
            raise typer.Exit(EXIT_NO)


def _verify(flags: Mapping[str, Any], as_json: bool) -> bool:
    """Prints the answer and returns whether all is as promised."""
    from forebay.cli.console import console, print_answer, print_json
    from forebay.cli.plan import make_settings, read_settings
    from forebay.cli.progress import choose_view
    from forebay.cli.verify import USUAL, Extent
    from forebay.cli.verify import verify as make_verdict
    from forebay.recipes import settings_of
    from forebay.reporting.verdict import verdict_table

    usual = USUAL.get(flags["update"] or "step", {})
    asked = make_settings(usual, settings_of(flags["model"]), flags)
    verdict = make_verdict(asked, read_settings(Extent, usual, flags), choose_view(console(stderr=True)).note)
    if as_json:
        print_json(verdict.to_json_dict())
    else:
        print_answer(verdict_table(verdict))
    return verdict.kept


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run, or of a model with safetensors.")],
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Write there; the folder is new or empty.")],
    layout: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="huggingface (from_pretrained reads it), dcp (torch.distributed.checkpoint) or torch.",
            autocompletion=among("huggingface", "dcp", "torch"),
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16; else as it is kept.", autocompletion=among("float32", "bfloat16")),
    ] = None,
    json: AsJson = False,
) -> None:
    """Write the model of a run as other programs read it, one tensor in memory at a time."""
    with errors_as_messages():
        from forebay.cli.console import print_json, print_lines
        from forebay.cli.export import export as write

        made = write(run, to, layout=layout, dtype=dtype)
        if json:
            print_json(made.to_json_dict())
        else:
            print_lines(made.words)
