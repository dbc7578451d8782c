"""What a checkpoint names in place is what a copy would have been, bit for bit, and costs no byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

import forebay
from forebay.calls import Calls
from forebay.checkpoint.generations import MANIFEST
from forebay.memory import Tier
from forebay.plans import Plan, Update
from forebay.runtime.blocks import find_blocks
from forebay.safekeeping import CheckpointSize, checkpoint_size
from forebay.states import Masters
from tests.parity.content import expect_same
from tests.parity.in_place import InPlace, states_on_disk, two_places
from tests.parity.models import CASES
from tests.parity.test_resume import Run

HALF = 3

Change = Callable[[nn.Module, Plan], Plan]


def on_the_device(model: nn.Module, plan: Plan) -> Plan:
    """The same, updated on the device."""
    homes = tuple(replace(p, parameters=Tier.HOST, update=Update.DEVICE) for p in plan.placements)
    window = replace(plan.streaming, update_window=1 << 20)
    device = plan.device + (1 << 20)
    return two_places(model, replace(plan, placements=homes, streaming=window, device=device))


def in_smaller_chunks(model: nn.Module, plan: Plan) -> Plan:
    return two_places(model, plan, update_chunk=1024, disk_reads=Calls(depth=2))


def with_whole_masters(model: nn.Module, plan: Plan) -> Plan:
    return two_places(model, plan, masters=Masters.WHOLE)


def in_turn(model: nn.Module, plan: Plan) -> Plan:
    """One half of a block on disk, the other, both, or none."""
    tiers = [(Tier.DISK, Tier.HOST), (Tier.HOST, Tier.DISK), (Tier.DISK, Tier.DISK), (Tier.HOST, Tier.HOST)]
    placed = enumerate(plan.placements)
    homes = tuple(replace(p, parameters=tiers[i % len(tiers)][0], states=tiers[i % len(tiers)][1]) for i, p in placed)
    return two_places(model, replace(plan, placements=homes))


def in_backward(model: nn.Module, plan: Plan) -> Plan:
    """The same, updated in backward, where a process that is killed has taken half a step."""
    largest = max(block.gradient_nbytes for block in find_blocks(model).model.blocks) + 4096
    homes = tuple(p.updating(Update.BACKWARD) for p in plan.placements)
    streaming = replace(plan.streaming, gradient_slots=(largest,))
    return two_places(model, replace(plan, placements=homes, streaming=streaming))


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    ("name", "dtype", "before", "after", "background"),
    [
        ("llama", torch.float32, two_places, in_smaller_chunks, False),
        ("llama", torch.bfloat16, states_on_disk, two_places, True),
        ("llama-tied", torch.bfloat16, on_the_device, states_on_disk, True),
        ("experts", torch.float32, two_places, two_places, True),  # parameters without a gradient in some steps
        ("frozen", torch.float32, states_on_disk, two_places, False),
        ("llama", torch.float32, in_backward, two_places, True),
        ("llama", torch.bfloat16, in_backward, in_turn, True),
        ("frozen", torch.bfloat16, in_turn, with_whole_masters, True),
        ("llama-tied", torch.bfloat16, with_whole_masters, in_turn, False),
        ("experts", torch.bfloat16, in_turn, in_smaller_chunks, False),
    ],
    ids=[
        "parameters-and-states",
        "bf16",
        "on-device",
        "experts",
        "frozen",
        "in-backward",
        "halves-in-backward",
        "halves-in-turn",
        "whole-then-halves",
        "halves-of-experts",
    ],
)
def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    name: str, dtype: torch.dtype, before: Change, after: Change, background: bool, tmp_path: Path
) -> None:
    case = CASES[name]
    whole = InPlace(case, dtype, tmp_path, before)
    losses = []
    for step in range(HALF):
        losses += whole.steps(range(step, step + 1))
        whole.save(step + 1, background=background)
    middle = whole.content()
    # What follows a save writes where the checkpoint is not: another model goes on from it after that.
    losses += whole.steps(range(HALF, 2 * HALF))
    end = whole.content()
    whole.close()

    never = Run(case, dtype, "stream", tmp_path)
    plain = []
    for step in range(2 * HALF):
        loss = never.model(**case.inputs(step, dtype))["loss"]
        loss.backward()
        plain.append(loss.detach().clone())
        never.optimizer.step()
        never.optimizer.zero_grad()
    never.close()
    assert all(torch.equal(a, b) for a, b in zip(losses, plain, strict=True))

    second = InPlace(case, dtype, tmp_path, after)
    second.steps(range(1))  # of its own, all of which is replaced
    assert second.resume() == HALF
    expect_same(middle, second.content())
    again = second.steps(range(HALF, 2 * HALF))
    assert all(torch.equal(a, b) for a, b in zip(again, losses[HALF:], strict=True))
    expect_same(end, second.content())
    # The first save of its own: the files of the run before go.
    second.save(2 * HALF)
    assert len(list(second.kept.glob("home-*"))) == (1 if after is states_on_disk else 2)
    second.close()


@pytest.mark.parametrize(("masters", "stays"), [(Masters.WHOLE, 0), (Masters.LOWER, 2)])
def test_a_save_writes_no_byte_of_what_is_on_disk(masters: Masters, stays: int, tmp_path: Path) -> None:
    """Parameters in bf16 are on the host. They are made from masters that are among the states, or are half of them:
    ``stays`` bytes of each that a state in place lacks, and that are copied."""

    def placed(model: nn.Module, plan: Plan) -> Plan:
        return states_on_disk(model, plan, masters=masters)

    case, dtype = CASES["llama"], torch.bfloat16
    steps = 4
    elements = sum(p.numel() for p in case.model(dtype).parameters())
    taken: list[int] = []
    peaks: list[dict[Tier, int]] = []
    for saved in (False, True):
        (tmp_path / str(saved)).mkdir()
        run = InPlace(case, dtype, tmp_path / str(saved), placed)
        run.steps(range(1))
        before = run.written()
        for step in range(steps):
            run.steps(range(step, step + 1))
            if saved:
                # This model has no buffer to save.
                assert checkpoint_size(run.model) == CheckpointSize(stays * elements, (12 - stays) * elements)
                kept, background = run.save(step, background=step % 2 == 0), step % 2 == 0
                headers = 0 if background or not stays else 1024 * len(list(case.model(dtype).parameters()))
                assert stays * elements <= kept <= stays * elements + headers
        taken.append(run.written() - before)
        peaks.append(forebay.report(run.model).timeline.peaks)
        run.close()
    states = (12 - stays) * elements
    assert taken[0] == taken[1] >= steps * states
    assert peaks[0] == peaks[1]
    kept = tmp_path / "True" / "kept"
    # Two places, in whole pages; the manifest names one of them. And nothing else is copied beside.
    (home,) = kept.glob("home-*")
    assert 2 * states <= home.stat().st_size < 2 * states + 2 * 4096 * 200
    copied = [name for file in kept.glob("generation-*/*") for name in safe_open(file, "pt").keys()]  # noqa: SIM118
    assert all(name.startswith("upper.") for name in copied) and bool(copied) == (stays > 0)
    assert (kept / MANIFEST).exists()
    # Nothing was saved in the other one: its files went with the run.
    assert not list((tmp_path / "False" / "kept").glob("home-*"))


def test_values_that_are_given_leave_the_checkpoint_alone(tmp_path: Path) -> None:
    run = InPlace(CASES["llama"], torch.float32, tmp_path)
    run.steps(range(2))
    run.save(2)
    before, state = run.content(), run.optimizer.state_dict()
    values = {name: torch.zeros_like(value) for name, value in forebay.parameters(run.model).items()}
    run.model.load_state_dict(values, strict=False)
    assert not any(value.any() for value in forebay.parameters(run.model).values())
    run.steps(range(1))
    run.optimizer.load_state_dict(state)
    assert run.resume() == 2
    expect_same(before, run.content())
    # And once more, from where it has gone on.
    run.steps(range(2, 4))
    assert run.resume() == 2
    expect_same(before, run.content())
    run.close()
