"""docs/verify.md and docs/export.md do what they say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("verify", "export")}
PROGRAM = re.compile(r"<!-- run by tests/parity/test_verify_docs\.py -->\n```python\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize("name", PAGES)
def test_the_program_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (program,) = PROGRAM.findall(PAGES[name])
    exec(compile(program, f"docs/{name}.md", "exec"), {"__name__": "page"})


def test_every_check_is_described() -> None:
    table = PAGES["verify"].partition("| check |")[2].partition("\n\n")[0]
    for name in ("loss", "random numbers", "gradients", "accumulated gradients", "parameters after one step"):
        assert f"| {name} |" in table
