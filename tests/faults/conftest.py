"""How far searches go here."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _plans_are_run(short_searches: None) -> None:
    """What makes plans fast is tested in ``tests/null``."""
