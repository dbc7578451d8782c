"""Writes what can be made: ``docs/api``, ``docs/policies``, what the tour prints, what the notebook prints.

scripts/docs
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

from pages import api, notebook, policies
from pages.printed import printed

DOCS = Path(__file__).resolve().parents[1] / "docs"
PRINTED = (DOCS / "tour.md",)
NOTEBOOKS = (DOCS / "forebay.ipynb",)


def main() -> int:
    """Writes all of it; 0."""
    for made in (api, policies):
        shutil.rmtree(made.FOLDER, ignore_errors=True)
        made.FOLDER.mkdir()
        for path, text in made.pages().items():
            path.write_text(text, encoding="utf-8")
    # What a page keeps goes into a folder that goes with it, and what this machine was measured as is not looked at.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = folder
        shutil.copy(DOCS.parent / "README.md", folder)
        for page in PRINTED:
            page.write_text(printed(page), encoding="utf-8")
        for path in NOTEBOOKS:
            notebook.write(notebook.executed(path), path)
        os.chdir(DOCS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
