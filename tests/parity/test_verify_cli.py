"""``forebay verify`` from its command line: equal, not equal, cut to what there is memory for, and misused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from typer.testing import CliRunner, Result

import forebay.cli.verify
from forebay.cli.main import app
from forebay.tiers.io import SystemIo
from tests.parity.test_verify import spoil_copy

SHORT = ("--batch", "2", "--seq", "16", "--steps", "1", "--device", "cpu")
STREAM = ("--policy", "stream")


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)])


def verified(*arguments: object) -> dict[str, Any]:
    done = invoke(*arguments, *SHORT, "--json")
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def config(path: Path, **settings: object) -> Path:
    path.write_text(json.dumps(settings))
    return path


def llama(folder: Path, layers: int = 2) -> Path:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    return config(folder / "llama.json", model_type="llama", num_hidden_layers=layers, **sizes)


def gpt2_with_dropout(folder: Path) -> Path:
    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}
    return config(folder / "gpt2.json", model_type="gpt2", **sizes)


def test_equal_from_the_command_line(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    budgets = ("--disk", f"{disk}:64MiB", "--device-memory", "256KiB", "--host-memory", "8MiB")
    found = verified(llama(tmp_path), *budgets)
    assert found["equal"] is True and found["kept"] is True and found["changes_numbers"] == []
    for check in found["checks"]:
        assert (check["equal"], check["worst_error"], check["where"]) == (True, 0.0, None)
    names = [check["name"] for check in found["checks"]]
    assert {"loss", "gradients", "accumulated gradients", "clipped gradients", "evaluation in between"} < set(names)
    what = ("losses", "parameters", "optimizer states", "buffers")
    assert names[-4:] == [f"{one} after a resume" for one in what]
    assert list(disk.iterdir()) == []
    assert any("random weights and made-up data from seed 0" in note for note in found["notes"])


def test_a_bit_that_changes_on_its_way_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 2}
    model = config(tmp_path / "larger.json", model_type="llama", num_hidden_layers=6, **sizes)
    # Large enough that the buffers of a disk tier take less than what goes there.
    on_disk = ("--policy", "zero-infinity", "--host-memory", "13MiB", "--disk", f"{tmp_path}:64MiB")
    found = verified(model, *on_disk, "--checksums")
    assert found["equal"] is True and any("was held against its checksums" in note for note in found["notes"])
    read, reads = SystemIo.preadv, [0]

    def spoilt(io: SystemIo, fd: int, buffer: memoryview, offset: int) -> int:
        done = read(io, fd, buffer, offset)
        reads[0] += 1
        if reads[0] == 5:  # in the first update
            buffer[3] ^= 0x20  # of the exponent of a number
        return done

    monkeypatch.setattr(SystemIo, "preadv", spoilt)
    done = invoke(model, *SHORT, *on_disk, "--checksums")
    assert done.exit_code == 1 and "are not those that were written there" in " ".join(done.output.split()), done.output
    assert reads[0] >= 5 and "Traceback" not in done.output


@pytest.mark.slow
def test_the_largest_elements_of_gradients_are_said_and_kept(tmp_path: Path) -> None:
    more = ("--policy", "smart-infinity-compressed", "--disk", f"{tmp_path}:64MiB")
    found = verified(llama(tmp_path), *more)
    assert found["kept"] is True and found["equal"] is False and "largest 1 %" in found["changes_numbers"][0]


def test_a_policy_that_cannot_serve_is_a_no(tmp_path: Path) -> None:
    done = invoke(llama(tmp_path), "--policy", "smart-infinity-compressed", *SHORT)
    assert done.exit_code == 1 and "no disk is allowed" in done.output and "Traceback" not in done.output


def test_without_a_budget_something_streams(tmp_path: Path) -> None:
    done = invoke(llama(tmp_path), *SHORT, *STREAM)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "Equal: every number is that of plain PyTorch, bit for bit." in said
    assert "half of what plain PyTorch takes" in said and "of host" in said
    assert "trained twice: all of it" in " ".join(done.stderr.split())
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_dropout_in_bf16(tmp_path: Path) -> None:
    asked = ("--dtype", "bfloat16", "--optimizer", "adamw-8bit", "--seed", 3)
    found = verified(gpt2_with_dropout(tmp_path), *asked, *STREAM)
    assert found["equal"] is True and found["changes_numbers"]


def test_weights_of_a_folder_are_used(tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(llama(tmp_path))
    ).save_pretrained(tmp_path / "saved")
    found = verified(tmp_path / "saved", *STREAM)
    assert found["equal"] is True and found["policy"] == "stream"
    assert any(f"weights of {tmp_path / 'saved'}" in note for note in found["notes"])


@pytest.mark.slow
def test_text_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("All work and no play makes Jack a dull boy.\n" * 40)
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    model = config(tmp_path / "bytes.json", model_type="llama", num_hidden_layers=2, **sizes)
    found = verified(model, "--data", tmp_path / "text.txt", *STREAM)
    assert found["equal"] is True
    assert any(f"random weights and text of {tmp_path / 'text.txt'}, in an" in note for note in found["notes"])


@pytest.mark.slow
def test_updates_in_backward(tmp_path: Path) -> None:
    found = verified(llama(tmp_path), "--update", "backward", "--device-memory", "160KiB")
    names = [check["name"] for check in found["checks"]]
    assert found["equal"] is True and "losses after a resume" in names
    assert not any("gradients" in name for name in names)


def test_no_room_to_save_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.safekeeping.available_disk", lambda path: 1000)
    found = verified(llama(tmp_path), *STREAM)
    assert found["equal"] is True
    assert not any("resume" in check["name"] for check in found["checks"])
    assert any("resuming was not looked at" in note for note in found["notes"])


@pytest.mark.slow
def test_fewer_layers_where_there_is_less_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = forebay.cli.verify._room("cpu")
    assert whole > 2**28
    monkeypatch.setattr(forebay.cli.verify, "_room", lambda kind: 5_000_000)
    model = llama(tmp_path, 40)
    done = invoke(model, *SHORT, *STREAM, "--device-memory", "2MiB")
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    layers = int(said.split(" of its 40 layers")[0].split()[-1])
    assert 1 < layers < 40
    assert "in proportion to the layers" in said and "Equal" in said
    assert f"{layers} of 40 layers" in " ".join(done.stderr.split())
    # Asked for outright it is refused, and says what would do.
    done = invoke(model, *SHORT, "--layers", "40")
    assert done.exit_code == 1 and done.stdout == ""
    assert "are free for them; lower --batch or --seq, or give --layers" in " ".join(done.stderr.split())


def test_a_broken_run_is_not_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil_copy(monkeypatch, 5)
    done = invoke(llama(tmp_path), *SHORT, *STREAM)
    assert done.exit_code == 1, done.output
    said = " ".join(done.stdout.split())
    assert "Not equal: " in said and "step 1" in said
    assert "Traceback" not in done.output


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square()


def own() -> tuple[nn.Module, torch.Tensor]:
    return Own(), torch.randn(8, 32)


def test_a_function_of_ones_own() -> None:
    assert verified(f"{__name__}:own", "--accumulate", "3", "--policy", "stream")["equal"] is True


def test_wrong_input_is_one_message_and_its_exit_code(tmp_path: Path) -> None:
    small = llama(tmp_path)
    table: list[tuple[tuple[object, ...], int, str]] = [
        (("giant",), 2, "recipe"),
        (("tiny", "--policy", "magic"), 2, "--policy: there is no 'magic'"),
        (("tiny", "--layers", "9"), 2, "tiny has 4 layers"),
        (("tiny", "--layers", "0"), 2, "--layers"),
        ((f"{__name__}:own", "--layers", "1"), 2, "layers that nobody has counted"),
        (("tiny", "--steps", "0"), 2, "--steps"),
        (("tiny", "--clip-norm", "-1"), 2, "--clip-norm"),
        (("tiny", "--optimizer", "magic"), 2, "--optimizer"),
        (("tiny", "--seq", "4096"), 2, "positions"),
        ((small, *STREAM, "--disk", tmp_path / "none"), 2, "none"),
        ((small, "--data", tmp_path / "none.txt"), 2, "none.txt"),
        ((f"{__name__}:own", "--data", small), 2, "--data: "),
        ((small, "--data", small), 2, "the model's vocabulary has 64"),
        ((small, "--update", "backward", "--accumulate", "2"), 2, "leave --accumulate out"),
        ((small, "--update", "backward", "--clip-norm", "1"), 2, "leave --clip-norm out"),
        ((small, *STREAM, "--device-memory", "1KiB"), 1, "device"),
        (("tiny", "--resume"), 2, "--resume"),
        (("tiny", "--checksums"), 2, "checksums are of what is on disk, and no disk is allowed"),
    ]
    if not torch.cuda.is_available():
        table.append((("tiny", "--device", "cuda"), 2, "finds no CUDA device"))
    for arguments, code, said in table:
        done = CliRunner().invoke(app, ["verify", *map(str, arguments), "--json"])
        assert (done.exit_code, done.stdout) == (code, ""), (arguments, done.output)
        assert said in " ".join(done.stderr.split()), (arguments, done.stderr)
        assert "Traceback" not in done.stderr
