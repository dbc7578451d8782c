"""How architectures of transformers are made tiny and trained beside plain PyTorch."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from benchmarks.case import BenchmarkError
from benchmarks.families import run
from benchmarks.families.batches import CLIPS, DETECTION, IMAGES, SEGMENTATION, SPEECH
from benchmarks.families.record import Trained, Verdict
from benchmarks.families.run import chosen, compare

CAUSAL = "causal language modelling"


def asked(task: str, name: str) -> Trained:
    said: list[str] = []
    (one,) = compare(chosen([task], [name])[task], "scripts/bench families", said.append).trained
    assert said == [run.in_words(one)]
    return one


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("task", "name"),
    [
        (CAUSAL, "gemma2"),
        ("sequence to sequence", "bart"),
        (IMAGES, "vit"),
        (DETECTION, "detr"),
        (SPEECH, "wav2vec2-bert"),
        (SEGMENTATION, "upernet"),
        (CLIPS, "vivit"),
    ],
)
def test_an_architecture_has_the_bits_of_plain_pytorch(task: str, name: str) -> None:
    one = asked(task, name)
    assert (one.verdict, one.why) == (Verdict.SAME, "")
    # Parameters, gradients and two moments in fp32 are 16 bytes each: plain PyTorch cannot have run in so little.
    assert 0 < one.least < 16 * one.parameters


def test_other_bits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter((1e-3, 1e-3, 2e-3))  # plain PyTorch's, that of the refusal, that of the run

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=next(rates), fused=True)

    monkeypatch.setattr(run, "_adamw", adamw)
    assert asked(CAUSAL, "gpt2").verdict is Verdict.OTHER


def test_what_forebay_refuses_is_told_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "HOST", "16KiB")
    one = asked(CAUSAL, "gpt2")
    assert one.verdict is Verdict.REFUSED and one.why.startswith("DoesNotFit: host memory: ") and one.least


def test_what_plain_pytorch_does_not_train_is_not_tried() -> None:
    one = asked(CAUSAL, "emu3")
    assert one.verdict is Verdict.NOT_TRIED and one.why.startswith("AttributeError: ") and not one.least


def test_names_that_there_are_none_of() -> None:
    with pytest.raises(BenchmarkError, match="called lama"):
        chosen([CAUSAL], ["lama"])


def test_a_name_need_not_be_in_all_tasks() -> None:
    found = chosen([CAUSAL, IMAGES], ["llama", "gpt2"])
    assert {task: [family.name for family in of] for task, of in found.items()} == {CAUSAL: ["gpt2", "llama"]}


def test_the_loudness_of_transformers_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "trained", lambda family: 1 / 0)
    before = transformers.logging.get_verbosity()
    with pytest.raises(ZeroDivisionError):
        compare(chosen([CAUSAL], ["gpt2"])[CAUSAL], "", print)
    assert transformers.logging.get_verbosity() == before
