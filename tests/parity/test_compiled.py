"""Models of which blocks, or parts of them, were compiled by torch.compile: the numbers are those of the model that was
not, compiled code runs where it can, and elsewhere the user is told."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest
import torch
from torch import nn
from torch._functorch import config as partitioner
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import forebay
from benchmarks.activations.loop import changes_of
from forebay.device.base import NoWatch, Watch
from forebay.device.cpu import CpuDevice
from forebay.errors import ConfigError, ModelError
from forebay.memory import Tier
from forebay.profiler.compiled import peak_of
from forebay.units import parse_bytes
from tests.parity.test_recompute_edges import NORMS, Normed

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

    def watch(*_: object, **__: object) -> Watch:
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


def expect_same(model: nn.Module, optimizer: torch.optim.Optimizer, reference: nn.Module | None = None) -> None:
    """Losses and gradients of ``STEPS`` steps are those of ``reference``, or of the model that was not compiled, bit
    for bit."""
    reference = make() if reference is None else reference
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


@pytest.mark.parametrize("policy", ["stream", "keep", "stream-recompute"])
@pytest.mark.parametrize("form", ["in place", "wrapped"])
def test_compiled_blocks_stay_compiled(form: str, policy: str) -> None:
    backend, model = Backend(), make()
    FORMS[form](model, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", r"Guards may run slower on Python 3\.13\.0", RuntimeWarning)  # torch's
        made = prepared(model, policy)
    before = backend.runs
    expect_same(*made)
    # One graph a block, hooks and all, in every step; where it recomputes, once more in backward.
    assert backend.runs - before == 3 * STEPS * (2 if "recompute" in policy else 1)
    report = forebay.report(made[0])
    assert report.plan.compiled == ("layers.0", "layers.1", "layers.2")
    assert any("the account of a run does not see it" in note for note in report.plan.notes)
    assert report.measured_peaks()[Tier.DEVICE] <= report.plan.device
    forebay.close(model)


def test_parts_that_are_compiled_run_as_written() -> None:
    backend, model = Backend(), make()
    parts(model, backend)
    with pytest.warns(UserWarning, match=r"'layers\.0\.inner' and 2 other compiled modules will run as written"):
        made = prepared(model, "stream-recompute")
    expect_same(*made)
    assert backend.runs == 0
    forebay.close(model)
    # What was compiled is so again: the user's compiler is left as it was.
    model(batch(0))
    assert backend.runs > 0


@pytest.mark.thinned(2)
@pytest.mark.parametrize("policy", ["keep", "stream", "recompute", "stream-recompute", "auto"])
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_with_the_compilers_own_saves_numbers_are_those_of_the_compiled_model(compiler: str, policy: str) -> None:
    """AOTAutograd cuts forward and backward by itself, and inductor computes other last bits than the ops do. The plan
    promises what the allocator hands out; of ``aot_eager`` the ledger sees all of that, to the byte."""
    models = make(), make()
    for model in models:
        for layer in model.layers:
            layer.compile(backend=compiler)
    budget = parse_bytes("26KiB" if policy == "auto" else BUDGETS[policy])
    optimizer = torch.optim.AdamW(models[0].parameters(), lr=1e-2)
    # Whoever asks for a copy makes it: PyTorch's profiler does not hear of what other threads let go of.
    with closing(CpuDevice(budget, brief=budget)) as device:
        model, optimizer = forebay.prepare(
            models[0], optimizer, batch(0), device_memory=budget, policy=policy, device=device
        )
        expect_same(model, optimizer, models[1])
        seen, plan = forebay.report(model).measured_peaks()[Tier.DEVICE], forebay.report(model).plan
        forebay.synchronize(model)
        given, standing = batch(STEPS), device.ledger.usage().live
        changes = changes_of(lambda: model(given).backward())
        forebay.close(model)
    # Blocks that run again keep the state of the generator as forward found it, and as backward does meanwhile. That
    # of the CPU is on the host whatever the device; no tensor here is as large.
    state = torch.get_rng_state().nbytes
    assert changes.count(state) == changes.count(-state) == 2 * len(plan.recompute)
    taken = standing + peak_of([change for change in changes if abs(change) != state])
    assert plan.compiled
    assert seen <= taken <= plan.device
    if compiler == "aot_eager":
        assert seen == taken


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_buffers_that_only_a_later_forward_changes(compiler: str) -> None:
    """Planned with the block in evaluation, run again in training. Whether torch counts the changes, and whether the
    block reads what has changed, is the compiler's to say."""
    plain, evaluated = _normed(compiler), _normed(compiler)
    evaluated.layers.eval()
    optimizer = torch.optim.AdamW(evaluated.parameters(), lr=1e-2)
    given = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    model, _ = forebay.prepare(evaluated, optimizer, (given,), device_memory="1MiB", policy="recompute", device="cpu")
    plan = forebay.report(model).plan
    assert plan.compiled and plan.recompute
    model.train()
    for _ in range(2):
        model(given)["loss"].backward()
        plain(given)["loss"].backward()
    actual, gradients = dict(model.named_buffers()), forebay.gradients(model)
    forebay.close(model)
    assert all(torch.equal(actual[name], buffer) for name, buffer in plain.named_buffers())
    assert all(torch.equal(gradients[name], p.grad) for name, p in plain.named_parameters() if p.grad is not None)


def test_blocks_that_change_their_buffers_run_as_written() -> None:
    changing = _normed("eager")
    optimizer = torch.optim.AdamW(changing.parameters(), lr=1e-2)
    with pytest.warns(UserWarning, match="will run as written"):
        model, _ = forebay.prepare(changing, optimizer, (torch.randn(4, 8),), device_memory="1MiB", device="cpu")
    assert forebay.report(model).plan.compiled == ()
    assert not torch.stack([b for n, b in model.named_buffers() if n.endswith("running_mean")]).any(), "not yet"
    forebay.close(model)


def _normed(compiler: str) -> Normed:
    torch.manual_seed(0)
    model = Normed(NORMS["statistics read before"])
    model.layers[0].compile(backend=compiler)
    return model


DECOMPOSED = "aot_eager_decomp_partition"
"""A compiler with inductor's partition and eager kernels."""


class Dropping(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(Block(), nn.Dropout(0.5)) for _ in range(3)])


def _dropping(compiler: str | None = None) -> Dropping:
    torch.manual_seed(0)
    model = Dropping()
    for layer in model.layers:
        if compiler:
            layer.compile(backend=compiler)
    return model


def _drawn(model: nn.Module) -> torch.Tensor:
    """All gradients of a step that draws from seed 1, one behind the other."""
    torch.manual_seed(1)
    model(batch(0)).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_what_draws_runs_as_written_under_an_activation_memory_budget(share: float) -> None:
    model = _dropping(DECOMPOSED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with partitioner.patch(activation_memory_budget=share), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model, _ = forebay.prepare(model, optimizer, batch(0), device_memory="1MiB", policy="keep", device="cpu")
        found = _drawn(model)
        compiled = bool(forebay.report(model).plan.compiled)
        forebay.close(model)
    warned = any("layers.0 draws random numbers" in str(one.message) for one in told)
    assert (compiled, warned) == ((True, False) if share == 1 else (False, True))
    assert torch.equal(found, _drawn(_dropping(DECOMPOSED if compiled else None)))


def test_beside_another_prepared_model_blocks_run_as_written() -> None:
    """Its mode is on from prepare to close, and under that PyTorch compiles nothing."""
    other, _ = prepared(make(), "stream")
    backend, model = Backend(), make()
    in_place(model, backend)
    with pytest.warns(UserWarning, match="will run as written"):
        made = prepared(model, "stream")
    expect_same(*made)
    assert backend.runs == 0 and forebay.report(made[0]).plan.compiled == ()
    forebay.close(made[0])
    forebay.close(other)


def test_a_block_that_does_not_compile_runs_as_written() -> None:
    def fails(*_: object) -> Callable[..., object]:
        raise ValueError("no such target")

    model = make()
    for layer in model.layers:
        layer.compile(backend=fails)
    with pytest.warns(UserWarning, match="will run as written"):
        made = prepared(model, "stream")
    assert forebay.report(made[0]).plan.compiled == ()
    expect_same(*made)
    forebay.close(made[0])


def test_the_step_after_an_error_between_forward_and_backward() -> None:
    model = make()
    in_place(model, Backend())
    made = prepared(model, "stream-recompute")
    made[0](batch(0))
    with pytest.raises(RuntimeError, match="normalized_shape"):
        made[0](batch(0)[:0, :0])
    expect_same(*made)
    forebay.close(made[0])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_an_error_in_a_step_leaves_no_mode_on(half: str, error: type[BaseException]) -> None:
    """The model is dropped, not closed. Errors and the frames that they came through may hold each other and it: then
    it goes with the next collection, and what was on with it."""
    _interrupted_step(half, error)
    gc.collect()
    assert not _get_current_dispatch_mode_stack()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    large = torch.zeros(1024, WIDE)
    assert large.nbytes > parse_bytes(BUDGETS["stream"])
    make()(large)


def _interrupted_step(half: str, error: type[BaseException]) -> None:
    armed: list[str] = []

    def fails(*_: object) -> None:
        if armed == [half]:
            raise error("here")

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        def run(*args: object) -> object:
            fails()
            return graph(*args)

        return run

    model = make()
    for layer in model.layers:
        layer.compile(backend=compiler)
    made, _ = prepared(model, "stream")
    loss = made(batch(0))
    armed.append(half)
    loss.register_hook(fails)
    with pytest.raises(error, match="here"):
        made(batch(0)) if half == "forward" else loss.backward()


def test_a_plan_for_compiled_blocks_is_refused_where_they_are_not() -> None:
    model = make()
    in_place(model, Backend())
    made, _ = prepared(model, "stream")
    plan = forebay.report(made).plan
    forebay.close(made)
    other = make()
    optimizer = torch.optim.AdamW(other.parameters(), lr=1e-2)
    with pytest.raises(ConfigError, match=r"made for layers\.0 compiled.*is not; compile it before prepare"):
        forebay.prepare(other, optimizer, batch(0), device_memory="48KiB", plan=plan, device="cpu")


@pytest.mark.parametrize("form", FORMS)
def test_compiled_after_prepare(form: str) -> None:
    backend, model = Backend(), make()
    made = prepared(model, "stream")
    FORMS[form](model, backend)
    expect_same(*made)
    assert backend.runs == 0
    forebay.close(model)


@pytest.mark.usefixtures("unwatched")
@pytest.mark.parametrize("policy", ["stream", "keep"])
def test_where_no_op_is_looked_at_parts_stay_compiled(policy: str) -> None:
    backend, model = Backend(), make()
    parts(model, backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = prepared(model, policy)
    assert backend.runs == 0  # recording the step compiles nothing
    expect_same(*made)
    # Each of the three in every step, and backward runs none of them. In a block that streams a graph ends at the hooks
    # of each module with parameters: of two linear layers, and what is between those.
    assert backend.runs == 3 * STEPS * {"keep": 1, "stream": 3}[policy]
    forebay.close(model)


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
    forebay.close(model)  # the compiler and its error may hold it until a collection


@pytest.mark.usefixtures("unwatched")
def test_where_blocks_stay_compiled_they_are_compiled_before_prepare() -> None:
    model, optimizer = prepared(make(), "stream")
    layers = model.get_submodule("layers")
    layers[1].compile(backend=Backend())  # type: ignore[index]
    with pytest.raises(ModelError, match="a block was compiled after prepare"):
        model(batch(0))
    layers[1]._compiled_call_impl = None  # type: ignore[index]
    expect_same(model, optimizer)
    forebay.close(model)
