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
from collections.abc import Collection, Sequence
from dataclasses import replace

from benchmarks.case import BenchmarkError, DeviceKind, among
from benchmarks.cases import CASES, find
from benchmarks.command import asked, keep, say
from benchmarks.flags import HOST_TOPICS, make_parser

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; 0 done, 1 a benchmark failed, 2 misuse."""
    options = make_parser().parse_args(arguments)
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


def _list(options: argparse.Namespace) -> None:
    for case in CASES:
        print(f"{case.name:20} {case.device.value:5} {case.question}")


def _run(options: argparse.Namespace) -> None:
    from benchmarks.result import save
    from benchmarks.run import run_case
    from forebay.records import dump

    cases = [find(name) for name in options.cases] or [case for case in CASES if case.device is DeviceKind.CPU]
    for case in cases:
        say(f"{case.name}: {case.question}")
        result = run_case(case, say=lambda line: say(f"  {line}"), revision=options.revision)
        if options.append_to is None:
            print(f"  kept as {save(result).name}")
        else:
            with options.append_to.open("a") as file:
                file.write(json.dumps(json.loads(dump(result))) + "\n")
        for row in result.rows:
            ratio = "" if row.median_ratio is None else f", {row.median_ratio:.3f} times {result.baseline}"
            say(f"  {row.name}: {row.outcome.value}{ratio} {row.detail}")


def _predict(options: argparse.Namespace) -> None:
    from benchmarks.prediction.record import ARCHIVE
    from benchmarks.prediction.run import compare

    keep(ARCHIVE, compare(options.models, say=say))


def _planning(options: argparse.Namespace) -> None:
    from benchmarks.planning import compare

    compare(options.layers, say=say)


def _solving(options: argparse.Namespace) -> None:
    from benchmarks.solving.record import ARCHIVE
    from benchmarks.solving.run import compare

    command = asked("solving", *options.layers, policies=options.policies)
    keep(ARCHIVE, compare(options.layers, options.policies, command, say=say))


def _policies(options: argparse.Namespace) -> None:
    from benchmarks.policies.record import ARCHIVE
    from benchmarks.policies.run import SHARES, compare

    command = asked("policies", models=options.models, machines=options.machines, shares=options.shares or ())
    keep(ARCHIVE, compare(options.models, options.machines, command, say, options.shares or SHARES))


def _states(options: argparse.Namespace) -> None:
    from benchmarks.states.record import ARCHIVE
    from benchmarks.states.run import MODELS, compare

    # Each model is a run of its own, kept when it is done: a later one may fail, or have to be stopped.
    for model in options.models or MODELS:
        memory, policies = options.memory, options.policies
        command = asked("states", models=[model], memory=memory, policies=policies, rounds=[options.rounds])
        say(f"{model}:")
        keep(ARCHIVE, compare(model, policies, memory, options.folder, command, options.rounds, say))


def _losses(options: argparse.Namespace) -> None:
    from benchmarks.losses.record import ARCHIVE
    from benchmarks.losses.run import SEEDS, TASKS, WAYS, compare, quick
    from benchmarks.losses.table import render

    tasks = {task.name: task for task in TASKS}
    _expect_known("tasks", options.tasks, tasks)
    _expect_known("ways", options.ways, WAYS)
    ways = options.ways or WAYS
    for name in options.tasks or tasks:
        for seed in options.seeds or (SEEDS[:1] if options.quick else SEEDS):
            # Each is kept when it is done: a later one may fail, or have to be stopped.
            task = quick(tasks[name]) if options.quick else tasks[name]
            command = asked("losses", tasks=[name], seeds=[seed], ways=options.ways)
            found = compare(task, seed, ways, command, say)
            if options.quick:
                say(render([found]))
            else:
                keep(ARCHIVE, found)


def _expect_known(what: str, asked: Sequence[str], known: Collection[str]) -> None:
    for name in asked:
        if name not in known:
            raise BenchmarkError(f"unknown {what}: {name}; there are {', '.join(known)}")


def _papers(options: argparse.Namespace) -> None:
    from benchmarks.papers.record import ARCHIVE
    from benchmarks.papers.run import compare

    keep(ARCHIVE, compare(options.claims, asked("papers", *options.claims), say))


def _layout(options: argparse.Namespace) -> None:
    from benchmarks.layout.run import compare

    compare(options.topics, say=say)


def _traces(options: argparse.Namespace) -> None:
    from benchmarks.traces.record import ARCHIVE
    from benchmarks.traces.run import compare

    keep(ARCHIVE, compare(options.models, asked("traces", *options.models), say))


def _fits(options: argparse.Namespace) -> None:
    from benchmarks.fits.record import ARCHIVE
    from benchmarks.fits.run import compare
    from benchmarks.layout.unseen import STYLES

    ways = (False,) if options.without_ortools else (False, True)
    files = [file.name for file in options.files]  # where they are is of no account
    # Each style is kept when it is done: a later one may fail, or have to be stopped.
    parts = [()] if files else [(style,) for style in among("style", options.styles, tuple(STYLES))]
    for styles in parts:
        command = asked("fits", *files, styles=styles, without_ortools=options.without_ortools)
        keep(ARCHIVE, compare(options.files, styles, ways, command, say=say))


def _families(options: argparse.Namespace) -> None:
    from benchmarks.families.record import ARCHIVE
    from benchmarks.families.run import chosen, compare
    from benchmarks.families.tiny import TASKS

    # Each task is kept when it is done: a later one may have to be stopped.
    for task, given in chosen(among("task", options.tasks, tuple(TASKS)), options.names).items():
        names = [family.name for family in given] if options.names else ()
        keep(ARCHIVE, compare(given, asked("families", tasks=[task], names=names), say))


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
    flags = {
        "compile": options.compile,
        "quick": options.quick,
        "beside-compiled": options.beside_compiled or (),
        "rounds": [options.rounds] if options.rounds else (),
    }
    # Each model is a run of its own, kept when it is done: a later one may fail, or have to be stopped.
    for model in chosen(options.models):
        comparison = compare([model.name], settings, asked("activations", model.name, **flags), say=say)
        if settings.kept:
            keep(ARCHIVE, comparison)
        else:
            say(render([comparison]))


def _update(options: argparse.Namespace) -> None:
    from benchmarks.updates.record import ARCHIVE
    from benchmarks.updates.run import ELEMENTS, QUICK, compare
    from benchmarks.updates.table import render

    elements = QUICK if options.quick else ELEMENTS
    comparison = compare(elements, asked("update"), say=say)
    if options.quick:
        say(render([comparison]))
    else:
        keep(ARCHIVE, comparison)


def _instructions(options: argparse.Namespace) -> None:
    from benchmarks.updates.instructions import compare

    compare(say=say)


def _host(options: argparse.Namespace) -> None:
    from benchmarks.fasthost import accumulation, checkpoints, disk, disk_step, hidden, several, zero
    from benchmarks.fasthost.record import ARCHIVE
    from benchmarks.fasthost.table import render

    command, quick = asked(options.command), options.quick
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
    say(f"{options.command}:")
    if options.command in on_disk:
        comparison = on_disk[options.command](options.folder, command, quick=quick, say=say)
    else:
        comparison = in_memory[options.command](command, quick=quick, say=say)
    if quick:
        say(render([comparison]))
    else:
        keep(ARCHIVE, comparison)


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
