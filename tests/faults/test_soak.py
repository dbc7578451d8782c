"""A process that trains for a long time has at its end what it had after a while: memory, descriptors, threads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.units import KiB
from tests.faults.programs import ENVIRONMENT, ROOT


@pytest.mark.parametrize("steps", [200, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_nothing_grows(steps: int, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults.soaking", str(tmp_path), str(steps)],
        capture_output=True,
        text=True,
        timeout=250 if steps == 200 else 850,
        cwd=ROOT,
        check=False,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    parts = json.loads(done.stdout)
    assert len(parts) == 8 and list((tmp_path / "disk").iterdir()) == []
    first, *later = parts
    assert all(first[tier] > 0 for tier in ("device", "host", "disk"))
    for part in later:
        assert {**part, "resident": 0} == {**first, "resident": 0}
    # What the allocator keeps of freed memory moves by some ten KiB; a leak that matters is more than 1 KiB a step.
    half = len(parts) // 2
    settled, after = (max(part["resident"] for part in some) for some in (parts[:half], parts[half:]))
    assert after < settled + 128 * KiB + steps // 2 * KiB, parts
