"""When the byte ledger rests: never for a batch of a new shape, and without a trace in what is computed, stays or
moves; and what refuses a stray use of a parameter meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import forebay
from forebay.errors import ConfigError, ParameterReleased
from forebay.memory import Kind, Tier
from forebay.runtime.hooks import session_of
from forebay.runtime.session import Session
from forebay.runtime.vigil import MOST, Vigil, VigilPolicy, batch_shape

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


@pytest.mark.parametrize("policy", ["stream", "recompute", "offload-all"])
def test_a_model_that_streams_runs_again_or_moves_is_seen_as_seldom(policy: str) -> None:
    model, optimizer, session = prepared(policy)
    counted = [run(model, optimizer, session) for _ in range(18)]
    assert counted == [True, True, *[False] * 14, True, False]
    forebay.close(model)


@pytest.mark.parametrize("policy", ["stream", "recompute", "offload-all"])
def test_what_is_not_seen_is_computed_all_the_same(policy: str) -> None:
    """Parameters come and go, blocks run again and activations move in steps that nobody counts."""
    model, optimizer, session = prepared(policy)
    plain = chain()
    update = torch.optim.SGD(plain.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        batch = torch.randn(ROWS, WIDTH, generator=generator)
        for one, its in ((model, optimizer), (plain, update)):
            one(batch).square().mean().backward()
            its.step()
        made = forebay.gradients(model)
        assert all(torch.equal(made[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)
        optimizer.zero_grad()
        update.zero_grad()
    assert not seen(session)
    forebay.close(model)


class Gate(nn.Module):
    """Reads its input three times, so that backward adds gradients up."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.add(x, self.down(self.up(x).sigmoid() * x))
        return out


def ops_of(step: Callable[[], None]) -> tuple[Counter[str], int]:
    """How often each op ran in ``step``, and the bytes that were allocated."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.events() or ()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    memory = [e.nbytes() for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return Counter(e.name for e in events if e.name.startswith("aten::")), sum(n for n in memory if n > 0)


def test_blocks_run_again_with_the_ops_of_torchs_own_checkpoint() -> None:
    """And nothing else: in a step that is not seen no op is added, and no sum of gradients is out of place."""
    torch.manual_seed(0)
    layers = [Gate() for _ in range(3)]
    model = nn.Sequential(*layers)
    batch = torch.ones(ROWS, WIDTH)

    def checkpointed() -> None:
        x = batch
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()

    checkpointed()
    model.zero_grad()
    expected, nbytes = ops_of(checkpointed)
    assert expected["aten::add_"] > 0
    model.zero_grad()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = forebay.prepare(
        model, optimizer, (batch,), device_memory="64MiB", policy="recompute", blocks=["0", "1", "2"]
    )
    found: list[tuple[Counter[str], int]] = []
    for _ in range(3):
        found.append(ops_of(lambda: model(batch).sum().backward()))
        optimizer.step()
        optimizer.zero_grad()
    forebay.close(model)
    # What a tensor is looked at for, not what is computed.
    quiet = {"aten::detach", "aten::detach_", "aten::empty", "aten::set_", "aten::view"}
    assert {n: c for n, c in found[2][0].items() if n not in quiet} == {
        n: c for n, c in expected.items() if n not in quiet
    }
    assert found[2][1] - nbytes < 4096
    assert found[0][0]["aten::add_"] < expected["aten::add_"], "the ledger sees the first step"


def test_bytes_that_move_in_a_step_that_is_not_seen_leave_the_account_as_it_was() -> None:
    model, optimizer, session = prepared("offload-all")
    live = []
    for _ in range(5):
        run(model, optimizer, session)
        forebay.synchronize(model)
        live.append(session.device.usage().live)
    assert len(set(live)) == 1
    forebay.close(model)


def test_a_stray_use_is_refused_between_steps_and_in_what_is_seen() -> None:
    model, optimizer, session = prepared("stream")
    for _ in range(4):
        run(model, optimizer, session)
        with pytest.raises(ParameterReleased, match=r"read parameter 0\.weight"):
            model[0].weight.norm()  # type: ignore[index]
    with torch.no_grad():
        model(torch.ones(ROWS, WIDTH))
    with pytest.raises(ParameterReleased, match=r"read parameter 0\.weight"):
        model[0].weight.norm()  # type: ignore[index]
    handle = model[3].register_forward_pre_hook(lambda module, args: args[0] + model[0].weight.sum())  # type: ignore[index]
    # Of the shape that is known: not looked at, so it reads the NaN that stands for the bytes. Of a new one: refused.
    assert model(torch.ones(ROWS, WIDTH)).isnan().all()
    with pytest.raises(ParameterReleased, match=r"read parameter 0\.weight"):
        model(torch.ones(2 * ROWS, WIDTH))
    handle.remove()
    forebay.close(model)
    assert torch.ones(2).sum() == 2 and not seen(session)


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


@dataclass
class Batch:
    x: torch.Tensor
    ids: list[int]


def test_an_object_has_the_shape_of_its_fields() -> None:
    shapes = [
        batch_shape((Batch(torch.ones(2, 3), [1, 2]),), {}),
        batch_shape((Batch(torch.ones(3, 2), [1, 2]),), {}),
        batch_shape((Batch(torch.ones(2, 3), [1, 3]),), {}),
        batch_shape((SimpleNamespace(x=torch.ones(2, 3), ids=[1, 2]),), {}),
        batch_shape((np.ones((2, 3)),), {}),
        batch_shape((object(),), {}),
    ]
    assert len(set(shapes)) == len(shapes)
    assert batch_shape((Batch(torch.zeros(2, 3), [1, 2]),), {}) == shapes[0]
    assert batch_shape((np.zeros((2, 3)),), {}) == shapes[4]
    itself = SimpleNamespace()
    itself.itself = itself
    assert batch_shape((itself,), {}) == batch_shape((itself,), {})


def test_no_more_shapes_are_remembered_than_so_many() -> None:
    vigil = Vigil(VigilPolicy(first=1, every=1000))
    assert all(vigil.begins(number, training=False) for number in range(MOST + 1))
    assert not vigil.begins(MOST, training=False)
    assert vigil.begins(0, training=False), "the first was given up"


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
