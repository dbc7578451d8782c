"""What is exported loads elsewhere with the same bits, in every layout, and takes one tensor of memory at a time."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from typer.testing import CliRunner, Result

import forebay
from forebay.cli.main import app
from forebay.cli.runfolder import RunStart
from forebay.errors import ConfigError, ModelError, OptimizerError, StorageError
from forebay.exporting import LAYOUTS, Layout
from forebay.records import dump
from tests.parity.models import CASES, Case

TIED, PLAIN = CASES["llama-tied"], CASES["llama"]
WEIGHTS = ("*.safetensors*", "*.pt*", "*.distcp", ".metadata", "*.part")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


Prepared = tuple[nn.Module, torch.optim.Optimizer]


@pytest.fixture
def trained() -> Iterator[Any]:
    """Makes prepared models that have taken a step; closes them."""
    models = []

    def make(case: Case, dtype: torch.dtype = torch.float32) -> Prepared:
        model = case.model(dtype)
        model, optimizer = forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu", policy="stream")
        models.append(model)
        step(case, model, optimizer, 0)
        return model, optimizer

    yield make
    for model in models:
        forebay.close(model)


def step(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    model(**case.inputs(number, next(model.parameters()).dtype))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def logits(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(**TIED.inputs(7, torch.float32)).logits
    return found


def left_in(folder: Path) -> set[str]:
    return {file.name for pattern in WEIGHTS for file in folder.glob(pattern)}


# Elsewhere


@pytest.mark.parametrize("case", [TIED, PLAIN], ids=["tied", "untied"])
def test_from_pretrained_gives_the_same_logits(trained: Any, tmp_path: Path, case: Case) -> None:
    model, _ = trained(case)
    files = forebay.export(model, tmp_path / "hf")
    assert {file.name for file in files} >= {"config.json", "model.safetensors", "generation_config.json"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", local_files_only=True)
    assert torch.equal(logits(loaded), logits(model))
    fresh = case.model(torch.float32)
    fresh, _ = forebay.prepare(fresh, adamw(fresh), device_memory="64MiB", device="cpu", policy="stream")
    forebay.load(fresh, str(tmp_path / "hf"))
    assert torch.equal(logits(fresh), logits(model))
    forebay.close(fresh)


@pytest.mark.parametrize("case", [TIED, PLAIN, CASES["convnet"]], ids=["tied", "untied", "buffers"])
def test_a_state_dict_as_torch_saves_it(trained: Any, tmp_path: Path, case: Case) -> None:
    model, _ = trained(case)
    forebay.export(model, tmp_path / "torch", layout="torch")
    for mmap in (False, True):
        state = torch.load(tmp_path / "torch" / "model.pt", weights_only=True, mmap=mmap)
        plain = case.model(torch.float32)
        assert not any(plain.load_state_dict(state))
        for name, tensor in model.state_dict().items():
            assert torch.equal(state[name], tensor), name
    if case is TIED:
        assert state["lm_head.weight"].data_ptr() == state["model.embed_tokens.weight"].data_ptr()
    nbytes = sum(p.nbytes for p in plain.parameters())
    assert (tmp_path / "torch" / "model.pt").stat().st_size < 1.1 * nbytes + 2**14, "a tied parameter is there once"


@pytest.mark.parametrize("case", [TIED, PLAIN], ids=["tied", "untied"])
def test_training_goes_on_elsewhere_from_a_distributed_checkpoint(trained: Any, tmp_path: Path, case: Case) -> None:
    model, optimizer = trained(case)
    forebay.export(model, tmp_path / "dcp", layout="dcp", optimizer=optimizer)
    plain = case.model(torch.float32)
    other = adamw(plain)
    of_model, of_optimizer = get_state_dict(plain, other)
    state = {"model": of_model, "optimizer": of_optimizer}
    checkpoint.load(state, checkpoint_id=tmp_path / "dcp")
    set_state_dict(plain, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for number in (1, 2):
        step(case, model, optimizer, number)
        step(case, plain, other, number)
    values = forebay.parameters(model)
    for name, parameter in plain.named_parameters():
        assert torch.equal(values[name], parameter), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dtype_is_rounded_to_once(trained: Any, tmp_path: Path, layout: Layout) -> None:
    """What is trained in bf16 has an fp32 master, which is what is kept, and rounded if asked."""
    model, _ = trained(PLAIN, torch.bfloat16)
    expected = dict(forebay.parameters(model))
    for dtype in (None, torch.bfloat16):
        folder = tmp_path / f"{layout}-{dtype}"
        forebay.export(model, folder, layout=layout, dtype=dtype)
        state = read(folder, layout, PLAIN.model(dtype or torch.float32))
        for name, tensor in expected.items():
            assert tensor.dtype is torch.float32
            assert torch.equal(state[name], tensor.to(dtype or torch.float32)), name


def read(folder: Path, layout: Layout, like: nn.Module) -> dict[str, torch.Tensor]:
    if layout == "torch":
        found: dict[str, torch.Tensor] = torch.load(folder / "model.pt", weights_only=True)
        return found
    if layout == "dcp":
        state = {"model": like.state_dict()}
        checkpoint.load(state, checkpoint_id=folder)
        return state["model"]
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    return loaded.state_dict() if loaded.dtype is next(like.parameters()).dtype else stored(folder)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# From the command line


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run: the model, a tokenizer, and what a run keeps beside."""
    folder = tmp_path / "run"
    model = TIED.model(torch.float32)
    model.save_pretrained(folder, max_shard_size="20KB")
    for name in ("tokenizer.json", "tokenizer_config.json", "plan.json", "losses.jsonl"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_in_every_format(run: Path, tmp_path: Path, layout: Layout) -> None:
    done = invoke(run, "--to", tmp_path / "out", "--format", layout, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["format"] == layout and found["folder"] == str(tmp_path / "out")
    assert sorted(found["files"]) == sorted(file.name for file in (tmp_path / "out").iterdir())
    assert found["bytes"] == sum(file.stat().st_size for file in (tmp_path / "out").iterdir())
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700
    model = TIED.model(torch.float32)
    state = read(tmp_path / "out", layout, TIED.model(torch.float32))
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor), name
    if layout == "huggingface":
        assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} < set(found["files"])
        assert "plan.json" not in found["files"]


def test_a_dtype_from_the_command_line(run: Path, tmp_path: Path) -> None:
    done = invoke(run, "--to", tmp_path / "out", "--dtype", "bfloat16")
    assert done.exit_code == 0 and "huggingface" in done.stdout, done.output
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", local_files_only=True, dtype="auto")
    assert loaded.dtype is torch.bfloat16
    for name, tensor in TIED.model(torch.float32).named_parameters():
        assert torch.equal(loaded.get_parameter(name), tensor.bfloat16()), name


def test_wrong_input_is_one_message(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    pickled = tmp_path / "pickled"
    TIED.model(torch.float32).config.save_pretrained(pickled)
    torch.save({}, pickled / "pytorch_model.bin")
    other = tmp_path / "other"
    PLAIN.model(torch.float32).config.save_pretrained(other)
    save_file({"model.norm.weight": torch.zeros(3)}, other / "model.safetensors")
    table: list[tuple[tuple[object, ...], int, str]] = [
        ((tmp_path / "none", "--to", tmp_path / "out"), 2, "there is no folder"),
        ((tmp_path / "empty", "--to", tmp_path / "out"), 2, "config.json"),
        ((pickled, "--to", tmp_path / "out"), 2, "not safetensors"),
        ((other, "--to", tmp_path / "out", "--format", "torch"), 2, "config.json that belongs to the weights"),
        ((run, "--to", run), 2, "not empty"),
        ((run, "--to", run / "config.json"), 1, "cannot make the folder"),
        ((run, "--to", tmp_path / "out", "--format", "gguf"), 2, "formats are huggingface, dcp, torch"),
        ((run, "--to", tmp_path / "out", "--dtype", "float16"), 2, "float32 or bfloat16"),
        ((run,), 2, "--to"),
    ]
    for arguments, code, said in table:
        done = invoke(*arguments)
        assert (done.exit_code, done.stdout) == (code, ""), (arguments, done.output)
        assert said in " ".join(done.stderr.split()), (arguments, done.stderr)
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists() or not list((tmp_path / "out").iterdir())


def test_weights_older_than_the_last_steps_of_their_run_are_not_read(run: Path, tmp_path: Path) -> None:
    """A plan is made of the configuration alone, which is that of all steps."""
    (tmp_path / "text.txt").write_text("a stitch in time saves nine; " * 200)
    settings = {"model": "tiny", "data": ["text.txt"], "device_memory": "1MiB", "steps": 2}
    (run / "run.json").write_text(dump(RunStart(settings, warmup=1, tokens=1, text_crc32=1)))
    (run / "losses.jsonl").write_text('{"step": 1, "loss": 2.0, "lr": 0.1}\n')
    size = "--batch", "1", "--seq", "8"
    verbs: dict[str, tuple[object, ...]] = {
        "verify": ("verify", run, *size),
        "train": ("train", "--model", run, "--data", tmp_path / "text.txt", "--device-memory", "64MiB", "--steps", 1),
        "plan": ("plan", run, "--device-memory", "64MiB", *size),
        "compare": ("compare", run, "--budgets", "64MiB", *size),
    }
    words = f"the run in {run} has taken 1 of 2 steps, and its model is written when it ends; go on with"
    for name in ("verify", "train"):
        done = CliRunner().invoke(app, [*map(str, verbs[name])])
        assert (done.exit_code, done.stdout) == (2, "") and words in " ".join(done.stderr.split()), done.output
    assert CliRunner().invoke(app, [*map(str, verbs["plan"])]).exit_code == 0
    (run / "config.json").unlink()
    for name, verb in verbs.items():
        done = CliRunner().invoke(app, [*map(str, verb)])
        assert done.exit_code == 2 and words in " ".join(done.stderr.split()), (name, done.output)


def test_a_run_that_goes_on_behind_its_model_is_not_exported(run: Path, tmp_path: Path) -> None:
    settings = {"model": "tiny", "data": ["text.txt"], "device_memory": "1MiB", "steps": 2}
    (run / "run.json").write_text(dump(RunStart(settings, warmup=1, tokens=1, text_crc32=1)))
    lines = [f'{{"step": {step}, "loss": 2.0, "lr": 0.1}}\n' for step in (1, 2)]
    (run / "losses.jsonl").write_text(lines[0])
    done = invoke(run, "--to", tmp_path / "out")
    assert done.exit_code == 2 and "has taken 1 of 2 steps, and its model is written when it ends" in done.stderr
    (run / "losses.jsonl").write_text("".join(lines))
    assert invoke(run, "--to", tmp_path / "out").exit_code == 0
    (run / "config.json").unlink()
    done = invoke(run, "--to", tmp_path / "more")
    assert done.exit_code == 2 and f"go on with forebay train --run {run} --resume" in done.stderr


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    model = PLAIN.model(torch.float32)
    model, _ = forebay.prepare(model, adamw(model), device_memory="64MiB", device="cpu", policy="stream")
    with pytest.raises(ConfigError, match=r"what is there is pickled.*save_pretrained"):
        forebay.load(model, str(tmp_path))
    forebay.close(model)


# What goes wrong, and what it takes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_leaves_no_weights(
    trained: Any, tmp_path: Path, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = trained(PLAIN)

    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"cannot write the model to .*No space left"):
        forebay.export(model, tmp_path / "out", layout=layout)
    assert left_in(tmp_path / "out") == set()


def test_what_transformers_refuses_to_write_is_told_and_leaves_nothing(trained: Any, tmp_path: Path) -> None:
    model, _ = trained(PLAIN)
    model.generation_config.temperature = 0.7  # and do_sample is False
    for _ in range(2):
        with pytest.raises(ModelError, match=r"does not write the configuration.*generation_config.*temperature"):
            forebay.export(model, tmp_path / "out")
        assert not list((tmp_path / "out").iterdir())
    model.generation_config.temperature = None
    forebay.export(model, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_disk_that_is_full_at_the_last_file_leaves_nothing(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    done = invoke(run, "--to", tmp_path / "out")
    assert done.exit_code == 1 and "No space left" in done.stderr, done.output
    assert not list((tmp_path / "out").iterdir())


def test_what_cannot_be_exported(trained: Any, tmp_path: Path) -> None:
    model, optimizer = trained(CASES["unused"])
    with pytest.raises(ModelError, match="not a model of transformers"):
        forebay.export(model, tmp_path / "hf")
    with pytest.raises(ConfigError, match="holds no optimizer states"):
        forebay.export(model, tmp_path / "torch", layout="torch", optimizer=optimizer)
    with pytest.raises(ConfigError, match="there is no layout 'zip'"):
        forebay.export(model, tmp_path / "zip", layout="zip")  # type: ignore[arg-type]
    for dtype in ("bfloat16", torch.int8):
        with pytest.raises(ConfigError, match=r"a floating-point dtype of torch's, such as torch.bfloat16, got"):
            forebay.export(model, tmp_path / "dtype", layout="torch", dtype=dtype)  # type: ignore[arg-type]
    _, others = trained(CASES["used-twice"])
    for other in (others, adamw(model)):
        with pytest.raises(OptimizerError, match=r"has no states of this model; .* that forebay\.prepare returned"):
            forebay.export(model, tmp_path / "dcp", layout="dcp", optimizer=other)
    with pytest.raises(ModelError, match="not prepared"):
        forebay.export(CASES["unused"].model(torch.float32), tmp_path / "plain")
    assert not any(path.exists() and list(path.iterdir()) for path in tmp_path.iterdir())


class Large(nn.Module):
    """Three tensors of 40 MiB, which the allocator maps one by one and gives back one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2560, 4096, bias=False) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).square().mean() for layer in self.layers]).sum()


LARGEST = 4 * 2560 * 4096


def resident_peak() -> int:
    """The most bytes of memory that this process has had since the peak was last forgotten."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def held_by_exports(folder: Path) -> dict[str, int]:
    """Bytes of memory that an export into ``folder`` takes beside what there was, by layout and dtype."""
    model = Large()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, _ = forebay.prepare(model, sgd, device_memory="256MiB", device="cpu", policy="stream")
    # A first one, so that what is loaded once is there.
    forebay.export(model, folder / "first", layout="dcp")
    held = {}
    exports: list[tuple[Layout, torch.dtype | None]] = [("dcp", None), ("torch", None), ("torch", torch.bfloat16)]
    for layout, dtype in exports:
        Path("/proc/self/clear_refs").write_text("5")
        before = resident_peak()
        forebay.export(model, folder / f"{layout}-{dtype}", layout=layout, dtype=dtype)
        held[f"{layout}-{dtype}"] = resident_peak() - before
    forebay.close(model)
    return held


HELD = """
import json, pathlib, sys
from tests.parity.test_export import held_by_exports
print(json.dumps(held_by_exports(pathlib.Path(sys.argv[1]))))
"""


def test_one_tensor_or_a_part_of_one_is_in_memory_at_a_time(tmp_path: Path) -> None:
    # In a process of its own: here, holes as large as a tensor that other tests have left would serve it, now one and
    # now another, and stay where they are.
    done = subprocess.run([sys.executable, "-c", HELD, str(tmp_path)], capture_output=True, text=True, check=True)
    held = json.loads(done.stdout)
    # dcp: one tensor, as torch.save takes it. torch: a part, which the home or a conversion has beside the file's.
    assert 0.8 * LARGEST < held.pop("dcp-None") < 1.2 * LARGEST
    assert held.keys() == {"torch-None", "torch-torch.bfloat16"}
    assert all(nbytes < 0.2 * LARGEST for nbytes in held.values()), held
