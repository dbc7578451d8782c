"""The command line of the benchmarks.

scripts/bench list
scripts/bench run resident-cpu streamed-cpu
scripts/bench predict
scripts/bench planning 12 100
scripts/bench solving 12 100 --policies rotor rockmate
scripts/bench policies --models gpt2-xl --machines t4 rtx-4090
scripts/bench states --models llama-16m --folder /tmp
scripts/bench losses --tasks fine-tuned --seeds 0
scripts/bench papers
scripts/bench layout hard large
scripts/bench traces
scripts/bench fits
scripts/bench families
scripts/bench activations gpt2-14m
scripts/bench update
scripts/bench instructions
scripts/bench disk --folder /tmp
scripts/bench disk-step --folder /tmp
scripts/bench checkpoints --folder /tmp
scripts/bench hidden
scripts/bench hidden-long
scripts/bench hidden-wide
scripts/bench accumulate
scripts/bench several --folder /tmp
scripts/bench zero --folder /tmp
scripts/bench table
scripts/bench keep FOLDER/results.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.case import BenchmarkError, DeviceKind, among
from benchmarks.cases import CASES, find

__all__ = ["main"]


HOST_TOPICS = {
    "disk": "hold the disk tier against fio",
    "disk-step": "hold a step with all states on disk against the longer of compute and the disk",
    "checkpoints": "hold steps that are saved, with all states on disk, against steps that are not",
    "hidden": "hold steps with clipping against their forward and backward alone",
    "hidden-long": "the same for longer models, whose steps have more to hide it behind",
    "hidden-wide": "the same for blocks of more elements, of which each takes less of a step beside its work",
    "accumulate": "hold forebay.accumulate against the loop over micro-batches",
    "several": "hold two models in turns against one after the other",
    "zero": "hold forebay against DeepSpeed's ZeRO",
}
"""The comparisons of ``fasthost``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 done, 1 a benchmark failed, 2 misuse."""
    options = _parser().parse_args(arguments)
    try:
        command = {
            "list": _list,
            "run": _run,
            "predict": _predict,
            "planning": _planning,
            "solving": _solving,
            "policies": _policies,
            "states": _states,
            "losses": _losses,
            "papers": _papers,
            "layout": _layout,
            "fits": _fits,
            "families": _families,
            "traces": _traces,
            "activations": _activations,
            "update": _update,
            "instructions": _instructions,
            **dict.fromkeys(HOST_TOPICS, _host),
            "table": _table,
            "keep": _keep,
        }[options.command]
        command(options)
    except BenchmarkError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Benchmarks of forebay.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="the cases and what each asks")
    run = commands.add_parser("run", help="run cases and keep their results")
    run.add_argument("cases", nargs="*", metavar="CASE", help="default: every case that needs no card")
    run.add_argument("--append-to", type=Path, metavar="FILE", help="one line a result here, not a file each")
    run.add_argument("--revision", help="the commit, where the code is a copy and no repository")
    predict = commands.add_parser("predict", help="hold predictions against runs, and keep the comparison")
    predict.add_argument("models", nargs="*", metavar="MODEL", help="default: the whole zoo, as in the table")
    planning = commands.add_parser("planning", help="how long it takes to plan models of many layers")
    planning.add_argument("layers", nargs="*", type=int, metavar="LAYERS", help="default: 12, 32 and 100")
    solving = commands.add_parser("solving", help="how long each planner for activations takes")
    solving.add_argument("layers", nargs="*", type=int, metavar="LAYERS", help="default: 12, 32 and 100")
    solving.add_argument("--policies", nargs="+", default=(), metavar="POLICY", help="default: all for activations")
    policies = commands.add_parser("policies", help="hold auto against published policies, simulated")
    policies.add_argument("--models", nargs="+", default=(), metavar="MODEL", help="default: all five")
    policies.add_argument("--machines", nargs="+", default=(), metavar="MACHINE", help="default: all eight")
    policies.add_argument("--shares", nargs="+", type=float, metavar="SHARE", help="of the device; default: .25 .5 1")
    states = commands.add_parser("states", help="hold what is foretold of every policy for states against its run")
    states.add_argument("--models", nargs="+", default=(), metavar="MODEL", help="default: all three")
    states.add_argument("--policies", nargs="+", default=(), metavar="POLICY", help="default: all for states")
    states.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to use")
    states.add_argument("--memory", nargs="+", default=(), metavar="MEMORY", help="host, disk; default: both")
    states.add_argument("--rounds", type=int, default=3, help="default: 3")
    losses = commands.add_parser("losses", help="hold updates that change the numbers against exact ones, on real text")
    losses.add_argument("--tasks", nargs="+", default=(), metavar="TASK", help="default: both")
    losses.add_argument("--seeds", nargs="+", type=int, default=(), metavar="SEED", help="default: all three")
    losses.add_argument("--ways", nargs="+", default=(), metavar="WAY", help="default: all, the exact one too")
    losses.add_argument("--quick", action="store_true", help="one seed, few steps: whether it works")
    papers = commands.add_parser("papers", help="hold policies against what their papers say, simulated")
    papers.add_argument("claims", nargs="*", metavar="CLAIM", help="default: all of benchmarks/papers")
    layout = commands.add_parser("layout", help="how low layouts of addresses are, and how long they take")
    layout.add_argument("topics", nargs="*", metavar="TOPIC", help="default: hard and large")
    traces = commands.add_parser("traces", help="steps of models under allocators, at addresses, in another order")
    traces.add_argument("models", nargs="*", metavar="MODEL", help="default: all of benchmarks/traces/models.py")
    fits = commands.add_parser("fits", help="lay out buffers that are known to fit, with OR-Tools and without")
    fits.add_argument("files", nargs="*", type=Path, metavar="FILE", help="as A.1048576.csv; default: sets made here")
    fits.add_argument("--styles", nargs="+", default=(), metavar="STYLE", help="default: all of those made here")
    fits.add_argument("--without-ortools", action="store_true", help="only as where OR-Tools is not installed")
    families = commands.add_parser("families", help="train every architecture of transformers, tiny, beside PyTorch")
    families.add_argument("--tasks", nargs="+", default=(), metavar="TASK", help="default: all")
    families.add_argument("--names", nargs="+", default=(), metavar="NAME", help="of transformers; default: all")
    activations = commands.add_parser("activations", help="hold forebay against what PyTorch offers for activations")
    activations.add_argument(
        "models", nargs="*", metavar="MODEL", help="default: all of benchmarks/activations/models.py"
    )
    activations.add_argument("--compile", action="store_true", help="torch.compile too, which takes minutes")
    activations.add_argument(
        "--beside-compiled", nargs="+", type=float, metavar="SHARE", help="only these budgets of torch.compile"
    )
    activations.add_argument("--rounds", type=int, help="default: as many as fit into seven minutes a model")
    activations.add_argument("--quick", action="store_true", help="small batches, one round: whether it works")
    update = commands.add_parser("update", help="hold the host's update kernels against torch's and DeepSpeed's")
    update.add_argument("--quick", action="store_true", help="few parameters, two rounds: whether it works")
    commands.add_parser("instructions", help="count the instructions of the update kernels")
    for name, words in HOST_TOPICS.items():
        topic = commands.add_parser(name, help=words)
        topic.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
        topic.add_argument("--quick", action="store_true", help="little of everything: whether it works")
    commands.add_parser("table", help="write the tables into benchmarks/README.md, docs/policies.md and README.md")
    keep = commands.add_parser("keep", help="take the results of scripts/gpu in")
    keep.add_argument("file", type=Path)
    return parser


def _list(options: argparse.Namespace) -> None:
    for case in CASES:
        print(f"{case.name:20} {case.device.value:5} {case.question}")


def _run(options: argparse.Namespace) -> None:
    from benchmarks.result import save
    from benchmarks.run import run_case
    from forebay.records import dump

    cases = [find(name) for name in options.cases] or [case for case in CASES if case.device is DeviceKind.CPU]
    for case in cases:
        print(f"{case.name}: {case.question}", flush=True)
        result = run_case(case, say=lambda line: print(f"  {line}", flush=True), revision=options.revision)
        if options.append_to is None:
            print(f"  kept as {save(result).name}")
        else:
            with options.append_to.open("a") as file:
                file.write(json.dumps(json.loads(dump(result))) + "\n")
        for row in result.rows:
            ratio = "" if row.median_ratio is None else f", {row.median_ratio:.3f} times {result.baseline}"
            print(f"  {row.name}: {row.outcome.value}{ratio} {row.detail}", flush=True)


def _predict(options: argparse.Namespace) -> None:
    from benchmarks.prediction.record import ARCHIVE
    from benchmarks.prediction.run import compare

    print(f"kept as {ARCHIVE.save(compare(options.models, say=lambda line: print(line, flush=True))).name}")


def _planning(options: argparse.Namespace) -> None:
    from benchmarks.planning import compare

    compare(options.layers, say=lambda line: print(line, flush=True))


def _solving(options: argparse.Namespace) -> None:
    from benchmarks.solving.record import ARCHIVE
    from benchmarks.solving.run import compare

    named = ["--policies", *options.policies] if options.policies else []
    command = " ".join(["scripts/bench solving", *map(str, options.layers), *named])
    comparison = compare(options.layers, options.policies, command, say=lambda line: print(line, flush=True))
    print(f"kept as {ARCHIVE.save(comparison).name}")


def _policies(options: argparse.Namespace) -> None:
    from benchmarks.policies.record import ARCHIVE
    from benchmarks.policies.run import SHARES, compare

    parts = [(name, [str(part) for part in vars(options)[name] or ()]) for name in ("models", "machines", "shares")]
    command = " ".join(
        ["scripts/bench policies", *(f"--{name} {' '.join(chosen)}" for name, chosen in parts if chosen)]
    )
    shares = options.shares or SHARES
    comparison = compare(options.models, options.machines, command, lambda line: print(line, flush=True), shares)
    print(f"kept as {ARCHIVE.save(comparison).name}")


def _states(options: argparse.Namespace) -> None:
    from benchmarks.states.record import ARCHIVE
    from benchmarks.states.run import MODELS, compare

    # Each model is a run of its own, kept when it is done: a later one may fail, or have to be stopped.
    for model in options.models or MODELS:
        parts = [(name, vars(options)[name]) for name in ("memory", "policies")]
        named = "".join(f" --{name} {' '.join(chosen)}" for name, chosen in parts if chosen)
        command = f"scripts/bench states --models {model}{named} --rounds {options.rounds}"
        print(f"{model}:", flush=True)
        told = options.policies, options.memory, options.folder, command, options.rounds
        found = compare(model, *told, lambda line: print(line, flush=True))
        print(f"kept as {ARCHIVE.save(found).name}", flush=True)


def _losses(options: argparse.Namespace) -> None:
    from shlex import join

    from benchmarks.losses.record import ARCHIVE
    from benchmarks.losses.run import SEEDS, TASKS, WAYS, compare, quick
    from benchmarks.losses.table import render

    tasks = {task.name: task for task in TASKS}
    _expect_known("tasks", options.tasks, tasks)
    _expect_known("ways", options.ways, WAYS)
    ways = options.ways or WAYS
    named = f" --ways {join(options.ways)}" if options.ways else ""
    for name in options.tasks or tasks:
        for seed in options.seeds or (SEEDS[:1] if options.quick else SEEDS):
            # Each is kept when it is done: a later one may fail, or have to be stopped.
            task = quick(tasks[name]) if options.quick else tasks[name]
            command = f"scripts/bench losses --tasks {join([name])} --seeds {seed}{named}"
            found = compare(task, seed, ways, command, lambda line: print(line, flush=True))
            print(render([found]) if options.quick else f"kept as {ARCHIVE.save(found).name}", flush=True)


def _expect_known(what: str, asked: Sequence[str], known: Collection[str]) -> None:
    for name in asked:
        if name not in known:
            raise BenchmarkError(f"unknown {what}: {name}; there are {', '.join(known)}")


def _papers(options: argparse.Namespace) -> None:
    from benchmarks.papers.record import ARCHIVE
    from benchmarks.papers.run import compare

    command = " ".join(["scripts/bench papers", *options.claims])
    print(f"kept as {ARCHIVE.save(compare(options.claims, command, lambda line: print(line, flush=True))).name}")


def _layout(options: argparse.Namespace) -> None:
    from benchmarks.layout.run import compare

    compare(options.topics, say=lambda line: print(line, flush=True))


def _traces(options: argparse.Namespace) -> None:
    from benchmarks.traces.record import ARCHIVE
    from benchmarks.traces.run import compare

    command = " ".join(["scripts/bench traces", *options.models])
    print(f"kept as {ARCHIVE.save(compare(options.models, command, lambda line: print(line, flush=True))).name}")


def _fits(options: argparse.Namespace) -> None:
    from benchmarks.fits.record import ARCHIVE
    from benchmarks.fits.run import compare
    from benchmarks.layout.unseen import STYLES

    ways = (False,) if options.without_ortools else (False, True)
    files = [file.name for file in options.files]  # where they are is of no account
    # Each style is kept when it is done: a later one may fail, or have to be stopped.
    parts = [()] if files else [(style,) for style in among("style", options.styles, tuple(STYLES))]
    for styles in parts:
        named = ["--styles", *styles] if styles else files
        command = " ".join(["scripts/bench fits", *named, *(["--without-ortools"] if options.without_ortools else [])])
        found = compare(options.files, styles, ways, command, say=lambda line: print(line, flush=True))
        print(f"kept as {ARCHIVE.save(found).name}", flush=True)


def _families(options: argparse.Namespace) -> None:
    from shlex import join

    from benchmarks.families.record import ARCHIVE
    from benchmarks.families.run import chosen, compare
    from benchmarks.families.tiny import TASKS

    # Each task is kept when it is done: a later one may have to be stopped.
    for task, given in chosen(among("task", options.tasks, tuple(TASKS)), options.names).items():
        named = ["--names", *(family.name for family in given)] if options.names else []
        command = f"scripts/bench {join(['families', '--tasks', task, *named])}"
        found = compare(given, command, lambda line: print(line, flush=True))
        print(f"kept as {ARCHIVE.save(found).name}", flush=True)


def _activations(options: argparse.Namespace) -> None:
    from benchmarks.activations.models import chosen
    from benchmarks.activations.race import Pace
    from benchmarks.activations.record import ARCHIVE
    from benchmarks.activations.run import COMPILED, QUICK, Settings, compare
    from benchmarks.activations.table import render

    settings = QUICK if options.quick else Settings()
    if options.compile:
        settings = replace(settings, compiled=COMPILED)
    if options.beside_compiled:
        settings = replace(settings, compiled=tuple(options.beside_compiled), eager=False, shares=())
    if options.rounds:
        settings = replace(settings, pace=Pace(options.rounds, options.rounds))
    flags = [f"--{name}" for name in ("compile", "quick") if vars(options)[name]]
    if options.beside_compiled:
        flags += ["--beside-compiled", *map(str, options.beside_compiled)]
    if options.rounds:
        flags += ["--rounds", str(options.rounds)]
    # Each model is a run of its own, kept when it is done: a later one may fail, or have to be stopped.
    for model in chosen(options.models):
        command = " ".join(["scripts/bench activations", model.name, *flags])
        comparison = compare([model.name], settings, command, say=lambda line: print(line, flush=True))
        print(f"kept as {ARCHIVE.save(comparison).name}" if settings.kept else render([comparison]), flush=True)


def _update(options: argparse.Namespace) -> None:
    from benchmarks.updates.record import ARCHIVE
    from benchmarks.updates.run import ELEMENTS, QUICK, compare
    from benchmarks.updates.table import render

    elements = QUICK if options.quick else ELEMENTS
    comparison = compare(elements, "scripts/bench update", say=lambda line: print(line, flush=True))
    print(render([comparison]) if options.quick else f"kept as {ARCHIVE.save(comparison).name}")


def _instructions(options: argparse.Namespace) -> None:
    from benchmarks.updates.instructions import compare

    compare(say=lambda line: print(line, flush=True))


def _host(options: argparse.Namespace) -> None:
    from benchmarks.fasthost import accumulation, checkpoints, disk, disk_step, hidden, several, zero
    from benchmarks.fasthost.record import ARCHIVE
    from benchmarks.fasthost.table import render

    command, quick = f"scripts/bench {options.command}", options.quick
    on_disk = {
        "checkpoints": checkpoints.compare,
        "disk": disk.compare,
        "disk-step": disk_step.compare,
        "several": several.compare,
        "zero": zero.compare,
    }
    in_memory = {
        "hidden": hidden.compare,
        "hidden-long": hidden.compare_longer,
        "hidden-wide": hidden.compare_wider,
        "accumulate": accumulation.compare,
    }
    print(f"{options.command}:", flush=True)

    def say(line: str) -> None:
        print(line, flush=True)

    if options.command in on_disk:
        comparison = on_disk[options.command](options.folder, command, quick=quick, say=say)
    else:
        comparison = in_memory[options.command](command, quick=quick, say=say)
    print(render([comparison]) if quick else f"kept as {ARCHIVE.save(comparison).name}")


def _table(options: argparse.Namespace) -> None:
    from benchmarks import front
    from benchmarks.activations import table as activations
    from benchmarks.families import table as families
    from benchmarks.fasthost import table as host
    from benchmarks.fits import table as fits
    from benchmarks.losses import table as losses
    from benchmarks.papers import table as papers
    from benchmarks.policies import table as policies
    from benchmarks.prediction import table as predictions
    from benchmarks.result import load_all
    from benchmarks.solving import table as solving
    from benchmarks.states import table as states
    from benchmarks.table import write
    from benchmarks.traces import table as traces
    from benchmarks.updates import table as updates

    write(load_all())
    predictions.write()
    policies.write()
    states.write()
    losses.write()
    papers.write()
    solving.write()
    fits.write()
    families.write()
    traces.write()
    activations.write()
    updates.write()
    host.write()
    front.write()


def _keep(options: argparse.Namespace) -> None:
    from benchmarks.result import Result, save
    from forebay.records import load

    for line in options.file.read_text().splitlines():
        print(save(load(Result, line)).name)


if __name__ == "__main__":
    sys.exit(main())
