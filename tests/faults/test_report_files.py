"""``forebay report`` and ``forebay train --run`` beside what a run has kept: none of it is written over, and a
damaged file is refused in a line that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from forebay.cli.main import app
from forebay.cli.report import gather
from forebay.cli.runfolder import RunFolder, may_begin
from forebay.config import make_config
from forebay.errors import ConfigError
from forebay.reporting.losses import StepLine, read_losses
from tests.null.reported import LOSSES, PLAN, REPORT

RECORD = ("run.json", "plan.json", "report.json", "losses.jsonl")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [*map(str, arguments)])


def begun(folder: Path) -> None:
    """A run that has come to no plan."""
    settings: dict[str, Any] = {"model": "gone", "data": "text.txt", "device_memory": "8MiB", "batch": 2, "seq": 16}
    with RunFolder(folder, resume=False) as opened:
        opened.begin(make_config(settings), warmup=1, tokens=100, text_crc32=7)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two steps whose model is gone."""
    folder = tmp_path / "run"
    begun(folder)
    (folder / "plan.json").write_text(PLAN.to_json())
    (folder / "report.json").write_text(REPORT.to_json())
    (folder / "losses.jsonl").write_text("".join(line.to_json() + "\n" for line in LOSSES))
    return folder


def refused(*arguments: object) -> str:
    """What the command says, which ends as misuse and prints nothing else."""
    done = invoke(*arguments)
    assert (done.exit_code, done.stdout) == (2, ""), (arguments, done.output)
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


# What is asked for takes the place of nothing


@pytest.mark.parametrize("name", [*RECORD, "lock", "config.json", "checkpoint/manifest.json", "there.png"])
def test_a_file_of_the_run_is_not_written_over(run: Path, name: str) -> None:
    (run / "there.png").write_text("a picture")
    before = {path: path.read_bytes() for path in run.iterdir()}
    (run / "checkpoint").mkdir()
    for source in (run, run / "report.json"):
        said = refused("report", source, "--trace", run / name)
        assert f"--trace {run / name}" in said and "; give " in said
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_way_around_leads_to_the_same_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    (run.parent / "link.json").symlink_to(run / "plan.json")
    assert "run-2.json" in refused("report", run, "--trace", run / ".." / "run" / "run.json")
    assert "are the run's" in refused("report", "run", "--trace", "link.json")
    assert Path("run/plan.json").read_text() == PLAN.to_json()


def test_a_report_is_not_written_over_by_its_page(run: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(REPORT.to_json())
    assert "is the report that is to be read" in refused("report", mine, "--out", mine)
    assert str(tmp_path / "mine-2.json") in refused("report", mine, "--trace", mine)
    assert mine.read_text() == REPORT.to_json()


def test_two_files_have_two_names(run: Path, tmp_path: Path) -> None:
    said = refused("report", run, "--out", tmp_path / "same", "--trace", tmp_path / "same")
    assert f"--trace {tmp_path / 'same'} is what --out writes" in said
    assert "is what --out writes" in refused("report", run, "--trace", run / "report.html")
    assert not (tmp_path / "same").exists() and not (run / "report.html").exists()


def test_what_is_free_is_written(run: Path) -> None:
    for _ in range(2):  # the page again, too
        done = invoke("report", run, "--trace", run.parent / "trace.json")
        assert done.exit_code == 0, done.output
    assert invoke("report", run, "--trace", run / "trace.json").exit_code == 0
    assert (run / "report.html").exists() and (run / "trace.json").exists()


# A file that is damaged


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch": None}, "settings.batch: "),
        ({"batch": "many"}, "settings.batch: "),
        ({"seq": 1}, "settings.seq: "),
        ({"unknown": 1}, "settings.unknown: "),
        ({"disk": ""}, "settings.disk: "),
    ],
)
@pytest.mark.parametrize("verb", ["report", "fragmentation"])
def test_settings_that_are_none_are_named(run: Path, verb: str, change: dict[str, Any], said: str) -> None:
    kept = json.loads((run / "run.json").read_text())
    kept["settings"] |= change
    (run / "run.json").write_text(json.dumps(kept))
    found = refused(verb, run)
    assert f"{run / 'run.json'}: {said}" in found and "put the file back as it was" in found


def test_settings_with_a_default_may_be_missing(run: Path) -> None:
    kept = json.loads((run / "run.json").read_text())
    del kept["settings"]["batch"], kept["settings"]["accumulate"]
    (run / "run.json").write_text(json.dumps(kept))
    assert gather(run).tokens_per_step == 16
    del kept["settings"]["data"]
    (run / "run.json").write_text(json.dumps(kept))
    assert "settings.data: Field required" in refused("report", run)


@pytest.mark.parametrize(
    ("name", "then"),
    [("plan.json", "--resume makes it again"), ("report.json", "or remove it: the page does without")],
)
def test_a_damaged_record_is_named(run: Path, name: str, then: str) -> None:
    (run / name).write_text("{")
    said = refused("report", run)
    assert f"{run / name}: cannot read a " in said and then in said


def test_a_damaged_report_alone_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("[]")
    said = refused("report", tmp_path / "bad.json")
    assert f"{tmp_path / 'bad.json'}: cannot read a RunReport" in said and "to_json() writes one" in said


def test_a_loss_that_is_not_finite_is_none(run: Path) -> None:
    words = ("NaN", "Infinity", "-Infinity", "null", "2.5")
    lines = "".join(f'{{"step": {place}, "loss": {word}, "lr": 0.1}}\n' for place, word in enumerate(words, 1))
    (run / "losses.jsonl").write_text(lines)
    assert [line.loss for line in read_losses(run / "losses.jsonl")] == [None, None, None, None, 2.5]
    done = invoke("report", run, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout, parse_constant=pytest.fail)["loss"] == [None, None, None, None, 2.5]
    for field in ('"lr": NaN', '"lr": null', '"lr": 0.1, "seconds": Infinity'):
        with pytest.raises(ValueError, match="not"):
            StepLine.parsed(f'{{"step": 1, "loss": 1.0, {field}}}')


@pytest.mark.parametrize(
    "change", [{"hidden_size": "big"}, {"vocab_size": None}, {"num_attention_heads": 7}, {"num_attention_heads": 0}]
)
def test_a_model_that_transformers_cannot_use_is_named(tmp_path: Path, change: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from forebay.recipes import load_recipe

    (tmp_path / "config.json").write_text(json.dumps({**load_recipe("tiny").model, **change}))
    said = refused("plan", tmp_path, "--device-memory", "8MiB")
    assert f"{tmp_path / 'config.json'}: " in said


# A run that has come to nothing


def test_what_has_come_to_nothing_is_begun_anew(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun(folder)
    assert may_begin(folder)
    for verb in ("report", "fragmentation"):
        said = refused(verb, folder)
        assert f"has no plan.json: the run in it has none yet; begin it anew: forebay train ... --run {folder}" in said
    begun(folder)  # as it says
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "lock").write_text("")  # the place of saves that never came
    begun(folder)
    (folder / "plan.json.new").write_text("")
    assert f"go on with forebay train --run {folder} --resume" in refused("report", folder)


@pytest.mark.parametrize("name", ["plan.json", "report.json", "losses.jsonl", "checkpoint", "file"])
def test_what_has_come_to_something_is_not(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    begun(folder)
    (folder / name).write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder(folder, resume=False)


def test_saves_are_not_begun_over(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    begun(folder)
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "manifest.json").write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder(folder, resume=False)


@pytest.mark.parametrize("text", ["{}", "", '{"settings": {}}'])
def test_somebody_elses_run_json_stays(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder(tmp_path, resume=False)
    assert (tmp_path / "run.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_run_that_ends_before_the_lock_is_ours_is_not_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from forebay.cli import runfolder
    from forebay.tiers.lock import FolderLock

    class Late(FolderLock):
        """The lock of who waited: the other has left its plan meanwhile."""

        def __init__(self, folder: Path) -> None:
            (folder / "plan.json").write_text("")
            super().__init__(folder)

    folder = tmp_path / "run"
    begun(folder)
    monkeypatch.setattr(runfolder, "FolderLock", Late)
    with pytest.raises(ConfigError, match="not empty"):
        RunFolder(folder, resume=False)
    FolderLock(folder).close()  # it is nobody's
