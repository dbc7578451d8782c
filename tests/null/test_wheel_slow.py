"""The wheel as somebody else installs it: all files are in it, and it runs in a clean environment.

    scripts/test -m slow -n 0 tests/null/test_wheel_slow.py

Takes minutes and needs what pip needs: torch is installed anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*command: str | Path, code: int = 0) -> str:
    """Both outputs of a command that must end with ``code``. The sources of this checkout are out of its sight."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd="/", env=environment, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (built,) = folder.glob("forebay-*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel and what it depends on. torch first and alone, as for every install
    here: no other package chooses its build."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, with_pip=True)
    pinned = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    install(folder / "bin", pinned)
    install(folder / "bin", str(wheel))
    return folder / "bin"


def install(environment: Path, *what: str) -> None:
    run(environment / "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *what)


def test_every_file_is_in_it(wheel: Path) -> None:
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "-C", str(ROOT / "src"), "ls-files", "forebay"], capture_output=True, text=True, check=True
    )
    assert packed == set(tracked.stdout.split())


def test_it_trains_with_its_dependencies_alone(clean: Path, tmp_path: Path) -> None:
    there = run(clean / "python", "-m", "pip", "list", "--format=freeze").lower()
    assert "transformers" not in there and "matplotlib" not in there
    program = tmp_path / "program.py"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program.write_text(
        readme.partition("<!-- run by tests/null/test_readme.py -->\n```python\n")[2].partition("```")[0]
    )
    assert len(run(clean / "python", program).splitlines()) == 3
    assert "Usage" in run(clean / "forebay", "--help")
    assert "pip install 'forebay[demo]'" in run(clean / "forebay", "demo", code=2)


def test_the_demo_runs_with_its_extra(clean: Path, wheel: Path) -> None:
    install(clean, f"{wheel}[demo]")
    told = run(clean / "forebay", "demo", "--steps", "2", "--json")
    answer = json.loads(next(line for line in told.splitlines() if line.startswith("{")))
    assert answer["steps"] == 2 and len(answer["loss"]) == 2
