"""``kill -9`` at random instants of runs over all three tiers, and of ``forebay train``: nothing that was said to be
saved is lost."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# Two kills in each trial of each of five ways: 200 in the long run.
@pytest.mark.parametrize("trials", [1, pytest.param(20, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])])
def test_killed_runs_end_as_if_nobody_had_killed_them(trials: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killing", str(tmp_path), str(trials), str(trials)],
        capture_output=True,
        text=True,
        timeout=250 if trials == 1 else 1150,
        cwd=ROOT,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Three tiers, checkpoints in place and the command; of the two shots of a trial some come too late.
    assert found["trials"] == 5 * trials
    assert found["killed"] >= trials
