"""What fails while ``prepare`` is at work already: everything that it made goes again."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import forebay
from forebay.errors import ConfigError, StorageError
from tests.faults.footing import ON_DISK, WIDTH, Footing, adamw, assert_trains, network

NOBODY = 65534


def test_disk_without_room_for_the_file(tmp_path: Path) -> None:
    """The system refuses a file of that size after the arenas were made: all of them go again."""
    model = network()
    optimizer = adamw(model)
    footing = Footing.of(model)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(StorageError, match=r"cannot make .*MiB of .*states.*File too large"):
            forebay.prepare(model, optimizer, device="cpu", disk=f"{tmp_path}:1GiB", **ON_DISK)  # type: ignore[arg-type]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    footing.assert_kept(model)
    assert not any(tmp_path.iterdir())
    assert_trains(model, optimizer)


class NoHooks(nn.Linear):
    """A module that takes no forward hook: prepare fails after the parameters were moved."""

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no hooks here")


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_failure_after_the_parameters_were_moved(tmp_path: Path, on_disk: bool) -> None:
    model = network()
    model.append(NoHooks(WIDTH, WIDTH))
    optimizer = adamw(model)
    options: dict[str, Any] = {"device_memory": "64MiB", "policy": "stream"}
    if on_disk:
        options |= {"host_memory": "18MiB", "disk": f"{tmp_path}:1GiB"}
    footing = Footing.of(model)
    with pytest.raises(RuntimeError, match="no hooks here"):
        forebay.prepare(model, optimizer, device="cpu", **options)
    footing.assert_kept(model, moved=True)
    assert not any(tmp_path.iterdir())
    assert_trains(model, optimizer)


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that this process may look into and not write to; root gives its rights up for the time."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    was = os.geteuid()
    if was == 0:
        os.seteuid(NOBODY)
    yield folder
    os.seteuid(was)
    folder.rmdir()


def test_read_only_disk(read_only: Path) -> None:
    model = network()
    optimizer = adamw(model)
    footing = Footing.of(model)
    with pytest.raises(ConfigError, match=r"cannot be written: Permission denied.*change its permissions, or name"):
        forebay.prepare(model, optimizer, device="cpu", disk=f"{read_only}:1GiB", **ON_DISK)  # type: ignore[arg-type]
    footing.assert_kept(model)
    assert not any(read_only.iterdir())
    assert_trains(model, optimizer)
