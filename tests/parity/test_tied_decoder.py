"""A decoder inside a block whose weight is another block's: both are needed at once, whatever is compared with what."""

from __future__ import annotations

import torch
import transformers

from forebay.budgets import Budget
from forebay.checking import check
from forebay.planners import make_plan
from forebay.planning import problem_of
from forebay.profiler.capture import capture
from tests.null.strategies import roomy_machine


def test_every_budget_between_least_and_plenty_has_a_plan() -> None:
    config = transformers.BertConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=6,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    ids = torch.randint(2, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    trace = capture(transformers.BertForMaskedLM(config).train(), {"input_ids": ids, "labels": ids}).trace
    machine = roomy_machine("cpu")

    def plan_for(nbytes: int, policy: str) -> int:
        plan = make_plan(problem_of(trace, machine, Budget(nbytes)), policy)
        check(trace, machine, plan)
        return plan.device

    plenty, streamed = plan_for(1 << 30, "resident"), plan_for(1 << 30, "stream-recompute")
    for part in range(1, 5):
        assert plan_for(streamed + part * (plenty - streamed) // 5, "auto") <= plenty
