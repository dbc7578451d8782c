"""Models of which blocks, or parts of them, were compiled by torch.compile: the numbers are those of the model that was
not, compiled code runs where it can, and elsewhere the user is told."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import forebay
from forebay.device.base import NoWatch, Watch
from forebay.errors import ModelError

WIDE = 16
STEPS = 3
BUDGETS = {"stream": "48KiB", "stream-recompute": "48KiB", "recompute": "1MiB", "keep": "1MiB", "offload-all": "1MiB"}


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(WIDE), Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Ops of its own: what a block saves is not only what its modules save.
        return x + torch.sin(self.inner(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Backend:
    """A compiler that runs what it is given, and counts how often."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        def run(*args: object) -> object:
            self.runs += 1
            return graph(*args)

        return run


def in_place(model: Model, backend: Backend) -> None:
    for layer in model.layers:
        layer.compile(backend=backend)


def wrapped(model: Model, backend: Backend) -> None:
    for number, layer in enumerate(list(model.layers)):
        model.layers[number] = torch.compile(layer, backend=backend)  # type: ignore[assignment]


def parts(model: Model, backend: Backend) -> None:
    for layer in model.layers:
        assert isinstance(layer, Block)
        layer.inner.compile(backend=backend)


FORMS = {"in place": in_place, "wrapped": wrapped, "parts": parts}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``cpu`` on which no op is looked at, as on ``cuda``, whose allocator counts by itself."""

    def watch(*_: object) -> Watch:
        return NoWatch()

    monkeypatch.setattr("forebay.opening.StorageLedger", watch)


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDE, generator=torch.Generator().manual_seed(step))


def prepared(model: Model, policy: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    made = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return forebay.prepare(model, made, batch(0), device_memory=BUDGETS[policy], policy=policy, device="cpu")


def expect_same(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Losses and gradients of ``STEPS`` steps are those of the model that was not compiled, bit for bit."""
    reference = make()
    for step in range(STEPS):
        with torch.no_grad():
            for parameter, value in zip(reference.parameters(), forebay.parameters(model).values(), strict=True):
                parameter.copy_(value)
        reference.zero_grad()
        loss = model(batch(step))
        loss.backward()
        expected = reference(batch(step))
        expected.backward()
        assert torch.equal(loss, expected)
        for parameter, gradient in zip(reference.parameters(), forebay.gradients(model).values(), strict=True):
            assert parameter.grad is not None and torch.equal(gradient, parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("policy", ["stream", "recompute", "offload-all"])
@pytest.mark.parametrize("form", FORMS)
def test_on_the_cpu_compiled_modules_run_as_written(form: str, policy: str) -> None:
    backend, model = Backend(), make()
    FORMS[form](model, backend)
    with pytest.warns(UserWarning, match=r"'layers\.0.*' and 2 other compiled modules will run as written"):
        made = prepared(model, policy)
    expect_same(*made)
    assert backend.runs == 0
    forebay.close(model)
    # What was compiled is so again: the user's compiler is left as it was.
    model(batch(0))
    assert backend.runs > 0


@pytest.mark.parametrize("form", FORMS)
def test_compiled_after_prepare(form: str) -> None:
    backend, model = Backend(), make()
    made = prepared(model, "stream")
    FORMS[form](model, backend)
    expect_same(*made)
    assert backend.runs == 0


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("policy", ["stream", "keep"])
@pytest.mark.parametrize("form", FORMS)
def test_where_no_op_is_looked_at_blocks_stay_compiled(form: str, policy: str) -> None:
    backend, model = Backend(), make()
    FORMS[form](model, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = prepared(model, policy)
    assert backend.runs == 0  # recording the step compiles nothing
    expect_same(*made)
    # Each of the three in every step, and backward runs none of them. A block that stays is one graph. In one that
    # streams a graph ends at the hooks of each module with parameters: of a norm, two linear layers, and what is
    # between those and behind them.
    graphs = {"keep": 1, "stream": 3 if form == "parts" else 5}
    assert backend.runs == 3 * STEPS * graphs[policy]


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("form", FORMS)
def test_blocks_that_recompute_run_as_written(form: str) -> None:
    backend, model = Backend(), make()
    FORMS[form](model, backend)
    with pytest.warns(UserWarning, match="will run as written"):
        made = prepared(model, "stream-recompute")
    expect_same(*made)
    assert backend.runs == 0


def test_aot_eager() -> None:
    model = make()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    with pytest.warns(UserWarning, match="the numbers are those of the model without"):
        made = prepared(model, "stream")
    expect_same(*made)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_model_compiled_as_a_whole_is_refused(in_place: bool) -> None:
    model = make()
    whole = model if in_place else torch.compile(model, backend=Backend())
    if in_place:
        model.compile(backend=Backend())
    with pytest.raises(ModelError, match=r"compiled as a whole \(model\.compile\(\) or .*compile the blocks instead"):
        prepared(whole, "stream")
    assert torch.equal(whole(batch(0)), make()(batch(0)))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiling_the_prepared_model_is_refused_and_the_model_goes_on(in_place: bool) -> None:
    model, optimizer = prepared(make(), "stream")
    if in_place:
        model.compile(backend=Backend())
        whole = model
    else:
        whole = torch.compile(model, backend=Backend())
    with pytest.raises(ModelError, match="the prepared model was compiled as a whole"):
        whole(batch(0))
    model._compiled_call_impl = None
    expect_same(model, optimizer)


@pytest.mark.usefixtures("unwatched")
def test_where_blocks_stay_compiled_they_are_compiled_before_prepare() -> None:
    model, optimizer = prepared(make(), "stream")
    layers = model.get_submodule("layers")
    layers[1].compile(backend=Backend())  # type: ignore[index]
    with pytest.raises(ModelError, match="a block was compiled after prepare"):
        model(batch(0))
    layers[1]._compiled_call_impl = None  # type: ignore[index]
    expect_same(model, optimizer)
