"""N steps, a checkpoint, and N steps in another process's place are 2N steps, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

import forebay
from forebay.checkpoint.encoding import decode, encode
from forebay.checkpoint.inventory import checkpoint_nbytes, entries_of
from forebay.checkpoint.manifest import Manifest
from forebay.errors import ConfigError, UsageError
from forebay.optim import AdamW
from forebay.runtime.blocks import find_blocks
from forebay.runtime.hooks import prepared_session
from tests.parity.content import content, expect_same
from tests.parity.models import CASES, Case
from tests.parity.test_streaming import everything_on_disk

AMPLE = "64MiB"
HALF = 3

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, fused=True)


class Run:
    """One process's part of a run: a model, its optimizer and its scheduler, prepared in one of three ways."""

    def __init__(self, case: Case, dtype: torch.dtype, way: str, folder: Path, make: Make = adamw) -> None:
        self.case, self.dtype = case, dtype
        model = case.model(dtype)
        options: dict[str, Any] = {"policy": way}
        if way == "disk":
            options = {"plan": everything_on_disk_for(model, make, f"{folder}:64MiB"), "disk": f"{folder}:64MiB"}
        self.model, self.optimizer = forebay.prepare(
            model, make(model.parameters()), device_memory=AMPLE, device="cpu", **options
        )
        self.scheduler = CosineAnnealingLR(self.optimizer, T_max=2 * HALF)
        self.losses: list[torch.Tensor] = []

    def steps(self, which: range) -> None:
        """Steps of two micro-batches, clipped, under the scheduler."""
        for step in which:
            for micro in (2 * step, 2 * step + 1):
                loss = self.model(**self.case.inputs(micro, self.dtype))["loss"]
                loss.backward()
                self.losses.append(loss.detach().clone())
            self.optimizer.clip_grad_norm_(0.5)  # type: ignore[attr-defined]
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def content(self) -> dict[str, torch.Tensor]:
        return content(self.model, self.optimizer)

    def close(self) -> None:
        forebay.close(self.model)


def everything_on_disk_for(model: nn.Module, make: Make, disk: str) -> Any:
    if make is not adamw:
        pytest.skip("the plan on disk is made for two moments in fp32")
    return everything_on_disk(model, disk)


def disturb() -> None:
    """Generators and models as another process has them."""
    torch.manual_seed(12345)
    random.seed(5)
    np.random.seed(6)


CASES_AND_WAYS = [
    ("llama", torch.float32, "auto", "disk"),
    ("llama", torch.bfloat16, "disk", "stream"),
    ("llama-tied", torch.bfloat16, "stream", "stream"),
    ("convnet", torch.float32, "stream", "auto"),  # channels last, and buffers that change
    ("experts", torch.float32, "disk", "disk"),  # parameters without a gradient in some steps
]


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("name", "dtype", "before", "after"), CASES_AND_WAYS, ids=[f"{c[0]}-{str(c[1])[6:]}-{c[3]}" for c in CASES_AND_WAYS]
)
def test_half_and_half_is_whole(name: str, dtype: torch.dtype, before: str, after: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "disk").mkdir()
    whole = Run(case, dtype, before, tmp_path / "disk")
    whole.steps(range(HALF))
    nbytes = forebay.save(
        whole.model, whole.optimizer, tmp_path / "kept", step=HALF, scheduler=whole.scheduler, extra={"at": (1, 2.5)}
    )
    middle = whole.content()
    whole.steps(range(HALF, 2 * HALF))  # a run that was saved goes on as if it had not been
    end = whole.content()
    whole.close()

    blocks = find_blocks(case.model(dtype)).model.blocks
    buffers = sum(b.nbytes for b in case.model(dtype).state_dict(keep_vars=True).values() if not b.is_floating_point())
    if name != "convnet":
        tensors = checkpoint_nbytes(blocks, ("exp_avg", "exp_avg_sq"), buffers)
        # headers: at most 512 bytes and a name for each tensor
        assert tensors < nbytes < tensors + 1024 * sum(1 for b in blocks for _ in entries_of(b, ("a", "b")))

    disturb()
    second = Run(case, dtype, after, tmp_path / "disk")
    second.steps(range(1))  # of its own, all of which is replaced
    found = forebay.resume(second.model, second.optimizer, tmp_path / "kept", scheduler=second.scheduler)
    assert (found.step, found.extra) == (HALF, {"at": (1, 2.5)})
    expect_same(middle, second.content())
    second.losses.clear()
    second.steps(range(HALF, 2 * HALF))
    assert all(torch.equal(a, b) for a, b in zip(second.losses, whole.losses[2 * HALF :], strict=True))
    expect_same(end, second.content())
    second.close()


MAKES: dict[str, Make] = {
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, fused=True),
    "adamw-8bit": lambda p: AdamW(p, lr=1e-2, moments="8bit"),
    "adamw-bf16": lambda p: AdamW(p, lr=1e-2, moments="bfloat16"),
    "lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), fused=True),
}


@pytest.mark.parametrize("name", MAKES)
def test_every_optimizer(name: str, tmp_path: Path) -> None:
    case, dtype = CASES["used-twice"], torch.bfloat16 if "sgd" in name else torch.float32
    runs = [Run(case, dtype, "stream", tmp_path, MAKES[name]) for _ in range(2)]
    first, second = runs
    first.steps(range(2))
    forebay.save(first.model, first.optimizer, tmp_path / "kept", step=2, scheduler=first.scheduler)
    first.steps(range(2, 4))
    forebay.close(first.model)
    content = [value.clone() for value in first.model.parameters()]
    forebay.resume(second.model, second.optimizer, tmp_path / "kept", scheduler=second.scheduler)
    second.steps(range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(first.losses[4:], second.losses, strict=True))
    forebay.close(second.model)
    assert all(torch.equal(a, b) for a, b in zip(content, second.model.parameters(), strict=True))


class Draws(nn.Module):
    """Draws from every generator there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = nn.functional.dropout(layer(x), 0.5)
        return (x * random.random() * float(np.random.rand()) + random.gauss(0, 1)).square().mean()


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Draws()
        return forebay.prepare(model, adamw(model.parameters()), device_memory=AMPLE, policy="stream", device="cpu")

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = model(torch.ones(4, 8))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    disturb()
    model, optimizer = prepared()
    steps(model, optimizer, 3)
    forebay.save(model, optimizer, tmp_path / "kept", step=3)
    expected = steps(model, optimizer, 3)
    forebay.close(model)
    disturb()
    np.random.rand(7)
    model, optimizer = prepared()
    forebay.resume(model, optimizer, tmp_path / "kept")
    assert steps(model, optimizer, 3) == expected
    forebay.close(model)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
    "milestones": lambda o: MultiStepLR(o, [2, 5]),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=9),
    "sequence": lambda o: SequentialLR(o, [LambdaLR(o, lambda s: 0.1), CosineAnnealingLR(o, 5)], [2]),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on(name: str) -> None:
    """Its state through the text of a manifest: the same learning rates from there on."""

    def made() -> tuple[torch.optim.Optimizer, LRScheduler]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)
        return optimizer, SCHEDULERS[name](optimizer)

    def rates(optimizer: torch.optim.Optimizer, scheduler: Any, count: int) -> list[float]:
        found = []
        for step in range(count):
            optimizer.step()
            scheduler.step(*([1.0 + step] if name == "plateau" else []))
            found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["betas"]))
        return found

    optimizer, scheduler = made()
    rates(optimizer, scheduler, 4)
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    state = {"kind": "x", "state": encode(scheduler.state_dict(), "scheduler")}
    manifest = Manifest(4, 1, (), {}, (), state, {}, encode(group, "group"))
    read = Manifest.from_bytes(manifest.to_bytes(), "the manifest")
    second, other = made()
    other.load_state_dict(decode(read.scheduler)["state"])
    second.param_groups[0].update(decode(read.extra))
    assert rates(second, other, 4) == rates(optimizer, scheduler, 4)


def test_values_come_back_as_they_were() -> None:
    values = [
        None, True, 0, -(2**40), 0.1, 1e-320, float("inf"), "text", (1, (2.5, [3])),
        {"a": {"$b": 1}}, {1: "x", (2, 3): 4},
        torch.tensor(1.5), torch.tensor([[1, 2]], dtype=torch.int64), torch.empty(0, 3), torch.tensor([True]),
        torch.tensor(2.5, dtype=torch.bfloat16),
    ]  # fmt: skip
    for value in values:
        manifest = Manifest(0, 1, (), {}, (), None, {}, encode(value, "value"))
        back = decode(Manifest.from_bytes(manifest.to_bytes(), "x").extra)
        if isinstance(value, torch.Tensor):
            assert back.dtype == value.dtype
            assert back.shape == value.shape
            assert torch.equal(back, value)
        else:
            assert back == value
            assert type(back) is type(value)
    drawn = random.Random(0)
    numbers = [drawn.uniform(-1, 1) * 10 ** drawn.randint(-300, 300) for _ in range(2000)]
    manifest = Manifest(0, 1, (), {}, (), None, {}, numbers)
    assert Manifest.from_bytes(manifest.to_bytes(), "x").extra == numbers
    with pytest.raises(ConfigError, match=r"value\[0\]\.f is a builtins\.function|builtin"):
        encode([{"f": print}], "value")


def test_a_checkpoint_is_plain_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run = Run(CASES["convnet"], torch.float32, "stream", tmp_path)
    run.steps(range(1))
    forebay.save(run.model, run.optimizer, tmp_path / "kept", step=1, scheduler=run.scheduler)
    stored: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "kept").glob("generation-00000001/*.safetensors"):
        stored |= load_file(path)
    values = forebay.parameters(run.model)
    states = {n: run.optimizer.state_dict()["state"][i] for i, n in enumerate(values)}
    for name, value in values.items():
        where = f"{name}@0,2,3,1" if f"parameter.{name}@0,2,3,1" in stored else name
        for kind, expected in (("parameter", value), ("exp_avg", states[name]["exp_avg"])):
            found = stored[f"{kind}.{where}"]
            assert torch.equal(found.permute(0, 3, 1, 2) if "@" in where else found, expected), name
    assert any("@" in name for name in stored)
    kept = {name for name in run.model.state_dict() if name not in values}
    assert {name.removeprefix("buffer.") for name in stored if name.startswith("buffer.")} == kept
    run.close()


def test_a_model_without_values_is_resumed(tmp_path: Path) -> None:
    import accelerate

    run = Run(CASES["llama"], torch.bfloat16, "stream", tmp_path)
    run.steps(range(1))
    forebay.save(run.model, run.optimizer, tmp_path / "kept", step=1, scheduler=run.scheduler)
    content = run.content()
    run.close()
    with accelerate.init_empty_weights():
        model = CASES["llama"].make().to(torch.bfloat16)
    second = object.__new__(Run)
    second.model, second.optimizer = forebay.prepare(
        model, adamw(model.parameters()), device_memory=AMPLE, policy="stream", device="cpu"
    )
    scheduler = CosineAnnealingLR(second.optimizer, T_max=2 * HALF)
    forebay.resume(second.model, second.optimizer, tmp_path / "kept", scheduler=scheduler)
    expect_same(content, second.content())
    assert not prepared_session(second.model).contents.unwritten
    second.close()


def test_not_within_a_pass(tmp_path: Path) -> None:
    run = Run(CASES["llama"], torch.float32, "stream", tmp_path)
    seen: list[str] = []

    def inside(module: nn.Module, *_: object) -> None:
        for call in (
            lambda: forebay.save(run.model, run.optimizer, tmp_path / "kept", step=0),
            lambda: forebay.resume(run.model, run.optimizer, tmp_path),
        ):
            with pytest.raises(UsageError, match="has no place within a forward"):
                call()
            seen.append("refused")

    handle = run.model.model.layers[1].register_forward_hook(inside)
    run.model(**CASES["llama"].inputs(0, torch.float32))
    handle.remove()
    assert seen == ["refused"] * 2
    run.close()


def test_the_program_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/checkpoints.md, cut short behind a save and gone on with."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()
    program = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)

    def run(source: str, **names: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        exec(compile(source, "checkpoints.md", "exec"), names)
        found = {name: value.clone() for name, value in forebay.parameters(names["model"]).items()}
        forebay.close(names["model"])
        return found

    whole = run(program, resuming=False)
    assert program.count(", 20)") == 1
    run(program.replace(", 20)", ", 12)"), resuming=False)
    expect_same(whole, run(program, resuming=True))
