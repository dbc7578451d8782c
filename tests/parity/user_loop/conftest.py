from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import forebay
from tests.parity.models import CASES
from tests.parity.user_loop.pair import Pair

POLICIES = ["auto", "stream"]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def pair(policy: str) -> Iterator[Pair]:
    """A small network with a module that is used twice and a parameter that an enclosing module owns."""
    pair = Pair(CASES["used-twice"].model(torch.float32), CASES["used-twice"].model(torch.float32), policy)
    yield pair
    forebay.close(pair.model)


@pytest.fixture
def llama(policy: str) -> Iterator[Pair]:
    pair = Pair(CASES["llama"].model(torch.float32), CASES["llama"].model(torch.float32), policy)
    yield pair
    forebay.close(pair.model)
