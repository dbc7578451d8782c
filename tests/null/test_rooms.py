"""Rooms that must work without torch do so in an interpreter of their own.

The import contracts in pyproject.toml say the same of the source; this sees what an import really loads, also
through other packages.
"""

from __future__ import annotations

import json
import subprocess
import sys

WITHOUT_TORCH = (
    "forebay",
    "forebay.units",
    "forebay.errors",
    "forebay.memory",
    "forebay.timeline",
    "forebay.model",
    "forebay.trace",
    "forebay.layout",
    "forebay.cells",
    "forebay.workspaces",
    "forebay.buffers",
    "forebay.buffer_csv",
    "forebay.op_graph",
    "forebay.recording",
    "forebay.snapshot",
    "forebay.plans",
    "forebay.records",
    "forebay.arenas",
    "forebay.slabs",
    "forebay.config",
    "forebay.machine",
    "forebay.priority",
    "forebay.program",
    "forebay.servers",
    "forebay.remedies",
    "forebay.catalogue",
    "forebay.scheduling",
    "forebay.lowering",
    "forebay.checking",
    "forebay.simulation",
    "forebay.simulation.allocators",
    "forebay.phases",
    "forebay.planners",
    "forebay.planners.parallel",
    "forebay.planning",
    "forebay.figures",
    "forebay.collector",
    "forebay.names",
    "forebay.compression",
    "forebay.loss",
    "forebay.reporting",
    "forebay.reporting.run_page",
    "forebay.cli",
)

PROBE = """
import importlib, json, sys
loaded = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded[name] = sorted({"torch", "transformers", "numba"} & sys.modules.keys())
print(json.dumps(loaded))
"""


def test_rooms_without_torch() -> None:
    # One process imports them in turn: the first one that names torch is the culprit.
    result = subprocess.run(
        [sys.executable, "-c", PROBE, *WITHOUT_TORCH], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {name: [] for name in WITHOUT_TORCH}
