"""What each command of the benchmarks may be told.

Every command has a line of help and, where it takes any, a function that adds its arguments to its parser.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

__all__ = ["HOST_TOPICS", "make_parser"]

HOST_TOPICS: Mapping[str, str] = MappingProxyType(
    {
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
)
"""The comparisons of ``fasthost``."""


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", metavar="CASE", help="default: every case that needs no card")
    parser.add_argument("--append-to", type=Path, metavar="FILE", help="one line a result here, not a file each")
    parser.add_argument("--revision", help="the commit, where the code is a copy and no repository")


def _predict(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: the whole zoo, as in the table")


def _planning(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layers", nargs="*", type=int, metavar="LAYERS", help="default: 12, 32 and 100")


def _solving(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("layers", nargs="*", type=int, metavar="LAYERS", help="default: 12, 32 and 100")
    parser.add_argument("--policies", nargs="+", default=(), metavar="POLICY", help="default: all for activations")


def _policies(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=(), metavar="MODEL", help="default: all five")
    parser.add_argument("--machines", nargs="+", default=(), metavar="MACHINE", help="default: all eight")
    parser.add_argument("--shares", nargs="+", type=float, metavar="SHARE", help="of the device; default: .25 .5 1")


def _states(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", default=(), metavar="MODEL", help="default: all three")
    parser.add_argument("--policies", nargs="+", default=(), metavar="POLICY", help="default: all for states")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to use")
    parser.add_argument("--memory", nargs="+", default=(), metavar="MEMORY", help="host, disk; default: both")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")


def _losses(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", default=(), metavar="TASK", help="default: both")
    parser.add_argument("--seeds", nargs="+", type=int, default=(), metavar="SEED", help="default: all three")
    parser.add_argument("--ways", nargs="+", default=(), metavar="WAY", help="default: all, the exact one too")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: whether it works")


def _papers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("claims", nargs="*", metavar="CLAIM", help="default: all of benchmarks/papers")


def _layout(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topics", nargs="*", metavar="TOPIC", help="default: hard and large")


def _traces(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all of benchmarks/traces/models.py")


def _fits(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="as A.1048576.csv; default: sets made here")
    parser.add_argument("--styles", nargs="+", default=(), metavar="STYLE", help="default: all of those made here")
    parser.add_argument("--without-ortools", action="store_true", help="only as where OR-Tools is not installed")


def _families(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tasks", nargs="+", default=(), metavar="TASK", help="default: all")
    parser.add_argument("--names", nargs="+", default=(), metavar="NAME", help="of transformers; default: all")


def _activations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all of benchmarks/activations/models.py")
    parser.add_argument("--compile", action="store_true", help="torch.compile too, which takes minutes")
    parser.add_argument(
        "--beside-compiled", nargs="+", type=float, metavar="SHARE", help="only these budgets of torch.compile"
    )
    parser.add_argument("--rounds", type=int, help="default: as many as fit into seven minutes a model")
    parser.add_argument("--quick", action="store_true", help="small batches, one round: whether it works")


def _update(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="few parameters, two rounds: whether it works")


def _keep(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path)


def _host(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--quick", action="store_true", help="little of everything: whether it works")


def _nothing(parser: argparse.ArgumentParser) -> None:
    """It may be told nothing."""


@dataclass(frozen=True)
class _Verb:
    """One command: what it does, in a line, and what adds its arguments."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None] = _nothing


_VERBS: Mapping[str, _Verb] = MappingProxyType(
    {
        "list": _Verb("the cases and what each asks"),
        "run": _Verb("run cases and keep their results", _run),
        "predict": _Verb("hold predictions against runs, and keep the comparison", _predict),
        "planning": _Verb("how long it takes to plan models of many layers", _planning),
        "solving": _Verb("how long each planner for activations takes", _solving),
        "policies": _Verb("hold auto against published policies, simulated", _policies),
        "states": _Verb("hold what is foretold of every policy for states against its run", _states),
        "losses": _Verb("hold updates that change the numbers against exact ones, on real text", _losses),
        "papers": _Verb("hold policies against what their papers say, simulated", _papers),
        "layout": _Verb("how low layouts of addresses are, and how long they take", _layout),
        "traces": _Verb("steps of models under allocators, at addresses, in another order", _traces),
        "fits": _Verb("lay out buffers that are known to fit, with OR-Tools and without", _fits),
        "families": _Verb("train every architecture of transformers, tiny, beside PyTorch", _families),
        "activations": _Verb("hold forebay against what PyTorch offers for activations", _activations),
        "update": _Verb("hold the host's update kernels against torch's and DeepSpeed's", _update),
        "instructions": _Verb("count the instructions of the update kernels"),
        **{name: _Verb(words, _host) for name, words in HOST_TOPICS.items()},
        "table": _Verb("write the tables into benchmarks/README.md, docs/policies.md and README.md"),
        "keep": _Verb("take the results of scripts/gpu in", _keep),
    }
)
"""In the order in which help lists them."""


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; ``command`` is the name of the one that is asked for."""
    whole = argparse.ArgumentParser(prog="scripts/bench", description="Benchmarks of forebay.")
    commands = whole.add_subparsers(dest="command", required=True)
    for name, verb in _VERBS.items():
        verb.add_arguments(commands.add_parser(name, help=verb.help))
    return whole
