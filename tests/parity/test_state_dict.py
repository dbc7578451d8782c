"""What is saved and loaded has plain PyTorch's names, shapes and dtypes, wherever the bytes live."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import forebay
from tests.parity.models import CASES, Case
from tests.parity.test_streaming import everything_on_disk

AMPLE = "64MiB"

Make = Callable[..., torch.optim.Optimizer]
MAKES: dict[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}
CASE = CASES["used-twice"]
TIED = CASES["llama-tied"]


@pytest.fixture(params=["auto", "stream", "disk"])
def way(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where parameters and states live: on the device, on the host, on disk."""
    return str(request.param)


@pytest.fixture
def prepare(way: str, tmp_path: Path) -> Iterator[Callable[..., tuple[nn.Module, torch.optim.Optimizer]]]:
    """Prepares a model in that way, and closes it in the end."""
    prepared: list[nn.Module] = []

    def prepare(model: nn.Module, make: Make = MAKES["adamw"]) -> tuple[nn.Module, torch.optim.Optimizer]:
        options: dict[str, Any] = {"policy": way}
        if way == "disk":
            disk = f"{tmp_path}:64MiB"
            options = {"plan": everything_on_disk(model, disk), "disk": disk}
        model, optimizer = forebay.prepare(
            model, make(model.parameters()), device_memory=AMPLE, device="cpu", **options
        )
        prepared.append(model)
        return model, optimizer

    yield prepare
    for model in prepared:
        forebay.close(model)


Prepare = Callable[..., tuple[nn.Module, torch.optim.Optimizer]]


def train(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
    losses = []
    dtype = next(model.parameters()).dtype
    for step in steps:
        loss = model(**case.inputs(step, dtype))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def saved_and_read(state: Any) -> tuple[Any, int]:
    """``state`` through ``torch.save``, and the bytes that took."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True), file.getbuffer().nbytes


def assert_same_state(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert list(left) == list(right)
    for name, tensor in right.items():
        assert left[name].dtype == tensor.dtype and left[name].shape == tensor.shape
        assert torch.equal(left[name], tensor), name


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [CASE, TIED], ids=["used-twice", "tied"])
def test_model_state_has_plain_names_and_values(prepare: Prepare, case: Case, dtype: torch.dtype) -> None:
    expected = case.model(dtype).state_dict()
    model, optimizer = prepare(case.model(dtype))
    state = model.state_dict()
    assert_same_state(state, expected)
    train(case, model, optimizer, range(2))
    state = model.state_dict()
    values = forebay.parameters(model)
    for name, tensor in state.items():
        owner = "model.embed_tokens.weight" if name == "lm_head.weight" and case is TIED else name
        if owner in values:
            assert torch.equal(tensor, values[owner].to(dtype))
    assert any(not torch.equal(state[n], expected[n]) for n in state)


@pytest.mark.parametrize("case", [CASE, TIED], ids=["used-twice", "tied"])
def test_model_state_to_plain_and_back(prepare: Prepare, case: Case) -> None:
    model, optimizer = prepare(case.model(torch.float32))
    train(case, model, optimizer, range(2))
    state, nbytes = saved_and_read(model.state_dict())
    plain = case.model(torch.float32)
    _, plain_nbytes = saved_and_read(plain.state_dict())
    # Views of one large buffer would each be saved with all of it, tied ones twice.
    assert nbytes < 1.1 * plain_nbytes
    plain.load_state_dict(state)
    batch = case.inputs(9, torch.float32)
    with torch.no_grad():
        assert torch.equal(model(**batch)["loss"], plain(**batch)["loss"])
        for parameter in plain.parameters():
            parameter.add_(0.01)
        assert not torch.equal(model(**batch)["loss"], plain(**batch)["loss"])
        assert not model.load_state_dict(plain.state_dict()).missing_keys
        assert torch.equal(model(**batch)["loss"], plain(**batch)["loss"])
    assert_same_state(model.state_dict(), plain.state_dict())


def test_submodule_state(prepare: Prepare) -> None:
    model, optimizer = prepare(CASE.model(torch.float32))
    train(CASE, model, optimizer, range(1))
    layers = model.get_submodule("body.layers")
    state, nbytes = saved_and_read(layers.state_dict())
    assert_same_state(state, {k[12:]: v for k, v in model.state_dict().items() if k.startswith("body.layers.")})
    assert nbytes < 4 * sum(t.numel() for t in state.values()) + 4096, "only its own bytes"
    layers.load_state_dict({k: torch.full_like(v, 0.25) for k, v in state.items()})
    after = model.state_dict()
    assert all((t == 0.25).all() == n.startswith("body.layers.") for n, t in after.items())


def test_state_is_a_moment(prepare: Prepare) -> None:
    """A clone of what was read stays what it is while training goes on."""
    model, optimizer = prepare(CASE.model(torch.float32))
    train(CASE, model, optimizer, range(1))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    train(CASE, model, optimizer, range(1, 3))
    model.load_state_dict(before)
    assert_same_state(model.state_dict(), before)


def spoil(state: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    if how == "missing":
        del state["body.layers.1.weight"]
    elif how == "unexpected":
        state["body.layers.7.weight"] = torch.zeros(3)
    else:
        state["body.layers.1.weight"] = torch.zeros(3, 3)
    return state


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("missing", r'Missing key\(s\).*"body.layers.1.weight"'),
        ("unexpected", r'Unexpected key\(s\).*"body.layers.7.weight"'),
        ("shape", r"size mismatch for body.layers.1.weight"),
    ],
)
def test_loading_is_strict_as_in_torch(prepare: Prepare, how: str, match: str) -> None:
    """torch's own error; and as in torch, what could be loaded is, and the rest stays as it was."""
    model, _ = prepare(CASE.model(torch.float32))
    plain = CASE.model(torch.float32)
    spoiled = spoil(plain.state_dict(), how)
    for subject in (plain, model):
        with pytest.raises(RuntimeError, match=match):
            subject.load_state_dict(spoiled)
    assert_same_state(model.state_dict(), plain.state_dict())
    if how == "missing":
        result = model.load_state_dict(spoiled, strict=False)
        assert result.missing_keys == ["body.layers.1.weight"] and result.unexpected_keys == []


def test_loading_with_assign_is_refused(prepare: Prepare) -> None:
    model, optimizer = prepare(CASE.model(torch.float32))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(forebay.ForebayError, match="assign=False"):
        model.load_state_dict({n: torch.zeros_like(t) for n, t in before.items()}, assign=True)
    assert_same_state(model.state_dict(), before)
    train(CASE, model, optimizer, range(1))


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_save_pretrained(prepare: Prepare, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    model, optimizer = prepare(case.model(dtype))
    train(case, model, optimizer, range(1))
    folder = tmp_path / "saved"
    model.save_pretrained(folder)
    again = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)
    assert_same_state(again.state_dict(), model.state_dict())
    plain = case.model(dtype)
    plain.save_pretrained(tmp_path / "plain")
    sizes = [(f / "model.safetensors").stat().st_size for f in (folder, tmp_path / "plain")]
    assert abs(sizes[0] - sizes[1]) < 512, "no tensor twice, none left out"


@pytest.mark.parametrize("name", MAKES)
def test_optimizer_state_is_torchs(prepare: Prepare, name: str) -> None:
    """Names, shapes and values are those of the plain optimizer after the same steps."""
    model, optimizer = prepare(CASE.model(torch.float32), MAKES[name])
    reference = CASE.model(torch.float32)
    plain = MAKES[name](reference.parameters())
    for step in range(3):
        losses = [train(CASE, m, o, range(step, step + 1)) for m, o in ((model, optimizer), (reference, plain))]
        assert losses[0] == losses[1]
    ours, theirs = optimizer.state_dict(), plain.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, expected in theirs["state"].items():
        for key, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(ours["state"][index][key], value), (index, key)


@pytest.mark.parametrize("name", MAKES)
def test_optimizer_state_to_plain_and_back(prepare: Prepare, name: str) -> None:
    model, optimizer = prepare(CASE.model(torch.float32), MAKES[name])
    train(CASE, model, optimizer, range(2))
    plain_model = CASE.model(torch.float32)
    plain = MAKES[name](plain_model.parameters())
    plain_model.load_state_dict(model.state_dict())
    state, _ = saved_and_read(optimizer.state_dict())
    plain.load_state_dict(state)
    # Both go on alike...
    assert train(CASE, plain_model, plain, range(2, 4)) == train(CASE, model, optimizer, range(2, 4))
    # ... and what plain PyTorch did alone is taken back.
    train(CASE, plain_model, plain, range(4, 6))
    state, _ = saved_and_read(plain.state_dict())
    model.load_state_dict(plain_model.state_dict())
    optimizer.load_state_dict(state)
    assert train(CASE, plain_model, plain, range(6, 8)) == train(CASE, model, optimizer, range(6, 8))
    assert_same_state(model.state_dict(), plain_model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resuming_continues_bitwise(prepare: Prepare, dtype: torch.dtype) -> None:
    """New objects that are given both states go on as the old ones would have; bf16 masters included."""
    model, optimizer = prepare(CASE.model(dtype))
    train(CASE, model, optimizer, range(3))
    optimizer.param_groups[0]["lr"] = 3e-3
    saved, _ = saved_and_read({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    expected = train(CASE, model, optimizer, range(3, 6))
    masters = {n: t for n, t in forebay.parameters(model).items()}
    torch.manual_seed(1)
    model, optimizer = prepare(CASE.make().to(dtype))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert optimizer.param_groups[0]["lr"] == 3e-3
    assert train(CASE, model, optimizer, range(3, 6)) == expected
    for name, master in masters.items():
        assert torch.equal(forebay.parameters(model)[name], master), name


def test_what_was_loaded_stays_the_callers(prepare: Prepare) -> None:
    """A learning rate that is a tensor is changed in place, which the state that was loaded does not see."""
    model = CASE.model(torch.float32)
    _, optimizer = prepare(model, lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True))
    best = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(best)
    optimizer.param_groups[0]["lr"].fill_(5.0)
    assert best["param_groups"][0]["lr"] == torch.tensor(1e-2)


def test_the_users_hooks_run_around_saving_and_loading(prepare: Prepare) -> None:
    """In torch's order, and what they return takes the place of what there was."""
    reference = CASE.model(torch.float32)
    prepared = prepare(CASE.model(torch.float32))
    said: list[list[str]] = []
    for model, optimizer in ((reference, MAKES["adamw"](reference.parameters())), prepared):
        train(CASE, model, optimizer, range(1))
        calls: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda _, c=calls: c.append("before saving"))  # type: ignore[misc]
        optimizer.register_state_dict_post_hook(lambda _, state: {**state, "mine": 1})

        def unpack(_: torch.optim.Optimizer, state: dict[str, Any], calls: list[str] = calls) -> dict[str, Any]:
            calls.append(f"mine {state.pop('mine')}")
            groups = [{**group, "lr": 0.5} for group in state["param_groups"]]
            return {**state, "param_groups": groups}

        optimizer.register_load_state_dict_pre_hook(unpack)
        optimizer.register_load_state_dict_post_hook(lambda o, c=calls: c.append(f"lr {o.param_groups[0]['lr']}"))  # type: ignore[misc]
        state = optimizer.state_dict()
        optimizer.load_state_dict(state)
        said.append([*calls, *state])
    assert said[0] == said[1] == ["before saving", "mine 1", "lr 0.5", "state", "param_groups", "mine"]


def test_foreign_optimizer_states_are_refused(prepare: Prepare) -> None:
    model, optimizer = prepare(CASE.model(torch.float32))
    train(CASE, model, optimizer, range(1))
    before = optimizer.state_dict()
    other = CASES["unused"].model(torch.float32)
    foreign = torch.optim.AdamW(other.parameters())
    with pytest.raises(forebay.ForebayError, match=r"groups of .* parameters"):
        optimizer.load_state_dict(foreign.state_dict())
    sgd_model = CASE.model(torch.float32)
    sgd = MAKES["sgd-momentum"](sgd_model.parameters())
    train(CASE, sgd_model, sgd, range(1))
    with pytest.raises(forebay.ForebayError, match="has no exp_avg; it is another optimizer's"):
        optimizer.load_state_dict(sgd.state_dict())
    spoiled = optimizer.state_dict()
    spoiled["state"][1]["exp_avg"] = torch.zeros(3)
    with pytest.raises(forebay.ForebayError, match=r"exp_avg of .* has shape \(3,\)"):
        optimizer.load_state_dict(spoiled)
    del spoiled["state"][1]["exp_avg"]
    with pytest.raises(forebay.ForebayError, match="has no exp_avg"):
        optimizer.load_state_dict(spoiled)
    after = optimizer.state_dict()
    for index, state in before["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in state.items())


def test_a_master_of_another_shape_is_refused() -> None:
    """Also where an optimizer keeps no state of its own."""
    model = CASE.model(torch.bfloat16)
    model, optimizer = forebay.prepare(
        model, MAKES["sgd"](model.parameters()), device_memory=AMPLE, policy="stream", device="cpu"
    )
    train(CASE, model, optimizer, range(1))
    spoiled = optimizer.state_dict()
    spoiled["state"][1]["master"] = torch.zeros(3)
    with pytest.raises(forebay.ForebayError, match=r"master of .* has shape \(3,\)"):
        optimizer.load_state_dict(spoiled)
    forebay.close(model)


def test_an_optimizer_without_steps(prepare: Prepare) -> None:
    model, optimizer = prepare(CASE.model(torch.float32))
    fresh = optimizer.state_dict()
    assert fresh["state"] == {}
    first = train(CASE, model, optimizer, range(2))
    assert optimizer.state_dict()["state"]
    optimizer.load_state_dict(fresh)
    model.load_state_dict(CASE.model(torch.float32).state_dict())
    assert train(CASE, model, optimizer, range(2)) == first


@pytest.mark.thinned(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [CASE, TIED], ids=["used-twice", "tied"])
def test_close_gives_back_a_plain_model(prepare: Prepare, case: Case, dtype: torch.dtype) -> None:
    model, optimizer = prepare(case.model(dtype))
    train(case, model, optimizer, range(2))
    model(**case.inputs(2, dtype))["loss"].backward()
    gradients = {n: g.clone() for n, g in forebay.gradients(model).items()}
    state = {n: t.clone() for n, t in model.state_dict().items()}
    forebay.close(model)
    assert_same_state(model.state_dict(), state)
    assert not model._forward_pre_hooks
    for name, parameter in model.named_parameters():
        assert type(parameter) is nn.Parameter and type(parameter.grad) is torch.Tensor
        assert torch.equal(parameter.grad, gradients[name])
    reference = case.model(dtype)
    reference.load_state_dict(state)
    made = [MAKES["adamw"](m.parameters()) for m in (model, reference)]
    model.zero_grad()
    assert train(case, model, made[0], range(3, 6)) == train(case, reference, made[1], range(3, 6))
    assert_same_state(model.state_dict(), reference.state_dict())
    # And it can be prepared anew.
    again, optimizer = prepare(model)
    assert train(case, again, optimizer, range(6, 7))[0].isfinite()
