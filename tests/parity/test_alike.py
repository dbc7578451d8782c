"""Ops that are known from ops alike (``profiler.alike``): what is recorded is what torch would have answered."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import GPT2Config, GPT2LMHeadModel

from forebay.profiler.alike import Alike
from forebay.profiler.capture import capture
from tests.parity.models import CASES, tokens

aten = torch.ops.aten


@pytest.fixture
def fakes() -> Iterator[FakeTensorMode]:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


class Asked(TorchDispatchMode):
    """Counts the ops that torch is asked to run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def asked(alike: Alike, func: Any, *args: Any, **kwargs: Any) -> tuple[Any, int]:
    """The result of ``func`` by ``alike``, and how often torch was asked for it."""
    with Asked() as seen:
        result = alike.run(func, args, kwargs)
    return result, seen.ops.count(func)


def described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = value.shape, value.stride(), value.storage_offset(), value.untyped_storage().nbytes()
        return type(value), *sizes, value.dtype, value.device, torch._C._dispatch_key_set(value)
    return [described(one) for one in value] if isinstance(value, tuple | list) else value


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", sorted(set(CASES) - {"experts"}))  # goes by values that nobody has
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_is_recorded_as_by_torch(name: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    model, batch = case.model(torch.float32), case.inputs(0, torch.float32)
    found = capture(copy.deepcopy(model), batch, "adamw", device)
    monkeypatch.setattr(Alike, "run", lambda self, func, args, kwargs: func(*args, **kwargs))
    assert found.trace.to_json() == capture(model, batch, "adamw", device).trace.to_json()


def test_torch_is_asked_no_more_often_for_more_layers() -> None:
    def recorded(layers: int) -> tuple[int, int]:
        """Ops of the step, and those that torch was asked for."""
        config = GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
        before = FakeTensorMode.cache_hits + FakeTensorMode.cache_misses
        found = capture(GPT2LMHeadModel(config), tokens(0), "adamw", "cpu")
        return len(list(found.trace.ops())), FakeTensorMode.cache_hits + FakeTensorMode.cache_misses - before

    (few, asked_of_few), (many, asked_of_many) = map(recorded, (2, 8))
    assert many - few > 6 * 100
    assert asked_of_many - asked_of_few < (many - few) / 5  # what is known of integers is asked for each time


FUNCTIONS: dict[str, Callable[[torch.Tensor], tuple[Any, tuple[Any, ...]]]] = {
    "makes one": lambda x: (aten.mm.default, (x, x)),
    "makes several": lambda x: (aten.native_layer_norm.default, (x, [8], None, None, 1e-5)),
    "makes one that does not lie in order": lambda x: (aten.add.Tensor, (x.t(), x.t())),
    "a view": lambda x: (aten.transpose.int, (x, 0, 1)),
    "a view from the middle": lambda x: (aten.slice.Tensor, (x, 0, 2, 5)),
    "a view that the schema calls none": lambda x: (aten._unsafe_view.default, (x, [4, 16])),
    "views": lambda x: (aten.split.Tensor, (x, 3)),
    "in place": lambda x: (aten.add_.Tensor, (x, x)),
    "another dtype": lambda x: (aten._to_copy.default, (x,)),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_what_comes_out_is_what_torch_makes(kind: str, fakes: FakeTensorMode) -> None:
    alike = Alike()
    kwargs = {"dtype": torch.float16} if kind == "another dtype" else {}
    first, second = torch.empty(8, 8), torch.empty(8, 8)
    func, args = FUNCTIONS[kind](first)
    once, times = asked(alike, func, *args, **kwargs)
    assert times == 1
    func, args = FUNCTIONS[kind](second)
    again, times = asked(alike, func, *args, **kwargs)
    assert times == 0
    assert described(again) == described(once) == described(func(*args, **kwargs))
    # Each has the storage of its own argument, or one of its own.
    for one, other in zip(*((r if isinstance(r, tuple | list) else [r]) for r in (once, again)), strict=True):
        if isinstance(one, torch.Tensor):
            shared = [storage(x) == storage(made) for x, made in ((first, one), (second, other))]
            assert shared == [kind == "in place" or "view" in kind] * 2
            assert storage(one) != storage(other)
    if kind == "in place":
        assert again is second


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((torch.Size([8, 8]), torch.float32), (torch.Size([8, 4]), torch.float32)),
        ((torch.Size([8, 8]), torch.float32), (torch.Size([8, 8]), torch.float64)),
    ],
)
def test_tensors_that_look_otherwise_are_asked_for(one: Any, other: Any, fakes: FakeTensorMode) -> None:
    alike = Alike()
    assert asked(alike, aten.neg.default, torch.empty(one[0], dtype=one[1]))[1] == 1
    assert asked(alike, aten.neg.default, torch.empty(other[0], dtype=other[1]))[1] == 1


@pytest.mark.parametrize(("one", "other"), [(1, 1.0), (1, True), (0.5, 0.25), (None, 0)])
def test_numbers_of_another_kind_are_others(one: Any, other: Any, fakes: FakeTensorMode) -> None:
    alike, x = Alike(), torch.empty(8, 8)
    func = aten.clamp.default
    assert asked(alike, func, x, one, 2)[1] == 1
    assert asked(alike, func, x, other, 2)[1] == 1
    assert asked(alike, func, x, one, 2)[1] == 0


def test_a_place_in_the_storage_counts(fakes: FakeTensorMode) -> None:
    alike, x = Alike(), torch.empty(8, 8)
    assert asked(alike, aten.slice.Tensor, x[:4], 0, 1, 2)[0].storage_offset() == 8
    found, times = asked(alike, aten.slice.Tensor, x[4:], 0, 1, 2)
    assert (found.storage_offset(), times) == (40, 1)


def test_what_is_no_plain_fake_is_torchs(fakes: FakeTensorMode) -> None:
    alike, x = Alike(), torch.empty(8)
    with _disable_current_modes():
        known = torch.ones(8)
    constant = torch.tensor(3.0)
    assert isinstance(constant, FakeTensor)
    assert constant.constant is not None
    for _ in range(2):
        assert asked(alike, aten.add.Tensor, x, known)[1] == 1
        assert asked(alike, aten.add.Tensor, x, constant)[1] == 1
        assert asked(alike, aten.bernoulli.p, x, 0.5, generator=torch.Generator())[1] == 1


def test_an_op_that_changes_what_a_tensor_looks_like_is_torchs(fakes: FakeTensorMode) -> None:
    alike = Alike()
    for _ in range(2):
        x = torch.empty(8, 4)
        assert asked(alike, aten.transpose_.default, x, 0, 1)[1] == 1
        assert x.shape == (4, 8)
        out, flat = torch.empty(0), torch.empty(32)
        assert asked(alike, aten.neg.out, x, out=out)[1] == 1
        assert out.shape == (4, 8)
        with pytest.warns(UserWarning, match="was resized"):  # as many bytes as before, in another shape
            assert asked(alike, aten.neg.out, x, out=flat)[1] == 1
        assert flat.shape == (4, 8)


def test_a_result_follows_from_the_default_dtype(fakes: FakeTensorMode) -> None:
    alike, x = Alike(), torch.ones(8, dtype=torch.int64)
    for dtype in (torch.float32, torch.float64, torch.float32):
        with default_dtype(dtype):
            assert alike.run(aten.true_divide.Tensor, (x, x), {}).dtype is dtype


def test_an_error_is_one_each_time(fakes: FakeTensorMode) -> None:
    alike, x = Alike(), torch.empty(8, 4)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="reduction dim"):
            alike.run(aten.mm.default, (x, x), {})


def test_a_layer_that_is_cast_in_the_forward() -> None:
    """Routers of Switch Transformers and NLLB-MoE do so. Torch swaps the fakes then, unless something refers to one
    weakly, as its own cache does to what an op makes that it sees for the first time."""

    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(37, 41)  # sizes that no other test has

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.layer = self.layer.to(torch.float32)
            return self.layer(x)

    capture(Router(), torch.randn(2, 37))
