"""Speech: the loss of a connectionist temporal classification, whose sizes follow from the lengths of what was said."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import forebay
from forebay.errors import CaptureFailed, DoesNotFit
from forebay.memory import Tier
from forebay.profiler.capture import capture
from tests.parity.capture_rig import real_peak, traced_peak
from tests.parity.compare import assert_same_training
from tests.parity.models import Case

WIDTH, LABELS, LAYERS = 32, 12, 3
FRAMES = (40, 31)
SAID = (7, 4)
"""Labels of each utterance."""


class Speech(nn.Module):
    """Frames of sound to labels. With ``guessed`` the model says itself how many labels there are."""

    def __init__(self, guessed: bool = False) -> None:
        super().__init__()
        self.sound = nn.Conv1d(1, WIDTH, 8, stride=4)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, LABELS)
        self.guessed = guessed

    def forward(self, sound: torch.Tensor, labels: torch.Tensor, frames: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.sound(sound[:, None]).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + layer(hidden).tanh()
        there = labels >= 0
        said = there.sum(-1)
        if self.guessed:
            said = said + hidden.sum((1, 2)).round().long().clamp(0, 0)
        log_probs = self.head(hidden).float().log_softmax(-1).transpose(0, 1)
        loss = nn.functional.ctc_loss(log_probs, labels.masked_select(there), frames, said)
        return {"loss": loss}


def utterances(number: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(number)
    labels = torch.randint(1, LABELS, (2, max(SAID)), generator=draw)
    for row, said in enumerate(SAID):
        labels[row, said:] = -100
    return {
        "sound": torch.randn(2, 4 * max(FRAMES) + 4, generator=draw),
        "labels": labels,
        "frames": torch.tensor(FRAMES),
    }


CASE = Case(Speech, utterances, (torch.float32,))


def test_a_trace_has_the_bytes_of_a_step() -> None:
    model = CASE.model(torch.float32)
    trace = capture(model, utterances(0)).trace
    assert traced_peak(trace) == real_peak(model, utterances(0))
    # Of each time, in each utterance, the prefixes of the longer one's labels, with a blank around every one.
    prefixes = 2 * max(FRAMES) * (2 * max(SAID) + 1) * 4
    assert prefixes in {tensor.nbytes for segment in trace.segments for tensor in segment.tensors}


def test_it_trains_in_the_least_that_is_not_refused() -> None:
    with pytest.raises(DoesNotFit) as refused:
        assert_same_training(CASE, torch.float32, device_memory="4KiB", device="cpu")
    needed = refused.value.needed
    model = assert_same_training(CASE, torch.float32, device_memory=needed, device="cpu")
    peak = forebay.report(model).timeline.peaks[Tier.DEVICE]
    assert 0.9 * needed < peak <= needed
    forebay.close(model)


def test_lengths_that_nobody_knows_are_told() -> None:
    with pytest.raises(CaptureFailed, match="_ctc_loss"):
        capture(Speech(guessed=True), utterances(0))
