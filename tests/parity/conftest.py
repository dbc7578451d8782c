"""How far searches go here, and what every test leaves behind: nothing that the tests after it would run under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode


@pytest.fixture(autouse=True, scope="module")
def _plans_are_run(short_searches: None) -> None:
    """What makes plans fast is tested in ``tests/null``."""


@pytest.fixture(autouse=True)
def _no_mode_is_left() -> Iterator[None]:
    """A dispatch mode that stays is handed every op of every later test. It is told once, and taken off."""
    yield
    left = _get_current_dispatch_mode_stack()
    for _ in left:
        _pop_mode()
    assert not left
