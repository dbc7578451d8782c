"""``harmony`` and ``mobius``: a layer crosses the link twice a step at most, with the numbers of the loop. That both
train all shapes of models bit for bit within their budgets is in ``test_state_policies_train``."""

from __future__ import annotations

import pytest
import torch

import forebay
from forebay.runtime.blocks import find_blocks
from forebay.timeline import Lane
from tests.parity.accumulating import assert_same_accumulation, moved
from tests.parity.models import CASES
from tests.parity.recomputing import AMPLE

COUNT = 3


@pytest.mark.parametrize("policy", ["harmony", "mobius"])
def test_a_layer_comes_at_most_twice_a_step_for_all_micro_batches(policy: str) -> None:
    case, steps = CASES["llama"], 1
    model = assert_same_accumulation(
        case, torch.float32, steps=steps, count=COUNT, policy=policy, micro_batches=COUNT, device_memory=AMPLE
    )
    sizes = {b.name: b.nbytes for b in find_blocks(case.model(torch.float32)).model.blocks}
    fetched = moved(model, Lane.H2D, "fetch")
    assert fetched.keys() == sizes.keys()
    assert all(nbytes <= 2 * steps * sizes[name] for name, nbytes in fetched.items())
    forebay.close(model)
