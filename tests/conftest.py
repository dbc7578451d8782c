"""Settings that every test runs under."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Tiny models: one thread per op is faster than a team, whose members spin while they wait, and leaves the cores to the
# lanes' threads and to the tests beside. Before torch is imported, and for the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"

# Examples are the same in every run and none is timed: a slow machine must not look like a fault.
settings.register_profile(
    "forebay", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("forebay")


@pytest.fixture(autouse=True, scope="session")
def _no_measured_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Plans are the same wherever the tests run: what ``forebay doctor`` has kept of this machine is not looked at."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_core_to_plan_on() -> Iterator[None]:
    """``forebay plan`` and ``forebay compare`` begin no other processes: the other cores have tests of their own, and a
    process would go by no patch of a test. Tests of several (``made_beside``) say how many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.cli.beside.cores", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="module")
def _quick_collections() -> None:
    """What is there before a module's first test (torch, transformers, the tests themselves) is not searched again at
    every collection: that is a second of the processor each time. What its tests make is."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def short_searches() -> Iterator[None]:
    """Every phase of a search for a plan has a quarter of its simulations, and the plan takes 0.5 to 0.8 of the time:
    for tests that need a plan and not the best one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.planners.bench.SIMULATIONS", 10)
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is slow
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what is left out by default, and skips what cannot run here."""
    _thin(items)
    _skip_without_cuda(items)


def _thin(items: list[pytest.Item]) -> None:
    """Marks all but one in n cases of every test that is ``thinned(n)`` as slow: the same ones in every run, drawn from
    all of them, so that no value of a parameter is left out for its place."""
    cases: dict[tuple[str, int], list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("thinned")
        if marker is not None:
            cases.setdefault((item.nodeid.partition("[")[0], *marker.args), []).append(item)
    for (_, share), alike in cases.items():
        drawn = sorted(alike, key=lambda item: zlib.crc32(item.nodeid.encode()))
        for item in drawn[-(-len(drawn) // share) :]:
            item.add_marker("slow")


def _skip_without_cuda(items: list[pytest.Item]) -> None:
    """Skips the tests marked ``gpu`` where torch finds no CUDA device. Imports torch only if there is one to skip."""
    marked = [item for item in items if item.get_closest_marker("gpu") is not None]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason=f"needs a CUDA device; torch {torch.__version__} finds none")
        for item in marked:
            item.add_marker(skip)
