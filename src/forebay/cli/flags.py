"""Flags that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.completion import among, machines, policies, policy_lists, simulated_policies
from forebay.units import parse_disks

__all__ = [
    "Accumulate",
    "AsJson",
    "Batch",
    "Bits",
    "Checksums",
    "ClipNorm",
    "DeviceKind",
    "DeviceMemory",
    "Devices",
    "DiskPath",
    "Dtype",
    "HostMemory",
    "LossWay",
    "MachineName",
    "Optimizer",
    "PlanPolicy",
    "Policies",
    "Policy",
    "Seq",
    "TileSize",
    "UpdateIn",
    "one_disk",
]

Seq = Annotated[int | None, typer.Option(help="Tokens in a sequence.")]
Dtype = Annotated[
    str | None,
    typer.Option(help="Of parameters: float32 or bfloat16 (fp32 master).", autocompletion=among("float32", "bfloat16")),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        help="adamw, adam, sgd, rmsprop, adagrad, adadelta, adamax, lion, adafactor, muon, or adamw-bf16, -8bit, "
        "-4bit; -sr behind one: no fp32 masters.",
        autocompletion=among(
            *("adamw", "adam", "sgd", "adamw-bf16", "adamw-8bit", "adamw-4bit", "lion", "adafactor", "muon"),
            *("rmsprop", "adagrad", "adadelta", "adamax"),
            *("adamw-sr", "adamw-bf16-sr", "adamw-8bit-sr", "adamw-4bit-sr", "lion-sr", "adafactor-sr"),
        ),
    ),
]
DeviceKind = Annotated[
    str | None, typer.Option(help="cpu or cuda; cuda where there is one.", autocompletion=among("cpu", "cuda"))
]
DeviceMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Device budget, like 24GiB.")]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="N|N+N[:RATE]", help="Several devices, by root complex, with links of RATE between them: simulated."
    ),
]
HostMemory = Annotated[str | None, typer.Option(metavar="SIZE", help="Host budget, like 96GiB.")]
DiskPath = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATH[:SIZE],...",
        help="Folder for a disk tier; of several disks one on each, as /a:1TiB,/b:1TiB or one flag for each.",
    ),
]
MachineName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE", help="Of the catalogue, or written by doctor; else this one.", autocompletion=machines
    ),
]
Policy = Annotated[str | None, typer.Option(help="The planner.", autocompletion=policies)]
PlanPolicy = Annotated[str | None, typer.Option(help="The planner.", autocompletion=simulated_policies)]
Policies = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Policies, or all, states, activations: the published ones.",
        autocompletion=policy_lists,
    ),
]
LossWay = Annotated[
    str | None,
    typer.Option(
        help="plain, chunked (a language model's, in pieces), or auto: where it gains.",
        autocompletion=among("auto", "plain", "chunked"),
    ),
]
Bits = Annotated[
    int | None,
    typer.Option(
        metavar="BITS",
        help="Activations may be kept as 8, 4 or 2 bits, which changes the numbers.",
        autocompletion=among("8", "4", "2"),
    ),
]
UpdateIn = Annotated[
    str | None,
    typer.Option(
        metavar="step|backward",
        help="backward: blocks are updated as their gradients land, which uses these up.",
        autocompletion=among("step", "backward"),
    ),
]
Checksums = Annotated[
    bool | None,
    typer.Option("--checksums/--no-checksums", help="Hold what is read from --disk against its checksums."),
]
TileSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Cut larger weights: of each as much is on the device at a time.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Batch = Annotated[int | None, typer.Option(help="Sequences in a micro-batch.")]
Accumulate = Annotated[int | None, typer.Option(help="Micro-batches in an optimizer step.")]
ClipNorm = Annotated[float | None, typer.Option(help="Clip the gradients to this norm.")]


def one_disk(given: list[str] | None) -> str | None:
    """The folders of all ``--disk`` flags, as one of them would name all."""
    if not given:
        return None
    if len(given) == 1:
        return given[0]
    for one in given:
        parse_disks(one)  # by itself: an empty one would become a part of the path before it
    # And a comma before a path that is not absolute could be a part of that path.
    return ",".join(one if one.startswith("/") else f"{Path.cwd()}/{one}" for one in given)
