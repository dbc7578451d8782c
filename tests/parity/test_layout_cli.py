"""``forebay layout`` of a model, of a trace and of a graph of ops: an order, and addresses for what it makes."""

from __future__ import annotations

import csv
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("transformers")

from forebay.checking.orders import check_order
from forebay.cli.main import app
from forebay.op_graph import OpGraph, Ordered
from tests.null.ordering.making import step
from tests.null.synthetic import block
from tests.null.tracing import Layer, chain_trace

LAYERS = ("one", "two", "three")
TRACE = chain_trace([block(name, ((64, 64), "float32", True)) for name in LAYERS], [Layer(name) for name in LAYERS])

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "layout.md").read_text(encoding="utf-8")


def asked(*arguments: str | Path) -> dict[str, object]:
    done = CliRunner().invoke(app, ["layout", *map(str, arguments), "--layout", "best-fit", "--json"])
    assert done.exit_code == 0, done.output
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_a_model_to_its_graph_and_both_to_addresses(tmp_path: Path) -> None:
    file, placed = tmp_path / "graph.json", tmp_path / "placed.csv"
    told = asked("tiny", "--batch", "1", "--seq", "8", "--order", "roam", "--graph", file, "--out", placed)
    order = told["order"]
    assert isinstance(order, dict)
    graph = OpGraph.from_json(file.read_bytes())
    check_order(Ordered(graph, tuple(order["ops"]), order["lower_bound"], order["order"], 0.0))
    assert order["peak"] < order["program_peak"] == graph.peak(tuple(range(len(graph.ops))))
    assert order["peak"] <= told["lower_bound"] <= told["height"] < order["program_peak"]  # type: ignore[operator]
    assert len(list(csv.reader(placed.open()))) == 1 + len(graph.tensors)
    again = asked(file)["order"]
    assert isinstance(again, dict)
    assert again["peak"] == again["program_peak"] == order["program_peak"] and again["order"] == "program"


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.M | re.S)
    commands = [line for body in blocks for line in body.splitlines() if "buffers.csv" not in line]
    assert len(commands) == 2
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command.removeprefix("$ "))[1:])
        assert done.exit_code == 0, done.output
    assert Path("graph.json").is_file() and Path("placed.csv").is_file()


def test_a_trace_and_what_is_said_of_it(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(TRACE.to_json())
    done = CliRunner().invoke(app, ["layout", str(file), "--order", "roam"])
    words = " ".join(done.output.split())
    assert done.exit_code == 0 and "in program order)" in words and "which no order can better" in words
    done = CliRunner().invoke(app, ["layout", str(file), "--capacity", "100"])
    assert done.exit_code == 1 and "bytes are live at one time, and the capacity is 100" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["buffers.csv", "--order", "roam"], "buffers.csv has buffers, whose lives are given: --order is for"),
        (["buffers.csv", "--seq", "8"], "--seq is for"),
        (["graph.json", "--batch", "2"], "graph.json is a step already: --batch is for"),
        (["graph.json", "--order", "best"], "there is no order 'best'; orders are program, roam"),
        (["graph.json", "--graph", "no/such/file.json"], "--graph no/such/file.json: there is no folder"),
        (["graph.json", "--out", "same.csv", "--graph", "./same.csv"], "--graph same.csv is what --out writes"),
        (["broken.json"], "broken.json is not JSON"),
        (["list.json"], "list.json holds a list"),
        (["old.json"], "schema 9"),
        (["behind.json"], "comes behind op 0"),
        (["missing.json"], "cannot read missing.json"),
        (["tinny"], "tinny"),
    ],
)
def test_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "buffers.csv": "id,lower,upper,size\na,0,1,2\n",
        "graph.json": step(2).to_json(),
        "broken.json": "{",
        "list.json": "[]",
        "old.json": '{"ops": [], "tensors": [], "schema": 9}',
        "behind.json": '{"ops": [{"name": "a", "after": [0]}], "tensors": []}',
    }.items():
        Path(name).write_text(text)
    done = CliRunner().invoke(app, ["layout", *arguments])
    assert (done.exit_code, words in " ".join(done.output.split())) == (2, True), done.output
    assert "Traceback" not in done.output
