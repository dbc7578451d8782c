"""docs/tour.md prints what it says, and docs/forebay.ipynb runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from pages.notebook import code_of, executed
from pages.printed import printed, settled

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.chdir(tmp_path)


def test_the_tour_prints_what_it_says() -> None:
    page = ROOT / "docs" / "tour.md"
    assert settled(printed(page)) == settled(page.read_text(encoding="utf-8")), "run scripts/docs"


def test_the_notebook_runs() -> None:
    path = ROOT / "docs" / "forebay.ipynb"
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert kept["nbformat"] == 4 and len(code_of(kept)) > 3
    made = executed(path)
    printing = [[bool(cell.get("outputs")) for cell in one["cells"]] for one in (kept, made)]
    assert printing[0] == printing[1], "run scripts/docs"
