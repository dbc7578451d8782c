"""The Trainer of transformers with a memory plan: the losses, weights and evaluations of the Trainer without one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import forebay
from forebay.device.base import NoWatch
from forebay.errors import ConfigError, DoesNotFit, ModelError
from forebay.integrations.transformers import FOLDER, ForebayMixin, ForebayTrainer, Memory
from forebay.memory import Tier
from forebay.optim import AdamW
from forebay.plans import used_up
from forebay.reporting.run import RunReport

BUDGET = "1280KiB"
"""Of device memory: parameters, gradients and states of the model take 2.4 MiB."""

STREAMED = Memory(BUDGET, policy="stream-recompute")
"""What is asked for where it does not matter which plan there is: of a policy that searches for nothing."""


def model() -> LlamaForCausalLM:
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=64, attention_dropout=0.1, **shape))


def data(rows: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 256, (rows, 32), generator=generator)]


class Noting(Trainer):
    """Keeps the loss of every micro-batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


class Planned(ForebayMixin, Noting):
    pass


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    usual = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "save_steps": 2,
        "learning_rate": 1e-3,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return TrainingArguments(output_dir=str(folder), **{**usual, **more})


def trainer(folder: Path, memory: Memory | None, **more: Any) -> Noting:
    given = {"args": arguments(folder, **more), "train_dataset": data(), "eval_dataset": data(4)}
    if memory is None:
        return Noting(model=model(), **given)
    return Planned(model=model(), memory=memory, **given)


@pytest.fixture
def opened() -> Iterator[list[Noting]]:
    """Trainers whose models are closed at the end."""
    made: list[Noting] = []
    yield made
    for one in made:
        forebay.close(one.model)


def weights(of: Noting) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in of.model.state_dict().items()}


def seen(of: Noting) -> list[Mapping[str, float]]:
    """What the Trainer logged, without times."""
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "step")
    return [{name: entry[name] for name in kept if name in entry} for entry in of.state.log_history]


def expect_same(own: Noting, theirs: Noting, record: RunReport) -> None:
    assert own.losses == theirs.losses
    # Of the last entry, a summary of the run, only its step is left.
    assert seen(own) == seen(theirs)
    expected = weights(theirs)
    assert weights(own).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in weights(own).items())
    # It did stream: the whole would not have fitted.
    assert record.measured_peaks()[Tier.DEVICE] <= 1280 << 10
    assert any(not placement.resident for placement in record.plan.placements)


class Pair(NamedTuple):
    """A run with a plan and one without, each evaluated before it is trained: what they found then, and where they
    saved."""

    own: Noting
    theirs: Noting
    record: RunReport
    evaluated: tuple[float, ...]
    folder: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    # One after the other: a trainer sets the seed when it is made, and dropout draws from there.
    own = trainer(folder / "own", Memory(BUDGET))
    evaluated = own.evaluate()["eval_loss"]
    own.train()
    record = forebay.report(own.model)
    forebay.close(own.model)
    theirs = trainer(folder / "theirs", None)
    found = evaluated, theirs.evaluate()["eval_loss"]
    theirs.train()
    return Pair(own, theirs, record, found, folder)


def test_it_evaluates_and_trains_as_the_trainer_does(pair: Pair) -> None:
    assert pair.evaluated[0] == pair.evaluated[1]
    expect_same(pair.own, pair.theirs, pair.record)


def test_an_optimizer_of_forebays(tmp_path: Path, opened: list[Noting]) -> None:
    """In plain PyTorch, too, it is what is given."""
    given = AdamW, {"lr": 1e-3, "moments": "8bit", "stochastic_rounding": True}
    own, theirs = (
        kind(
            model=model().bfloat16(),
            args=arguments(tmp_path / kind.__name__),
            train_dataset=data(),
            eval_dataset=data(4),
            optimizer_cls_and_kwargs=given,
            **memory,
        )
        for kind, memory in ((Planned, {"memory": Memory("900KiB")}), (Noting, {}))
    )
    opened.append(own)
    for one in (own, theirs):
        transformers.set_seed(5)
        one.train()
    assert own.losses == theirs.losses
    assert len(forebay.report(own.model).plan.changes_numbers) == 2


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    "more",
    [{"bf16": True}, {"label_smoothing_factor": 0.1, "gradient_checkpointing": True}, {"optim": "adafactor"}],
    ids=["bf16", "smoothed", "adafactor"],
)
def test_it_trains_as_the_trainer_does(tmp_path: Path, opened: list[Noting], more: dict[str, Any]) -> None:
    own = trainer(tmp_path / "own", Memory(BUDGET), **more)
    opened.append(own)
    own.train()
    theirs = trainer(tmp_path / "theirs", None, **more)
    theirs.train()
    expect_same(own, theirs, forebay.report(own.model))


def test_what_it_saves_is_loaded_and_resumed(pair: Pair, tmp_path: Path, opened: list[Noting]) -> None:
    straight, run = pair.own, pair.folder / "own"
    last = run / "checkpoint-4"
    assert not (last / "optimizer.pt").exists() and (last / FOLDER).is_dir()
    loaded = LlamaForCausalLM.from_pretrained(last).state_dict()
    expected = weights(straight)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())
    again = trainer(tmp_path / "run", replace(STREAMED, device_memory="2MiB"))
    opened.append(again)
    again.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert again.losses == straight.losses[4:]
    assert all(torch.equal(value, expected[name]) for name, value in weights(again).items())


def test_the_example_draws_no_random_numbers(tmp_path: Path, opened: list[Noting]) -> None:
    own = trainer(tmp_path / "own", STREAMED)
    opened.append(own)
    torch.manual_seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    own.create_optimizer()
    assert random.getstate() == before[0] and np.random.get_state()[1].tolist() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


class Unread(Dataset[Any]):
    """Data that may not be looked at yet."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> Any:
        raise AssertionError(f"row {row} was read")


def test_a_given_example_leaves_the_data_alone(tmp_path: Path, opened: list[Noting]) -> None:
    """Only where nobody gives one is a batch of them read."""
    ids = torch.stack([row["input_ids"] for row in data(4)])
    example = {"input_ids": ids, "labels": ids}
    given = {"model": model(), "args": arguments(tmp_path), "train_dataset": Unread(), "eval_dataset": data(4)}
    own = Planned(memory=replace(STREAMED, example=example), **given)
    opened.append(own)
    own.create_optimizer()
    assert forebay.report(own.model).plan.fingerprint
    with pytest.raises(AssertionError, match="was read"):
        Planned(memory=STREAMED, **given | {"model": model()}).create_optimizer()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"fp16": True}, "fp16, which forebay does not serve: use bf16"),
        ({"bf16_full_eval": True}, "bf16_full_eval, which forebay does not serve: use bf16"),
        ({"fp16_full_eval": True}, "fp16_full_eval, which forebay does not serve: use bf16"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size, which forebay does not serve: the plan says"),
    ],
)
def test_arguments_that_are_not_served_are_refused_at_once(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trainer(tmp_path, STREAMED, **more)


def test_a_step_of_one_backward_is_trained_as_one(tmp_path: Path, opened: list[Noting]) -> None:
    with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=2 beside Memory\(accumulates=False\)"):
        trainer(tmp_path, replace(STREAMED, accumulates=False))
    own = trainer(tmp_path / "own", STREAMED, gradient_accumulation_steps=1)
    opened.append(own)
    own.train()
    theirs = trainer(tmp_path / "theirs", None, gradient_accumulation_steps=1)
    theirs.train()
    expect_same(own, theirs, forebay.report(own.model))
    assert not forebay.report(own.model).plan.accumulates


@pytest.mark.thinned(2)
@pytest.mark.parametrize("budget", [BUDGET, "64MiB"], ids=["streamed", "stays"])
def test_gradients_used_up_in_backward(tmp_path: Path, opened: list[Noting], budget: str) -> None:
    """Where the Trainer clips nothing and takes one backward a step; on the device too."""
    early, usual = Memory(budget, update="backward"), {"gradient_accumulation_steps": 1, "max_grad_norm": 0}
    for more, words in (
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"max_grad_norm": 1.0}, "max_grad_norm=1.0"),
    ):
        with pytest.raises(ConfigError, match=rf"{words} beside Memory\(update='backward'\), which forebay does not"):
            trainer(tmp_path, early, **{**usual, **more})
    own = trainer(tmp_path / "own", early, **usual)
    opened.append(own)
    own.train()
    theirs = trainer(tmp_path / "theirs", None, **usual)
    theirs.train()
    plan = forebay.report(own.model).plan
    assert bool(used_up(plan.placements, resident=True)) and own.losses == theirs.losses
    assert bool(used_up(plan.placements, resident=False)) is (budget == BUDGET)
    # Nobody can ask for their norm, and the Trainer's logs have none.
    assert seen(own) == [{name: x for name, x in entry.items() if name != "grad_norm"} for entry in seen(theirs)]
    assert all(torch.equal(value, weights(theirs)[name]) for name, value in weights(own).items())


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("said", "passes", "accumulates"), [(None, 1, False), (False, 1, False), (True, 1, True), (None, 2, True)]
)
def test_what_a_plan_is_for_is_what_is_said_or_what_the_trainer_does(
    tmp_path: Path, opened: list[Noting], said: bool | None, passes: int, accumulates: bool
) -> None:
    own = trainer(tmp_path, replace(STREAMED, accumulates=said), gradient_accumulation_steps=passes)
    opened.append(own)
    own.create_optimizer()
    assert forebay.report(own.model).plan.accumulates is accumulates


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def is_compiled(of: Noting) -> list[bool]:
    """Of the model as a whole, and of each of its blocks."""
    return [module._compiled_call_impl is not None for module in (of.model, *of.model.model.layers)]


@pytest.mark.usefixtures("fresh_compiler")
def test_torch_compile_is_applied_to_each_block(tmp_path: Path, opened: list[Noting]) -> None:
    short = {"max_steps": 2, "eval_strategy": "no"}
    own = trainer(tmp_path / "own", STREAMED, torch_compile=True, torch_compile_backend="eager", **short)
    opened.append(own)
    own.train()
    assert is_compiled(own) == [False, True, True, True]
    assert forebay.report(own.model).plan.compiled == tuple(f"model.layers.{layer}" for layer in range(3))
    assert own.accelerator.unwrap_model(own.model_wrapped, keep_torch_compile=True) is own.model
    theirs = trainer(tmp_path / "theirs", None, **short)
    theirs.train()
    assert own.losses == theirs.losses and seen(own) == seen(theirs)
    forebay.close(own.model)
    assert is_compiled(own) == [False] * 4


@pytest.mark.usefixtures("fresh_compiler")
def test_a_model_that_is_refused_is_not_compiled(tmp_path: Path) -> None:
    small = trainer(tmp_path, Memory("64KiB"), torch_compile=True, torch_compile_backend="eager")
    with pytest.raises(DoesNotFit):
        small.train()
    assert is_compiled(small) == [False] * 4


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_blocks_run_where_no_op_is_looked_at(
    tmp_path: Path, opened: list[Noting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.opening.StorageLedger", lambda *_, **__: NoWatch())  # as on cuda
    counters = torch._dynamo.utils.counters
    counters.clear()
    memory = Memory("4MiB", policy="stream")
    own = trainer(tmp_path / "own", memory, torch_compile=True, torch_compile_backend="eager")
    opened.append(own)
    own.train()
    assert counters["stats"]["unique_graphs"] >= 1
    theirs = trainer(tmp_path / "theirs", None)
    theirs.train()
    assert own.losses == theirs.losses and seen(own) == seen(theirs)


def test_too_small_a_budget_is_refused_before_the_first_step(tmp_path: Path) -> None:
    small = trainer(tmp_path, Memory("64KiB"))
    with pytest.raises(DoesNotFit, match="device"):
        small.train()
    assert small.losses == []


def test_a_checkpoint_of_another_trainer_is_refused(pair: Pair, tmp_path: Path, opened: list[Noting]) -> None:
    own = trainer(tmp_path, STREAMED)
    opened.append(own)
    with pytest.raises(ConfigError, match="holds no optimizer states of forebay"):
        own.train(resume_from_checkpoint=str(pair.folder / "theirs" / "checkpoint-2"))


def test_without_data_an_example_is_asked_for(tmp_path: Path) -> None:
    alone = ForebayTrainer(model=model(), args=arguments(tmp_path), memory=STREAMED, eval_dataset=data(4))
    with pytest.raises(ConfigError, match="give Memory an example"):
        alone.evaluate()
    with pytest.raises(ModelError, match="train or evaluate first"):
        alone._save_optimizer_and_scheduler(str(tmp_path))
