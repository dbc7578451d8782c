"""How wide the console is that commands print to."""

from __future__ import annotations

import pytest

from forebay.cli.console import LEAST, USUAL, console


@pytest.mark.parametrize(("said", "taken"), [(0, USUAL), (1, USUAL), (LEAST - 1, USUAL), (LEAST, LEAST), (133, 133)])
def test_a_terminal_without_columns_has_the_usual_ones(monkeypatch: pytest.MonkeyPatch, said: int, taken: int) -> None:
    monkeypatch.setenv("COLUMNS", str(said))
    assert console().width == console(stderr=True).width == taken
