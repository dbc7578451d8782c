"""What the tab key offers: the names that the rooms take, and nothing heavy is loaded for it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any, get_args

import pytest
import typer

from forebay.catalogue import machine_names
from forebay.cli.completion import machines, models, policies, policy_lists, simulated_policies
from forebay.cli.main import app
from forebay.cli.plan import PlanSettings
from forebay.config import TrainConfig
from forebay.planners import PLANNERS
from forebay.planners.layout import LAYOUTS
from forebay.planners.parallel import ON_DEVICES
from forebay.recipes import recipe_names

COMPLETE = """
import os, sys
os.environ |= {"_FOREBAY_COMPLETE": "complete_bash", "COMP_WORDS": sys.argv[1], "COMP_CWORD": sys.argv[2]}
sys.argv = ["forebay"]
from forebay.cli.main import app
try:
    app(prog_name="forebay")
except SystemExit:
    pass
import json
print(json.dumps(sorted({"torch", "transformers", "numba", "safetensors"} & sys.modules.keys())), file=sys.stderr)
"""


def completed(line: str) -> list[str]:
    """What bash would be offered at the end of ``line``."""
    words = [sys.executable, "-c", COMPLETE, line, str(len(line.split(" ")) - 1)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stderr.splitlines()[-1]) == []
    return done.stdout.split()


def offered(verb: str, name: str, typed: str = "") -> list[str]:
    """What is offered for a flag or an argument."""
    command: Any = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    parameter = next(one for one in command.params if name in (*one.opts, one.name))
    return [
        item.value for item in parameter.shell_complete(command.make_context(verb, [], resilient_parsing=True), typed)
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("forebay pl", ["plan"]),
        ("forebay plan --policy stron", ["stronghold"]),
        ("forebay plan --devices 2 --policy dap", ["dapple", "dapple-recompute"]),
        ("forebay train --policy dap", []),
        ("forebay plan llama-3.2-", ["llama-3.2-1b", "llama-3.2-3b"]),
    ],
)
def test_bash_is_offered(line: str, words: list[str]) -> None:
    assert completed(line) == words


@pytest.mark.parametrize(
    ("offer", "names"),
    [(models, recipe_names()), (machines, ("here", *machine_names())), (policies, tuple(PLANNERS))],
)
def test_registries_are_offered_whole(offer: Callable[[str], list[str]], names: tuple[str, ...]) -> None:
    assert tuple(offer("")) == names
    assert offer("no such name") == []


def test_lists_of_policies_are_completed_name_by_name() -> None:
    assert policy_lists("st") == ["states", *(name for name in PLANNERS if name.startswith("st"))]
    assert policy_lists("auto,au") == ["auto,autotm"]
    assert policy_lists("dapple,dap") == ["dapple,dapple-recompute"]
    assert policy_lists("auto,autotm,stron") == ["auto,autotm,stronghold"]


def test_what_is_simulated_over_several_devices_is_offered_where_it_is_taken() -> None:
    assert set(simulated_policies("")) == {*PLANNERS, *ON_DEVICES} > set(PLANNERS)
    assert offered("plan", "--policy", "dapple-") == offered("compare", "--policies", "dapple-") == ["dapple-recompute"]
    assert offered("train", "--policy", "dapple") == offered("verify", "--policy", "dapple") == []


@pytest.mark.parametrize("verb", ["plan", "train", "verify", "compare"])
def test_names_that_are_written_out_are_those_that_are_taken(verb: str) -> None:
    for flag, settings in (
        ("optimizer", TrainConfig),
        ("dtype", PlanSettings),
        ("loss", TrainConfig),
        ("update", TrainConfig),
    ):
        if flag == "loss" and verb == "compare":
            continue
        assert tuple(offered(verb, f"--{flag}")) == get_args(settings.model_fields[flag].annotation)


def test_other_names_that_are_written_out() -> None:
    from forebay.exporting import LAYOUTS as FORMATS

    assert tuple(offered("export", "--format")) == FORMATS
    assert offered("layout", "--layout") == sorted(LAYOUTS)
    assert {*map(int, offered("plan", "--compress")), 0} == {
        *get_args(PlanSettings.model_fields["compress"].annotation)
    }
    assert tuple(offered("train", "--nonfinite")) == get_args(TrainConfig.model_fields["nonfinite"].annotation)
    assert tuple(offered("doctor", "--device")) == get_args(get_args(TrainConfig.model_fields["device"].annotation)[0])
    assert offered("train", "--model", "tin") == ["tiny"] and offered("verify", "model", "tin") == ["tiny"]
