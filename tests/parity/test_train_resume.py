"""``forebay train --run FOLDER --save-every N --resume``: a run that ends early goes on as if it had not."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path
from typing import Any, final

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

transformers = pytest.importorskip("transformers")

from forebay import api  # noqa: E402
from forebay.cli.main import app  # noqa: E402
from forebay.cli.progress import StepResult, View  # noqa: E402
from forebay.cli.report import gather  # noqa: E402
from forebay.cli.runfolder import RunFolder  # noqa: E402
from forebay.cli.stopping import ASKING, Stop  # noqa: E402
from forebay.cli.train import TrainResult, train  # noqa: E402
from forebay.config import TrainConfig, make_config  # noqa: E402
from forebay.data.text import Windows, tokenize  # noqa: E402
from forebay.data.tokenizers import find_tokenizer  # noqa: E402

TEXT = "".join(f"{i} green bottles hanging on the wall, and if one should fall\n" for i in range(200))
MODEL = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96}
MODEL |= {"num_hidden_layers": 3, "num_attention_heads": 4, "attention_dropout": 0.1}
STEPS = 6


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    return tmp_path / "text.txt"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def begin(text: Path, run: Path, *more: object) -> Result:
    settings = ["--model", text.parent / "model.json", "--data", text, "--seq", 32, "--batch", 2, "--device", "cpu"]
    return invoke(*settings, "--lr", 0.01, "--run", run, "--json", *more)


def found(done: Result) -> dict[str, Any]:
    assert done.exit_code == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def saved(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


TIERS = {
    "host": ("--policy", "stream", "--accumulate", 2, "--clip-norm", 0.5),
    "disk": ("--policy", "zero-infinity", "--seed", 4),
}


@pytest.mark.parametrize("tier", ["host", pytest.param("disk", marks=pytest.mark.slow)])
def test_a_run_that_goes_on_is_the_run_that_never_stopped(tier: str, text: Path, tmp_path: Path) -> None:
    where: tuple[object, ...] = ("--device-memory", "8MiB", *TIERS[tier])
    if tier == "disk":
        (tmp_path / "disk").mkdir()
        large = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6}
        (tmp_path / "model.json").write_text(json.dumps(MODEL | large))
        where = (*where, "--host-memory", "14MiB", "--disk", f"{tmp_path / 'disk'}:24MiB")
    whole = found(begin(text, tmp_path / "whole", *where, "--steps", STEPS))
    # The learning rate of both rises over one step, so the first half is that of the whole.
    half = begin(text, tmp_path / "run", *where, "--steps", STEPS // 2, "--save-every", 2)
    first = found(half)
    assert first["loss"] == whole["loss"][: STEPS // 2]
    assert first["measured"]["peaks"][tier] > 0
    assert "saved every 2 steps: " in half.stderr
    for step, how in ((2, "being saved"), (3, "saved")):
        assert f"step {step} is {how}: " in half.stderr
    # Settings are those of the run; more steps, and other memory, may be asked for.
    more = ("--device-memory", "16MiB", "--policy", "resident") if tier == "host" else ()
    done = invoke("--run", tmp_path / "run", "--resume", "--json", "--steps", STEPS, *more)
    second = found(done)
    assert f"goes on behind step {STEPS // 2}" in done.stderr
    assert f"step {STEPS} is saved: " in done.stderr
    assert second["loss"] == whole["loss"]
    assert second["steps"] == STEPS
    lines = [json.loads(line) for line in (tmp_path / "run" / "losses.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == whole["loss"]
    one, two = saved(tmp_path / "whole"), saved(tmp_path / "run")
    assert all(torch.equal(one[name], two[name]) for name in one)


@final
class Interrupts(View):
    """Sends this process a signal when a step is done."""

    def __init__(self, number: int, sent: signal.Signals) -> None:
        self.notes = io.StringIO()
        super().__init__(Console(file=self.notes))
        self._number = number
        self._sent = sent

    def start(self, steps: int, device_peak: Any) -> None:
        pass

    def step(self, result: StepResult) -> None:
        if result.number == self._number:
            os.kill(os.getpid(), self._sent)

    def stop(self) -> None:
        pass


def settings_of(text: Path, run: Path | None, **more: object) -> TrainConfig:
    base = {"model": str(text.parent / "model.json"), "data": str(text), "seq": 32, "batch": 2, "device": "cpu"}
    base |= {
        "device_memory": "16MiB",
        "steps": STEPS,
        "lr": 0.01,
        "policy": "resident",
        "run": None if run is None else str(run),
    }
    return make_config(base, more)


def run_in_process(text: Path, run: Path | None, view: View, **more: Any) -> TrainResult:
    return train(settings_of(text, run), api, view, **more)


def test_a_signal_finishes_the_step_and_saves(text: Path, tmp_path: Path) -> None:
    before = [signal.getsignal(sent) for sent in ASKING]
    stopped = run_in_process(text, tmp_path / "run", Interrupts(2, signal.SIGINT))
    assert len(stopped.losses) == 2
    names = {path.name for path in (tmp_path / "run").iterdir()}
    kept = {"run.json", "plan.json", "losses.jsonl", "report.json", "checkpoint", "lock"}
    assert names == kept  # no model of a run that is not over
    # Lines of steps that were not saved are dropped: here of those that a killed process took.
    with (tmp_path / "run" / "losses.jsonl").open("a") as file:
        file.write('{"step": 3, "loss": 9.0, "lr": 0.0}\n{"step": 4, "lo')
    further = run_in_process(text, tmp_path / "run", Interrupts(4, signal.SIGTERM), resume=True)
    assert len(further.losses) == 4
    rest = run_in_process(text, tmp_path / "run", Interrupts(0, signal.SIGTERM), resume=True)
    whole = run_in_process(text, None, Interrupts(0, signal.SIGTERM))
    assert rest.losses == whole.losses
    assert rest.losses[:4] == further.losses
    assert rest.losses[:2] == stopped.losses
    assert len((tmp_path / "run" / "losses.jsonl").read_text().splitlines()) == STEPS
    assert [signal.getsignal(sent) for sent in ASKING] == before


@pytest.mark.parametrize("sent", ASKING, ids=lambda sent: sent.name)
def test_a_signal_that_is_ignored_stays_so(sent: signal.Signals) -> None:
    """As SIGHUP is under ``nohup``, and SIGINT in the background of a script."""
    before = signal.signal(sent, signal.SIG_IGN)
    try:
        with Stop() as stop:
            os.kill(os.getpid(), sent)
            assert not stop.requested()
            signal.signal(sent, signal.SIG_DFL)
        with Stop() as stop:
            os.kill(os.getpid(), sent)
            assert stop.by == sent.name
    finally:
        signal.signal(sent, before)


def test_a_run_goes_on_for_the_steps_that_it_was_asked_for_last(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "my run"
    train(settings_of(text, run, steps=1, save_every=1), api, Interrupts(0, signal.SIGINT))
    view = Interrupts(2, signal.SIGINT)
    train(settings_of(text, run, steps=3), api, view, resume=True)
    assert (
        f"stopped by SIGINT behind step 2; go on with: forebay train --run '{run}' --resume\n" in view.notes.getvalue()
    )
    assert "the run has taken 2 of 3 steps" in gather(run).cautions
    done = invoke("--run", run, "--resume", "--steps", 1)
    assert (done.exit_code, "has taken 2 already; give so many, or more" in done.stderr) == (2, True), done.stderr
    rest = found(invoke("--run", run, "--resume", "--json"))
    whole = train(settings_of(text, None, steps=3), api, Interrupts(0, signal.SIGINT))
    assert rest["loss"] == list(whole.losses)


def test_the_second_signal_does_what_it_does_elsewhere() -> None:
    with Stop() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.by == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_what_cannot_go_on_is_named(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    memory = ("--device-memory", "16MiB", "--policy", "resident")
    found(begin(text, run, *memory, "--steps", 2, "--save-every", 2))
    (tmp_path / "other.txt").write_text(TEXT * 2)
    (tmp_path / "empty").mkdir()
    left = [(run / name).read_bytes() for name in ("report.json", "plan.json")]
    go_on = ("--run", run, "--resume")
    table: list[tuple[tuple[object, ...], int, str]] = [
        (("--resume",), 2, "give its folder as --run FOLDER"),
        (("--run", tmp_path / "none", "--resume"), 2, "there is no folder"),
        (("--run", text.parent, "--resume"), 2, "is not the folder of a run"),
        (("--run", tmp_path / "empty", "--resume"), 2, "no run was begun in"),
        ((*go_on, "--lr", 0.5), 2, "--lr: the run in"),
        ((*go_on, "--seed", 3), 2, "--seed: the run in"),
        ((*go_on, "--dtype", "bfloat16"), 2, "--dtype: the run in"),
        ((*go_on, "--clip-norm", 1.0), 2, "was begun with None, not 1.0"),
        ((*go_on, "--tile", "64KiB"), 2, "--tile: the run in"),
        ((*go_on, "--data", tmp_path / "other.txt"), 2, "is not the one of"),
        ((*go_on, "--steps", 1), 2, "has taken 2 already"),
        ((*go_on, "--save-every", 0), 2, "--save-every"),
        (("--run", run, "--model", "tiny", "--data", text, *memory), 2, "go on with the run in it: --resume"),
        (("--save-every", 1, "--model", "tiny", "--data", text, *memory), 2, "give it as --run FOLDER"),
    ]
    for arguments, code, said in table:
        done = invoke(*arguments)
        assert (done.exit_code, done.stdout) == (code, ""), (arguments, done.stdout, done.stderr)
        assert said in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        assert [(run / name).read_bytes() for name in ("report.json", "plan.json")] == left, "what was measured"
    (run / "losses.jsonl").write_text("")
    done = invoke(*go_on, "--steps", 3)
    assert done.exit_code == 2
    assert "does not have the loss of step 1" in done.stderr
    assert [(run / name).read_bytes() for name in ("report.json", "plan.json")] == left, "what was measured"
    (run / "run.json").write_text("{")
    done = invoke(*go_on)
    assert (done.exit_code, "cannot read a RunStart" in done.stderr) == (2, True), done.stderr


def begun(text: Path, run: Path) -> None:
    """What a process leaves that is killed in its first step."""
    config = settings_of(text, run)
    windows = Windows(tokenize(config.data, find_tokenizer(None)), batch=2, seq=32, seed=0)
    with RunFolder(run, resume=False) as folder:
        assert folder.begin(config, 1, windows.tokens, windows.crc32) == 1


def test_a_run_that_was_not_saved_begins_anew_and_a_whole_one_has_nothing_to_do(text: Path, tmp_path: Path) -> None:
    begun(text, tmp_path / "run")
    done = invoke("--run", tmp_path / "run", "--resume", "--json", "--steps", 2, "--save-every", 9)
    first = found(done)
    assert "no step was saved in" in done.stderr
    (tmp_path / "run" / "model.safetensors").unlink()
    measured = (tmp_path / "run" / "report.json").read_bytes()
    done = invoke("--run", tmp_path / "run", "--resume", "--json", "--steps", 2)
    again = found(done)
    assert "nothing is left to do" in done.stderr
    assert (tmp_path / "run" / "report.json").read_bytes() == measured, "that of the steps"
    assert again["loss"] == first["loss"]
    assert again["measured"]["step_seconds"] is None
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_whole_run_that_was_not_saved_is_not_begun_anew(text: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(settings_of(text, run, steps=1), api, Interrupts(0, signal.SIGINT))
    left = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    done = invoke("--run", run, "--resume", "--steps", 2)
    assert done.exit_code == 2
    assert f"no step of it was saved to go on from; begin another one from its weights: --model {run}" in done.stderr
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == left


def test_two_processes_do_not_share_a_run(text: Path, tmp_path: Path) -> None:
    begun(text, tmp_path / "run")
    with RunFolder(tmp_path / "run", resume=True):
        done = invoke("--run", tmp_path / "run", "--resume", "--steps", 2)
    assert done.exit_code == 1
    assert f"is in use by process {os.getpid()}" in done.stderr
