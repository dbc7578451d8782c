"""The programs of the pages in ``docs`` that a test file runs."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["programs"]

DOCS = Path(__file__).resolve().parents[2] / "docs"


def programs(page: str, by: str) -> list[str]:
    """The texts of those in ``page`` that are said to be run by the file ``by``, in their order."""
    pattern = rf"<!-- run by \S+{re.escape(by)} -->\n```python\n(.*?)```"
    return re.findall(pattern, (DOCS / page).read_text(encoding="utf-8"), re.DOTALL)
