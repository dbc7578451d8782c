"""When the byte ledger rests: only where nothing streams, never for a batch of a new shape, and without a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import ConfigError
from forebay.memory import Kind, Tier
from forebay.runtime.hooks import session_of
from forebay.runtime.session import Session
from forebay.runtime.vigil import Vigil, VigilPolicy, batch_shape

WIDTH, ROWS = 64, 32


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))


def prepared(policy: str, device_memory: str = "64MiB") -> tuple[nn.Module, torch.optim.Optimizer, Session]:
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.ones(ROWS, WIDTH)
    model, optimizer = forebay.prepare(
        model, optimizer, (batch,), device_memory=device_memory, policy=policy, blocks=["0", "1", "2", "3"]
    )
    attachment = session_of(model)
    assert attachment is not None
    return model, optimizer, attachment.session


def seen(session: Session) -> bool:
    """Whether a storage that an op makes now, in the middle of a step, is counted."""
    before = session.device.ledger.live
    made = torch.ones(1000) + 1
    grown = session.device.ledger.live - before
    del made
    return grown > 0


def run(model: nn.Module, optimizer: torch.optim.Optimizer, session: Session, rows: int = ROWS) -> bool:
    loss = model(torch.ones(rows, WIDTH)).sum()
    counted = seen(session)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return counted


def test_a_resident_model_is_seen_twice_then_once_in_sixteen() -> None:
    model, optimizer, session = prepared("auto")
    counted = [run(model, optimizer, session) for _ in range(20)]
    assert counted == [True, True, *[False] * 14, True, False, False, False]
    forebay.close(model)


def test_a_streamed_model_is_always_seen() -> None:
    model, optimizer, session = prepared("stream")
    assert all(run(model, optimizer, session) for _ in range(6))
    forebay.close(model)


def test_a_batch_of_another_shape_is_seen_and_raises_the_peak() -> None:
    model, optimizer, session = prepared("auto")
    for _ in range(4):
        run(model, optimizer, session)
    before = session.device.usage().peak
    assert run(model, optimizer, session, rows=8 * ROWS)
    # Three activations between four layers are saved: 7 * ROWS more rows of each.
    assert session.device.usage().peak - before >= 3 * 7 * ROWS * WIDTH * 4
    forebay.close(model)


def test_a_new_shape_within_a_step_counts_the_gradients_that_unseen_passes_left() -> None:
    model, optimizer, session = prepared("auto")
    for _ in range(4):
        run(model, optimizer, session)
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    assert session.device.usage().at_peak[Kind.GRADIENT] > 0
    session.device.reset_peak()
    assert session.device.usage().at_peak[Kind.GRADIENT] == 0
    loss = model(torch.ones(2 * ROWS, WIDTH)).sum()
    session.device.reset_peak()
    assert session.device.usage().at_peak[Kind.GRADIENT] == 4 * WIDTH * WIDTH * 4
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    del loss
    assert session.device.usage().live == forebay_standing(session)
    forebay.close(model)


def forebay_standing(session: Session) -> int:
    """What is on the device between steps: parameters and states (SGD without momentum has none)."""
    return sum(block.nbytes for block in session.model.blocks)


def test_an_evaluation_pass_stands_for_itself() -> None:
    vigil = Vigil(VigilPolicy(first=1, every=100))
    shape = batch_shape((torch.ones(2, 3),), {})
    assert vigil.begins(shape, training=True)
    assert vigil.begins(shape, training=False)
    assert not vigil.begins(shape, training=False)
    assert vigil.begins(shape, training=True), "the step that was seen goes on"
    vigil.step_ended()
    assert not vigil.begins(shape, training=True)


def test_shapes_differ_by_size_dtype_structure_and_plain_values() -> None:
    ones = torch.ones(2, 3)
    shapes = [
        batch_shape((ones,), {}),
        batch_shape((ones.double(),), {}),
        batch_shape((torch.ones(3, 2),), {}),
        batch_shape((), {"x": ones}),
        batch_shape((ones,), {"flag": True}),
        batch_shape((ones,), {"flag": False}),
    ]
    assert len(set(shapes)) == len(shapes)
    assert batch_shape((torch.zeros(2, 3),), {}) == shapes[0]


@pytest.mark.parametrize("values", [{"first": 0}, {"every": 0}])
def test_a_vigil_that_never_looks_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="1 or more"):
        VigilPolicy(**values)


def test_the_device_tier_is_reported_all_the_same() -> None:
    model, optimizer, session = prepared("auto")
    for _ in range(6):
        run(model, optimizer, session)
    usage = forebay.report(model).usage(Tier.DEVICE)
    assert usage is not None and usage.peak > forebay_standing(session)
    forebay.close(model)
