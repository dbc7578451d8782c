"""A notebook (nbformat 4) whose code cells are run in order, in one interpreter, and keep what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pages.markdown import Block
from pages.printed import Session

__all__ = ["code_of", "executed", "write"]


def code_of(notebook: dict[str, Any]) -> list[str]:
    """The source of every code cell, in order."""
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def executed(path: Path) -> dict[str, Any]:
    """The notebook at ``path`` with what its cells print now. Raises what a cell raises."""
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    session, count = Session(), 0
    for cell in notebook["cells"]:
        if cell["cell_type"] != "code":
            continue
        count += 1
        output = session.run(Block("python", "".join(cell["source"]), 0, 0), f"{path.name}, cell {count}")
        stream = {"name": "stdout", "output_type": "stream", "text": output.splitlines(keepends=True)}
        cell["execution_count"], cell["outputs"] = count, [stream] if output else []
    return notebook


def write(notebook: dict[str, Any], path: Path) -> None:
    """Writes the notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
