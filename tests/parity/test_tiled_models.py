"""What a model in tiles is to everybody else: the model that it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import forebay
from forebay.errors import ConfigError, ModelError, OptimizerError, UsageError
from forebay.memory import Tier
from forebay.runtime.tiles import TiledLinear
from forebay.units import parse_bytes
from tests.parity.compare import adamw, assert_same_training
from tests.parity.models import Case
from tests.parity.tiling import Bigram, bigram_batch, language_batch, language_model

SIZE = "260KiB"
BUDGET: dict[str, Any] = {"device_memory": "64MiB", "device": "cpu", "policy": "stream"}


def prepared(model: nn.Module, batch: Any = None, **changed: Any) -> Any:
    return forebay.prepare(model, adamw(list(model.parameters())), batch, **{**BUDGET, **changed})


def pair(tied: bool = False) -> tuple[Any, Any]:
    """The model in tiles, and as it is."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(language_model(tied))
    assert forebay.tile(models[0], SIZE) == ("model.embed_tokens", "lm_head")
    return models[0], models[1]


@pytest.mark.parametrize("tied", [False, True])
def test_its_state_dict_is_that_of_the_model(tied: bool) -> None:
    model, plain = pair(tied)
    expected = plain.state_dict()

    def expect() -> None:
        state = model.state_dict()
        assert set(state) == set(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())

    expect()
    model, _ = prepared(model, language_batch(0))
    expect()
    assert all(torch.equal(value, expected[n]) for n, value in forebay.parameters(model).items())
    assert set(forebay.parameters(model)) == {name for name, _ in plain.named_parameters()}
    expected = {name: value + 1 for name, value in expected.items()}
    model.load_state_dict(expected)
    expect()
    with pytest.raises(RuntimeError, match="lm_head"):
        model.load_state_dict({**expected, "lm_head.weight": torch.zeros(3, 3)})
    forebay.close(model)
    expect()
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.state_dict()["lm_head.weight"], plain.lm_head.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_it_is_exported_and_loaded_as_the_model(tied: bool, tmp_path: Path) -> None:
    model, plain = pair(tied)
    model, optimizer = prepared(model, language_batch(0))
    forebay.export(model, tmp_path / "hub")
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hub")
    assert all(torch.equal(found.state_dict()[n], value) for n, value in plain.state_dict().items())
    (archive,) = forebay.export(model, tmp_path / "state", layout="torch")
    plain.load_state_dict(torch.load(archive, weights_only=True))
    with pytest.raises(ModelError, match="in tiles"):
        forebay.export(model, tmp_path / "dcp", layout="dcp", optimizer=optimizer)
    forebay.close(model)
    other, _ = pair(tied)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other, _ = prepared(other)
    forebay.load(other, str(tmp_path / "hub"))
    assert all(torch.equal(value, plain.state_dict()[n]) for n, value in forebay.parameters(other).items())
    forebay.close(other)


def test_its_random_weights_are_those_of_the_model() -> None:
    made = []
    for most in (None, SIZE):
        with accelerate.init_empty_weights():
            model = language_model()
        if most is not None:
            forebay.tile(model, most)
        model, _ = prepared(model)
        forebay.initialize(model, seed=3)
        made.append({name: value.clone() for name, value in forebay.parameters(model).items()})
        forebay.close(model)
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(value, made[1][name]) for name, value in made[0].items())


def test_a_run_in_tiles_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    def steps(model: Any, optimizer: Any, first: int) -> dict[str, torch.Tensor]:
        for step in range(first, first + 2):
            model(**bigram_batch(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(forebay.parameters(model))

    def run(most: str) -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Bigram()
        forebay.tile(model, most)
        model, optimizer = prepared(model, bigram_batch(0))
        return model, optimizer

    model, optimizer = run("512KiB")
    steps(model, optimizer, 0)
    forebay.save(model, optimizer, tmp_path, step=2)
    expected = steps(model, optimizer, 2)
    forebay.close(model)
    model, optimizer = run("512KiB")
    assert forebay.resume(model, optimizer, tmp_path).step == 2
    assert all(torch.equal(value, expected[n]) for n, value in steps(model, optimizer, 2).items())
    forebay.close(model)
    model, optimizer = run("1MiB")
    with pytest.raises(UsageError):
        forebay.resume(model, optimizer, tmp_path)
    forebay.close(model)


def test_micro_batches_together_are_those_of_the_loop_within_the_promise() -> None:
    found = []
    for together in (False, True):
        torch.manual_seed(0)
        model = language_model()
        forebay.tile(model, SIZE)
        model, _ = prepared(model, language_batch(0), micro_batches=3 if together else 1)
        batches = [language_batch(step) for step in range(3)]
        if together:
            forebay.accumulate(model, batches, lambda m, b: m(**b).loss)
            made = forebay.report(model)
            assert made.measured_peaks()[Tier.DEVICE] <= made.plan.peaks(3)[Tier.DEVICE]
        else:
            for batch in batches:
                model(**batch).loss.backward()
        found.append(dict(forebay.gradients(model)))
        forebay.close(model)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_updates_in_backward_of_tiles() -> None:
    found = []
    for update in ("step", "backward"):
        torch.manual_seed(0)
        model = Bigram()
        forebay.tile(model, "512KiB")
        model, optimizer = prepared(model, bigram_batch(0), update=update)
        for step in range(2):
            model(**bigram_batch(step))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(dict(forebay.parameters(model)))
        forebay.close(model)
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


class Shared(nn.Module):
    """A layer of its own kind with the weight of an embedding."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


def hooked() -> nn.Module:
    model = Bigram()
    model.head.register_forward_hook(lambda *given: None)
    return model


def scaled() -> nn.Module:
    model = Bigram()
    model.embed.scale_grad_by_freq = True
    return model


def shared() -> nn.Module:
    model = Bigram()
    model.other = Shared(model.embed.weight)
    return model


@pytest.mark.parametrize(
    ("make", "most", "kind", "words"),
    [
        (hooked, "512KiB", ModelError, "head has hooks"),
        (scaled, "512KiB", ModelError, "embed has max_norm, scale_grad_by_freq or sparse"),
        (shared, "512KiB", ModelError, "other is a Shared and has a weight that is tied"),
        (lambda: nn.Linear(600, 600), "512KiB", ModelError, "put it into a module"),
        (Bigram, "100KiB", ConfigError, r"head cannot be cut to 100\.0 KiB: 512\.0 KiB is the least"),
        (Bigram, "0", ConfigError, "must have a size"),
        (Bigram, "lots", UsageError, "lots"),
    ],
)
def test_what_cannot_be_cut_stays_as_it_was(make: Any, most: str, kind: type[Exception], words: str) -> None:
    model = make()
    before = dict(model.named_parameters())
    with pytest.raises(kind, match=words):
        forebay.tile(model, most)
    assert {n: id(p) for n, p in model.named_parameters()} == {n: id(p) for n, p in before.items()}


def test_a_model_is_cut_before_anything_else() -> None:
    model = Bigram()
    optimizer = adamw(list(model.parameters()))
    assert forebay.tile(model, "16MiB") == ()
    assert forebay.tile(model, "512KiB") == ("embed", "head")
    assert forebay.tile(model, "512KiB") == () and isinstance(model.head, TiledLinear)
    with pytest.raises(OptimizerError, match="make it from this model"):
        forebay.prepare(model, optimizer, **BUDGET)
    model, _ = prepared(model)
    with pytest.raises(ModelError, match="is prepared; cut it into tiles before"):
        forebay.tile(model, "512KiB")
    forebay.close(model)


def long(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 1024, (2, 40), generator=torch.Generator().manual_seed(step))
    labels = ids.clone()
    labels[:, : 3 + step] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize(("dtype", "tied"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_the_loss_in_pieces_from_tiles(dtype: torch.dtype, tied: bool) -> None:
    """Of 80 tokens and 1,024 words a piece is as large as a panel: some 60 tokens in fp32, half of them in bf16."""
    case = Case(lambda: language_model(tied, vocab_size=1024), long)
    size = {torch.float32: "256KiB", torch.bfloat16: "128KiB"}[dtype]
    model = assert_same_training(
        case, dtype, tile=size, clip=None, steps=2, **{**BUDGET, "device_memory": "8MiB"}, loss="chunked"
    )
    plan = forebay.report(model).plan
    forebay.close(model)
    assert plan.loss_piece == parse_bytes(size) and not plan.changes_numbers


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from forebay.cli.main import app

    config = tmp_path / "config.json"
    language_model(vocab_size=1024).config.to_json_file(config)
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)

    def asked(*given: str, code: int = 0) -> Any:
        with pytest.raises(SystemExit) as stopped:
            app([*given, "--json"])
        assert stopped.value.code == code
        return json.loads(capsys.readouterr().out)

    common = ["--seq", "16", "--device-memory", "8MiB"]
    plan = asked("plan", str(config), *common, "--tile", SIZE)
    assert plan["fits"] and plan["exact"]
    assert any("lm_head" in words and "tiles" in words for words in plan["reasons"])
    run = ["train", "--model", str(config), "--data", str(text), *common, "--steps", "3", "--run"]
    whole = asked(*run, str(tmp_path / "whole"))
    tiles = asked(*run, str(tmp_path / "tiles"), "--tile", SIZE)
    assert tiles["loss"] == whole["loss"]
    found, expected = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("tiles", "whole")
    )
    assert all(torch.equal(found[name], value) for name, value in expected.items())
