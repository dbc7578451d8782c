"""The programs of docs/integrations.md run as they stand."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState

from tests.parity.page_programs import programs

PAGE = "integrations.md"
PROGRAMS = programs(PAGE, "test_integrations_docs.py")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = PROGRAMS[number]
    pytest.importorskip("lightning" if "lightning" in program else "accelerate")
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(program, PAGE, "exec"), {"__name__": "__main__"})
    assert re.search(r"device.*: \d", said.getvalue())


def test_there_are_two() -> None:
    assert len(PROGRAMS) == 2
