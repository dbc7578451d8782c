"""``forebay plan`` from the command line: exit codes, JSON, and one line for whatever cannot be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

pytest.importorskip("transformers")

import torch
from torch import nn

import forebay
from forebay.catalogue import load_machine
from forebay.cli.main import app
from forebay.machine import Curve, Disk, Link, Machine
from forebay.memory import Tier
from forebay.phases import PHASES
from forebay.plans import Plan
from forebay.recipes import load_recipe
from forebay.recipes.tasks import sample
from tests.null.test_plan_report import KEYS

GiB = 2**30
MiB = 2**20
LINK = Link(Curve(((MiB, 8e9),)), 1e-5)

MACHINE = Machine(
    name="bench",
    source="measured",
    device_kind="cpu",
    device_capacity=64 * MiB,
    host_capacity=512 * MiB,
    pinned_capacity=0,
    compute={"float32": 1e11, "bfloat16": 1e11},
    device_bandwidth=1e10,
    host_bandwidth=1e10,
    update_rate=1e10,
    h2d=LINK,
    d2h=LINK,
    launch_seconds=1e-6,
    # Device and host are one memory and the same cores: an update beside compute gains nothing.
    shared_cores=0.5,
    disk=Disk(1024 * MiB, LINK, LINK),
)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    path = tmp_path / "bench.json"
    path.write_text(MACHINE.to_json())
    return path


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["plan", *map(str, arguments)])


def answer(done: Result, code: int) -> dict[str, Any]:
    assert done.exit_code == code, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    assert set(found) == KEYS
    return found


def refused(done: Result, match: str) -> None:
    """Misuse: code 2, one message that says ``match``, nothing on stdout, no traceback."""
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("forebay: ")
    assert match in " ".join(done.stderr.split()), done.stderr
    assert "Traceback" not in done.stderr


def test_it_fits(machine: Path) -> None:
    found = answer(invoke("tiny", "--machine", machine, "--batch", 2, "--seq", 32, "--json"), 0)
    assert found["fits"] and found["exact"] and found["policy"] == "auto"
    assert 0 < found["limit_seconds"] <= found["step_seconds"]
    assert found["step_seconds_low"] < found["step_seconds"] < found["step_seconds_high"]
    assert found["tokens_per_second"] == pytest.approx(2 * 32 / found["step_seconds"])
    assert found["budgets"] == {"device": 64 * MiB, "host": 512 * MiB, "pinned": None, "disk": 0}
    # Everything stays: parameters, gradients, two moments, all fp32, and what the pass makes on top.
    parameters = 4 * 217_664
    assert 4 * parameters < found["peaks"]["device"] <= found["budgets"]["device"]
    assert found["peaks"]["host"] == 0
    assert list(found["phases"]) == list(PHASES)
    assert found["phases"]["step"]["device"] == found["peaks"]["device"]
    assert 3 * parameters < found["phases"]["load"]["device"] < found["phases"]["eval"]["device"]


def test_a_tight_budget_streams_and_the_disk_takes_what_the_host_cannot(machine: Path) -> None:
    tight = ["demo", "--machine", machine, "--seq", 16, "--device-memory", "60MiB", "--policy", "stream", "--json"]
    hosted = answer(invoke(*tight), 0)
    assert hosted["peaks"]["device"] <= 60 * MiB
    # Parameters, gradients and two moments of 26 million parameters, and little else.
    assert 1 <= hosted["peaks"]["host"] / (16 * 25_960_960) < 1.1
    assert hosted["peaks"]["disk"] == 0
    # Nothing is asked of a folder of another machine: it need not be there.
    found = answer(invoke(*tight, "--host-memory", "300MiB", "--disk", "/of/that/machine:500MiB"), 0)
    assert 0 < found["peaks"]["disk"] <= 500 * MiB == found["budgets"]["disk"]
    assert found["peaks"]["host"] <= 300 * MiB


def test_checksums_of_nothing_are_remarked(machine: Path) -> None:
    asked = ["tiny", "--machine", machine, "--disk", "/of/that/machine:500MiB", "--policy", "resident", "--json"]
    remark = "no parameters and no states are on disk: checksums have nothing to hold"
    assert remark not in answer(invoke(*asked), 0)["reasons"]
    assert answer(invoke(*asked, "--checksums"), 0)["reasons"].count(remark) == 1


def test_it_does_not_fit(machine: Path) -> None:
    arguments = ["gpt2", "--machine", machine, "--seq", 64, "--dtype", "bfloat16"]
    found = answer(invoke(*arguments, "--json"), 1)
    assert not found["fits"] and found["step_seconds"] is None and found["peaks"] is None
    assert "are needed and 64.0 MiB are allowed" in found["reasons"][0]
    assert found["alternatives"], "what would fit"
    shown = invoke(*arguments)
    assert shown.exit_code == 1
    assert "does not fit on bench" in shown.stdout
    assert "Traceback" not in shown.output


def test_the_table(machine: Path) -> None:
    done = invoke("tiny", "--machine", machine, "--seq", 32)
    assert done.exit_code == 0, done.output
    assert "fits on bench" in done.stdout
    for said in ("tokens/s", "physical limit", "binding", "headroom", "load", "resume", "exactly those of plain"):
        assert said in done.stdout


def test_the_plan_that_is_written_can_be_run(machine: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    arguments = ["tiny", "--machine", machine, "--batch", 2, "--seq", 32, "--device-memory", "3MiB", "--json"]
    found = answer(invoke(*arguments, "--out", out), 0)
    plan = Plan.from_json(out.read_text())
    assert plan.step_seconds == found["step_seconds"] and plan.fingerprint
    torch.manual_seed(0)
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**load_recipe("tiny").model))
    model, optimizer = forebay.prepare(
        model, torch.optim.AdamW(model.parameters()), plan=plan, device_memory="3MiB", device="cpu"
    )
    ids = torch.randint(0, 256, (2, 32))
    for _ in range(2):
        output = model(input_ids=ids, labels=ids)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    peaks = forebay.report(model).timeline.peaks
    forebay.close(model)
    assert peaks[Tier.HOST] == found["peaks"]["host"]
    # How many gradients are on their way at once is a matter of timing; the prediction is not under by more than 1 %.
    assert 0.99 * peaks[Tier.DEVICE] <= found["peaks"]["device"] <= 3 * MiB


def test_nothing_is_written_when_nothing_fits(machine: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert invoke("tiny", "--machine", machine, "--device-memory", "100KiB", "--out", out).exit_code == 1
    assert not out.exists()


def test_a_folder_and_a_file_are_models(machine: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(load_recipe("tiny").model))
    same = ["--machine", machine, "--seq", 16, "--json", "--policy", "resident"]
    peaks = [answer(invoke(m, *same), 0)["peaks"] for m in ("tiny", folder, folder / "config.json")]
    assert peaks[0] == peaks[1] == peaks[2]


def test_a_machine_of_the_catalogue_is_planned_for_without_one() -> None:
    found = answer(invoke("smollm2-135m", "--machine", "rtx-4090", "--seq", 64, "--policy", "resident", "--json"), 0)
    entry = load_machine("rtx-4090")
    assert found["budgets"]["device"] == entry.device_capacity
    assert any("not measured" in reason for reason in found["reasons"])


def test_a_card_of_the_catalogue_comes_in_the_host_that_is_asked_for(tmp_path: Path) -> None:
    # The layers of llama-3.2-3b, each seven times as wide inside: four of them are nearly as much as its 28.
    few = {"num_hidden_layers": 4, "intermediate_size": 7 * 8192}
    (tmp_path / "config.json").write_text(json.dumps(dict(load_recipe("llama-3.2-3b").model) | few))
    asked = [tmp_path, "--machine", "l4", "--dtype", "bfloat16", "--seq", 64, "--policy", "stream", "--json"]
    found = answer(invoke(*asked), 1)
    nearest = found["alternatives"][0]["change"]
    assert nearest == "host_memory 34.1GiB, where there is as much (l4 is listed with 30.0 GiB)"
    found = answer(invoke(*asked, "--host-memory", "34.1GiB"), 0)
    assert 30 * GiB < found["peaks"]["host"] <= found["budgets"]["host"]
    assert "l4 is listed with 30.0 GiB of host memory; 34.1 GiB are taken, as asked" in found["reasons"]
    found = answer(invoke(*asked, "--host-memory", "20GiB", "--disk", "/x:1TiB"), 0)
    assert found["budgets"]["host"] == 20 * GiB and found["budgets"]["disk"] == 1024 * GiB
    assert "l4 is listed with 372.5 GiB of disk; 1.0 TiB are taken, as asked" in found["reasons"]


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) @ torch.ones(5, 2)


def make_failing() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Fails(), (torch.zeros(2, 4),)


def make_good() -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)]), (torch.zeros(8, 64),)


HERE = "tests.parity.test_plan_cli"


def test_a_function_is_a_model(machine: Path) -> None:
    found = answer(invoke(f"{HERE}:make_good", "--machine", machine, "--json"), 0)
    assert found["fits"]


def test_a_model_whose_forward_fails_names_the_op(machine: Path) -> None:
    done = invoke(f"{HERE}:make_failing", "--machine", machine)
    refused(done, "make_failing")
    assert "mm" in done.stderr or "matmul" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        (["tiny", "--device-memory", "0"], "--device-memory: input should be greater than 0"),
        (["tiny", "--host-memory", "-1"], "--host-memory: cannot read '-1' as a size"),
        (["tiny", "--device-memory", "24GB/s"], "--device-memory: "),
        (["tiny", "--disk", "/x:0B"], "--disk: the disk budget must be more than 0 bytes"),
        (["tiny", "--batch", "0"], "--batch: input should be greater than or equal to 1"),
        (["tiny", "--seq", "0"], "--seq: "),
        (["tiny", "--seq", "4096"], "--seq 4096 is longer than the 512 positions of tiny"),
        (["tiny", "--dtype", "int4"], "--dtype: "),
        (["tiny", "--optimizer", "lamb"], "--optimizer: "),
        (["tiny", "--policy", "magic"], "--policy: there is no 'magic'"),
        (["nowhere"], "there is no model nowhere"),
        (["no.package:make"], "cannot import no.package"),
    ],
)
def test_misuse(machine: Path, flags: list[str], match: str) -> None:
    refused(invoke(*flags, "--machine", machine, "--json"), match)


def changed(**what: Any) -> str:
    content = json.loads(MACHINE.to_json())
    return json.dumps({k: v for k, v in {**content, **what}.items() if v != "gone"})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (MACHINE.to_json()[:200], "this is not whole JSON"),
        (changed(schema=99), "schema is 99, this forebay reads schema 2"),
        (changed(h2d="gone"), "h2d"),
        (changed(compute={}), "compute"),
        (changed(host_bandwidth=0), "host_bandwidth must be more than 0"),
        ("[]", "a machine is one JSON object, got list"),
        ("", "this is not whole JSON"),
    ],
    ids=["truncated", "newer", "missing link", "no dtype", "no rate", "a list", "empty"],
)
def test_machine_files_that_cannot_be_used(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    refused(invoke("tiny", "--machine", path), match)


def test_machines_that_are_not_there(tmp_path: Path) -> None:
    refused(invoke("tiny", "--machine", tmp_path / "none.json"), "there is no machine and no file")
    refused(invoke("tiny", "--machine", "abacus"), "abacus")


def test_a_disk_for_a_machine_without_one(tmp_path: Path) -> None:
    path = tmp_path / "diskless.json"
    path.write_text(changed(disk=None))
    refused(invoke("tiny", "--machine", path, "--disk", "/x:1GiB"), "machine bench has no disk")


def test_a_plan_that_cannot_be_written_is_said(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = invoke("tiny", "--machine", machine, "--seq", 16, "--policy", "resident", "--out", tmp_path)
    assert (done.exit_code, "tiny" in done.stdout) == (1, True), "the answer is there all the same"
    assert "cannot write the plan" in done.stderr and "Traceback" not in done.output
    monkeypatch.setattr("forebay.cli.plan.plan", None)
    refused(invoke("tiny", "--machine", machine, "--out", tmp_path / "no" / "plan.json"), "make it first")


@pytest.mark.parametrize("spoil", ["truncated", "newer"])
def test_a_plan_file_that_cannot_be_used(machine: Path, tmp_path: Path, spoil: str) -> None:
    out = tmp_path / "plan.json"
    assert invoke("tiny", "--machine", machine, "--seq", 16, "--policy", "resident", "--out", out).exit_code == 0
    text = out.read_text()
    text = text[:300] if spoil == "truncated" else json.dumps({**json.loads(text), "schema": 99})
    with pytest.raises(forebay.errors.ConfigError, match="cannot read a Plan" if spoil == "truncated" else "schema 99"):
        Plan.from_json(text)


def test_the_recipes_own_settings_hold_unless_said_otherwise(machine: Path) -> None:
    same = ["demo", "--machine", machine, "--json", "--policy", "stream"]
    train = load_recipe("demo").train
    assert (train["batch"], train["seq"]) == (2, 64)
    found = answer(invoke(*same, "--device-memory", "60MiB"), 0)
    assert found["budgets"]["device"] == 60 * MiB
    assert round(found["tokens_per_second"] * found["step_seconds"]) == train["batch"] * train["seq"]
    assert sample("demo", batch=1, seq=8, dtype="float32").seq == 8


@pytest.mark.parametrize(
    ("batch", "said"),
    [(10**18, "--batch: input should be less than or equal to"), (2**28, "input_ids alone, of shape (268435456, 512)")],
)
def test_a_batch_that_no_machine_has_memory_for(machine: Path, batch: int, said: str) -> None:
    done = invoke("tiny", "--machine", machine, "--seq", 512, "--batch", batch)
    assert (done.exit_code, "Traceback" in done.output) == (2, False)
    assert said in done.stderr
