"""``kill -9`` at random instants of runs over all three tiers, and of ``forebay train``: nothing that was said to be
saved is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.programs import ENVIRONMENT, ROOT


# So many of each of six ways: 240 in the long run, each at a process that lived.
@pytest.mark.parametrize("kills", [1, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_killed_runs_end_as_if_nobody_had_killed_them(kills: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.killing", str(tmp_path), str(kills), str(kills)],
        capture_output=True,
        text=True,
        timeout=250 if kills == 1 else 1750,
        cwd=ROOT,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    # Three tiers, checkpoints in place, of halves too, and the command.
    assert len(found["killed"]) == 6 and min(found["killed"].values()) >= kills
