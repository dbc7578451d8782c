"""What is kept of compiled functions: read again as long as no source has changed that they are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from forebay.kernels.stamp import stamp_of

CALLED = "from forebay.kernels.jit import part\n\n@part\ndef more(x):\n    return x + {}\n"

CALLER = "from forebay.kernels.jit import compiled\n\ndef made(more):\n    globals()['more'] = more\n    return run\n\n"
CALLER += "@compiled\ndef run(x):\n    return more(x)\n"


def load(path: Path) -> Any:
    """The module at ``path``, as a new process would have it."""
    stamp_of.cache_clear()
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def calling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Any]:
    """A compiled function that adds a number, which is in another file."""
    # Python itself takes a file of the same size and second for the one that it has compiled.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (tmp_path / "caller.py").write_text(CALLER)

    def make(number: int) -> Any:
        (tmp_path / "called.py").write_text(CALLED.format(number))
        return load(tmp_path / "caller.py").made(load(tmp_path / "called.py").more)

    return make


def test_a_change_in_a_file_that_is_called_is_seen(calling: Callable[[int], Any]) -> None:
    for number, kept in ((1, 0), (1, 1), (2, 0)):
        run = calling(number)
        assert run(40) == 40 + number
        assert sum(run.stats.cache_hits.values()) == kept
