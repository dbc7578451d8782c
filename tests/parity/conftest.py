"""Tiny models: one thread per op is faster than a team, and leaves the lanes' threads the cores."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread_per_op() -> None:
    torch.set_num_threads(1)
