"""What the integrations have in common: imports stay lazy, a library that is missing is named with its install line."""

from __future__ import annotations

import importlib
import inspect
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset

import forebay
from forebay import api
from forebay.errors import ConfigError, MissingLibrary, ModelError
from forebay.integrations.common import Memory, as_drawn_before, expect_restarts, figures, in_words, resume_in

MISSING = {
    "transformers": ("transformers", "transformers"),
    "accelerate": ("accelerate", "transformers"),
    "lightning": ("lightning.pytorch", "lightning"),
    "peft": ("peft", "peft"),
    "trl": ("trl.trainer.sft_trainer", "trl"),
    "bitsandbytes": ("bitsandbytes.nn.modules", "qlora"),
}
"""Module of forebay, what it cannot import, the extra that brings it."""


@pytest.mark.parametrize("name", MISSING)
def test_a_library_that_is_missing_is_named_with_its_install_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library, extra = MISSING[name]
    if name == "trl":
        pytest.importorskip("transformers")
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"forebay.integrations.{name}", raising=False)
    with pytest.raises(MissingLibrary, match=rf"pip install 'forebay\[{extra}\]'") as refused:
        importlib.import_module(f"forebay.integrations.{name}")
    assert isinstance(refused.value, ImportError) and library.split(".")[0] in str(refused.value)


def test_forebay_imports_none_of_them() -> None:
    libraries = "{'accelerate', 'bitsandbytes', 'datasets', 'lightning', 'peft', 'torch', 'transformers', 'trl'}"
    program = f"import sys, forebay, forebay.integrations; print(sorted({libraries} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_an_example_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(list(range(8)), batch_size=2, shuffle=True, generator=generator)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state(), generator.get_state()
    with as_drawn_before(loader, None):
        next(iter(loader))
        drawn = random.random(), np.random.rand(), torch.rand(1)
    assert all(drawn) and random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2]) and torch.equal(generator.get_state(), before[3])


def drawn(rng: Any) -> float:
    return torch.rand(1, generator=rng).item() if isinstance(rng, torch.Generator) else float(rng.uniform(0, 1))


class Augmented(Dataset[float]):
    """Draws from a generator of its own, and from one that it makes when the first row is asked for."""

    def __init__(self, rng: Any) -> None:
        self.transforms = [{"rng": rng}]
        self.late: np.random.Generator | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> float:
        if self.late is None:
            self.late = np.random.default_rng(1)
        return drawn(self.late) + drawn(self.transforms[0]["rng"])


GENERATORS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "numpy": lambda: np.random.default_rng(1),
    "numpy, before": lambda: np.random.RandomState(1),
    "python": lambda: random.Random(1),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_an_example_draws_nothing_from_generators_that_its_data_holds(kind: str) -> None:
    """In a dataset within another, and of a function that collates one that is bound to it and one around it."""
    make = GENERATORS[kind]
    around = make()

    def noisy(bound: Any, some: list[float]) -> list[float]:
        return [*some, drawn(bound), drawn(around)]

    data = ConcatDataset([Augmented(make()), [0.0] * 1000])
    loader = DataLoader(data, batch_size=2, collate_fn=partial(noisy, make()))
    with as_drawn_before(loader):
        first = next(iter(loader))
        assert next(iter(loader)) != first
    assert next(iter(loader)) == first


@pytest.mark.parametrize("again", [False, True])
def test_data_that_begins_only_once_is_no_example(again: bool) -> None:
    class Stream(IterableDataset[int]):
        def __init__(self) -> None:
            self.rows = iter(range(8))

        def __iter__(self) -> Iterator[int]:
            return iter(range(8)) if again else self.rows

    for data in (DataLoader(Stream()), range(8) if again else iter(range(8))):
        if again:
            expect_restarts(data)
        else:
            with pytest.raises(ConfigError, match=r"begins only once, .* give Memory an example"):
                expect_restarts(data)
    expect_restarts(DataLoader(list(range(8))))


def test_figures_and_words_of_a_run() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(forebay.errors.UsageError, match="not prepared"):
        figures(model)
    forebay.prepare(model, optimizer, device_memory="1MiB", policy="stream")
    plan = forebay.report(model).plan
    assert "forebay (stream): device" in in_words(plan)
    # Without a batch nobody knows the activations: that is said.
    assert any("activations are not known" in line for line in plan.reasons)
    before = figures(model)
    assert before["forebay_predicted_device_bytes"] == plan.device and "forebay_step_seconds" not in before
    forebay.close(model)


@pytest.mark.parametrize("wrong", [{"device_memory": "1 gig"}, {"loss": "chunk"}, {"disk": "/d:5XB"}])
def test_memory_that_cannot_be_asked_for_is_refused_at_once(wrong: dict[str, str]) -> None:
    with pytest.raises(forebay.errors.UsageError):
        Memory(**{"device_memory": "1GiB", **wrong})  # type: ignore[arg-type]


def test_what_memory_asks_for_is_what_prepare_is_asked_for() -> None:
    own = {field.name: field.default for field in fields(Memory) if field.name != "example"}
    assert own.keys() <= inspect.signature(forebay.prepare).parameters.keys()
    assert own.pop("device_memory") is MISSING_DEFAULT and set(own.values()) == {None}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given: list[dict[str, object]] = []
    memory = Memory(
        *("1MiB", "2GiB", "/d", "stream", "plain", 8, ("0",)),
        checksums=True,
        accumulates=False,
        update="backward",
        device_reserve="1KiB",
        loss_fn=lambda model, batch: model(batch).sum(),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "prepare", lambda model, optimizer, batch, **more: (given.append(more), optimizer))
        assert memory.prepare(model, optimizer, None) is optimizer
        Memory("1MiB").prepare(model, optimizer, None)
    said = {name: value for name, value in vars(memory).items() if name != "example"}
    # What nobody has said is left to prepare.
    assert given == [said | {"device": None}, {"device_memory": "1MiB", "device": None}]


def test_when_updates_may_be_made_is_one_of_two() -> None:
    with pytest.raises(ConfigError, match=r"Memory\(update=\) is step or backward, not 'later'"):
        Memory("1MiB", update="later")  # type: ignore[arg-type]


def test_a_folder_that_nobody_saved_in_is_refused(tmp_path: object) -> None:
    from pathlib import Path

    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="holds no optimizer states of forebay"):
        resume_in(Path(str(tmp_path)) / "forebay", model, torch.optim.SGD(model.parameters()))


def test_parameters_that_are_several_tensors_in_one_are_refused() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(TwoTensor(torch.zeros(4, 4), torch.zeros(4, 4)), requires_grad=False)
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(ModelError, match="weight is a TwoTensor, which is several tensors in one"):
        forebay.prepare(model, torch.optim.SGD([model.extra], lr=0.1), torch.zeros(1, 4), device_memory="1MiB")
