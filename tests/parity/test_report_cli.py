"""``forebay report``: a run from the command line to its page, its picture and its trace; and wrong input."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

from forebay import api
from forebay.cli.main import app
from forebay.cli.progress import StepResult, View
from forebay.cli.report import gather
from forebay.cli.runfolder import RunFolder
from forebay.cli.train import train
from forebay.config import make_config
from forebay.errors import NotFinite
from forebay.memory import Tier
from forebay.plans import Plan
from forebay.reporting.run import RunReport
from forebay.reporting.steps import KEPT_EVENTS
from forebay.units import MiB
from tests.null import reported
from tests.null.page_reader import Page

TEXT = "".join(f"{i} green bottles hanging on the wall\n" for i in range(300))


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


ROOT = Path(__file__).resolve().parents[2]
COMMANDS = [
    shlex.split(line.removeprefix("$ "))[1:]
    for body in re.findall(r"^```console\n(.*?)^```$", (ROOT / "docs" / "reports.md").read_text("utf-8"), re.M | re.S)
    for line in body.splitlines()
]
"""Those of docs/reports.md."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of docs/reports.md, in a folder of its own."""
    folder = tmp_path_factory.mktemp("reported")
    command = [str(ROOT / "README.md") if word == "README.md" else word for word in COMMANDS[0]]
    assert command[0] == "train" and command[-2:] == ["--run", "runs/first"]
    done = invoke(*command[:-1], folder / "runs" / "first", "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    return folder / "runs" / "first"


def test_the_commands_of_the_page_do_what_it_says(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(run.parents[1])
    assert [command[0] for command in COMMANDS] == ["train", "report", "report", "report", "compare"]
    for command in COMMANDS[1:]:
        done = invoke(*command)
        assert done.exit_code == 0, done.output
    for name in ("runs/first/report.html", "first.html", "first.png", "first.json", "policies.html"):
        assert Path(name).stat().st_size > 5_000, name
    page = Page(Path("policies.html").read_text(encoding="utf-8"))
    assert {point["policy"] for point in page.data["points"]} <= {"auto", "stream", "offload-all"}
    assert len(page.data["points"]) >= 4


def test_the_page_of_a_run_shows_its_records(run: Path, tmp_path: Path) -> None:
    done = invoke("report", run, "--out", tmp_path / "page.html", "--trace", tmp_path / "trace.json", "--json")
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert (said["page"], said["plot"]) == (str(tmp_path / "page.html"), None)
    report = RunReport.from_json((run / "report.json").read_bytes())
    plan = Plan.from_json((run / "plan.json").read_bytes())
    lines = [json.loads(line) for line in (run / "losses.jsonl").read_text().splitlines()]
    assert said["loss"] == [line["loss"] for line in lines] and said["steps"] == len(lines) == 20
    assert all(line["seconds"] > 0 for line in lines)
    assert said["measured"] == report.to_json_dict()["measured"]
    data = Page((tmp_path / "page.html").read_text(encoding="utf-8")).data
    assert data["losses"]["loss"] == said["loss"]
    assert data["losses"]["speed"] == pytest.approx([128 / line["seconds"] for line in lines])
    # The same step, predicted as the plan promised it and measured as the ledger counted it.
    device = next(tier for tier in data["memory"]["tiers"] if tier["name"] == "device")
    assert plan.device * 0.9 < max(device["predicted"]["high"]) <= plan.device  # which holds for every timing
    assert max(device["measured"]["high"]) == report.measured_peaks()[Tier.DEVICE] <= plan.device
    assert data["lanes"]["predicted"]["seconds"] == pytest.approx(plan.step_seconds)
    assert data["lanes"]["measured"]["seconds"] in [pytest.approx(s) for s in report.timeline.step_seconds]
    words = {data["lanes"]["words"][event[4]] for event in data["lanes"]["measured"]["events"]}
    foretold = {data["lanes"]["words"][event[4]] for event in data["lanes"]["predicted"]["events"]}
    # Both give their events the same names.
    for word in ("forward model.layers.0", "backward model.layers.3"):
        assert word in words & foretold
    assert said["dtypes"] and {entry["dtype"] for entry in said["dtypes"]} <= {"float32", "int64", "bool"}
    traced = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in traced if event["name"] == "process_name"]
    assert names == ["predicted", "measured"]


def test_the_dtype_ledger_adds_up(run: Path) -> None:
    shown = gather(run)
    assert not shown.notes
    held: dict[str, int] = {}
    for entry in shown.dtypes:
        held[entry.what] = held.get(entry.what, 0) + entry.nbytes
    assert held["parameters"] == held["gradients"] == held["state exp_avg"] == held["state exp_avg_sq"]
    padding = sum(shown.blocks.values()) - held["parameters"]
    assert 0 <= padding < 64 * 64


def test_a_report_from_python_is_shown_too(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_bytes((run / "report.json").read_bytes())
    done = invoke("report", tmp_path / "mine.json")
    assert done.exit_code == 0, done.output
    page = Page((tmp_path / "mine.html").read_text(encoding="utf-8"))
    assert page.headings[0] == "mine" and page.data["lanes"]["predicted"] is None


def test_a_model_that_is_gone_is_said(run: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    copied.mkdir()
    for name in ("run.json", "plan.json", "report.json", "losses.jsonl"):
        (copied / name).write_bytes((run / name).read_bytes())
    begun = json.loads((copied / "run.json").read_text())
    begun["settings"]["model"] = str(tmp_path / "gone")
    (copied / "run.json").write_text(json.dumps(begun))
    done = invoke("report", copied)
    assert done.exit_code == 0, done.output
    assert "what was predicted over a step is not shown: " in done.stdout
    page = Page((copied / "report.html").read_text(encoding="utf-8"))
    assert page.data["lanes"]["predicted"] is None and page.data["losses"]["loss"]
    # A run that was killed has left no report.
    (copied / "report.json").unlink()
    with (copied / "losses.jsonl").open("a") as file:
        file.write('{"step": 21, "lo')
    done = invoke("report", copied, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["cautions"] == ["the run has left no report.json: it was killed, or trains still"]


def test_wrong_input_is_refused_in_a_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("")
    (tmp_path / "odd.json").write_text("{}")
    (tmp_path / "torn").mkdir()
    for name in ("run.json", "plan.json", "losses.jsonl"):
        (tmp_path / "torn" / name).write_bytes((run / name).read_bytes())
    (tmp_path / "torn" / "losses.jsonl").write_text("{}\n")
    table: list[tuple[tuple[object, ...], int, str]] = [
        ((tmp_path / "none",), 2, "there is no "),
        ((tmp_path / "empty",), 2, "no run was begun in"),
        ((tmp_path / "other",), 2, "is not the folder of a run: it has no run.json"),
        ((tmp_path / "odd.json",), 2, "cannot read a RunReport"),
        ((tmp_path / "torn",), 2, "line 1 is not that of a step"),
        ((run, "--out", tmp_path / "no" / "page.html"), 2, "--out"),
        ((run, "--trace", tmp_path / "no" / "trace.json"), 2, "--trace"),
        ((run, "--plot", tmp_path / "page.pdf"), 2, "a plot is a .png or .svg file"),
        ((run, "--out", tmp_path), 1, "cannot write"),
    ]
    for arguments, code, said in table:
        done = invoke("report", *arguments)
        assert (done.exit_code, done.stdout) == (code, ""), (arguments, done.output)
        assert said in done.stderr and "Traceback" not in done.stderr, (arguments, done.stderr)


# What a run keeps however it ends


class Failing(View):
    """Ends the run behind its second step."""

    def start(self, steps: int, device_peak: Any) -> None:
        pass

    def step(self, result: StepResult) -> None:
        if result.number == 2:
            raise NotFinite("the loss is nan")

    def stop(self) -> None:
        pass


@pytest.fixture
def quiet() -> View:
    from rich.console import Console

    return Failing(Console(quiet=True))


def test_a_run_that_fails_leaves_its_report(tmp_path: Path, quiet: View) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    base = {"model": "tiny", "data": str(tmp_path / "text.txt"), "seq": 32, "device": "cpu", "steps": 5}
    config = make_config(base | {"device_memory": "16MiB", "run": str(tmp_path / "run")})
    with pytest.raises(NotFinite):
        train(config, api, quiet)
    shown = gather(tmp_path / "run")
    assert shown.report is not None and shown.report.tokens == 2 * 32
    assert len(shown.losses) == 2 and shown.cautions[0] == "the run has taken 2 of 5 steps"
    assert len(shown.report.timeline.events) <= KEPT_EVENTS
    assert (tmp_path / "run" / "report.json").stat().st_size < 2 * MiB
    assert not list((tmp_path / "run").glob("*.new"))


def test_a_report_never_stands_beside_the_plan_of_another_process(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", resume=False) as folder:
        folder.promise(reported.PLAN)
        folder.keep(reported.REPORT)
        assert {path.name for path in folder.path.iterdir()} == {"plan.json", "report.json", "lock"}
        assert RunReport.from_json((folder.path / "report.json").read_bytes()) == reported.REPORT
        folder.promise(reported.PLAN)
        assert {path.name for path in folder.path.iterdir()} == {"plan.json", "lock"}
