"""What torch's ops read and write for an update, counted beside what predictions take it for; and the memory that they
take, which plans have room for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import forebay.optim as own
from forebay.layout import with_masters
from forebay.model import Parameter
from forebay.optim.choosing import torch_arithmetic
from forebay.optim.parts import Part
from forebay.optim.reading import name_of, read_optimizer
from forebay.simulation.device_updates import CALL, ops_of
from forebay.states import Masters, Shape, form_of
from forebay.workspaces import PART, PIECE, widened_copies, workspace_nbytes
from tests.parity.test_adafactor_prepared import came

BF16, FP32 = torch.bfloat16, torch.float32
VIEWS = ("detach", "alias", "slice", "select", "split", "unsqueeze", "empty", "view", "as_strided")
INTO = ("copy_.", ".out", "_out")

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

MAKERS: Mapping[str, Make] = {
    "adamw": lambda p: torch.optim.AdamW(p),
    "amsgrad": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "adamw-sr": lambda p: own.AdamW(p, stochastic_rounding=True),
    "moments-bf16": lambda p: own.AdamW(p, moments="bfloat16"),
    "moments-bf16-sr": lambda p: own.AdamW(p, moments="bfloat16", stochastic_rounding=True),
    "8bit": lambda p: own.AdamW(p, moments="8bit"),
    "8bit-sr": lambda p: own.AdamW(p, moments="8bit", stochastic_rounding=True),
    "4bit": lambda p: own.AdamW(p, moments="4bit"),
    "lion": lambda p: own.Lion(p),
    "lion-sr": lambda p: own.Lion(p, stochastic_rounding=True),
    "momentum": lambda p: torch.optim.SGD(p, momentum=0.9),
    "sgd": lambda p: torch.optim.SGD(p),
    "adafactor": lambda p: own.Adafactor(p),
    "adafactor-sr": lambda p: own.Adafactor(p, stochastic_rounding=True),
    "adafactor-torch": lambda p: torch.optim.Adafactor(p),
    "came": came,
    "muon": lambda p: torch.optim.Muon(p),
    "muon-other": lambda p: own.Muon([{"params": p, "use_muon": False}]),
}

CASES = [
    *((name, FP32, Masters.WHOLE) for name in MAKERS if not name.endswith("-sr")),
    *((name, BF16, Masters.WHOLE) for name in MAKERS),
    *((name, BF16, Masters.LOWER) for name in ("adamw", "amsgrad")),
]
IDS = [f"{name}-{str(dtype).removeprefix('torch.')}-{masters}" for name, dtype, masters in CASES]


class Counting(TorchDispatchMode):
    """Bytes that ops read and write, launches, and the most bytes of new storages at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = self.launches = self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not func.is_view and not any(view in func.__name__ for view in VIEWS):
            self._count(func, args, kwargs, made)
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and not func.is_view:
                self._made(tensor, given=(args, kwargs))
        return made

    def _count(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        writes = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        named = [*zip((a.name for a in func._schema.arguments), args, strict=False), *kwargs.items()]
        # torch's fused updates may unscale gradients, and do not here.
        written = [v for n, v in named if n in writes and not (n == "grads" and "fused" in func.__name__)]
        only = any(into in f"{func.__name__}." for into in INTO)
        read = [v for n, v in named if not (n in writes and only)]
        self.launches += 1
        self.nbytes += _nbytes(read) + (_nbytes(written) if writes else _nbytes(made))

    def _made(self, tensor: torch.Tensor, given: Any) -> None:
        storage = tensor.untyped_storage()
        there = {t.untyped_storage().data_ptr() for t in tree_leaves(given) if isinstance(t, torch.Tensor)}
        if storage.data_ptr() in there or storage._cdata in self._known or not storage.nbytes():
            return
        key, nbytes = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.live += nbytes
        self.most = max(self.most, self.live)

        def gone() -> None:
            self._known.discard(key)
            self.live -= nbytes

        weakref.finalize(storage, gone)


def _nbytes(values: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, torch.Tensor))


def parameter_of(rule: Any, dtype: torch.dtype, shape: tuple[int, int]) -> Parameter:
    nbytes = shape[0] * shape[1] * dtype.itemsize
    name = str(dtype).removeprefix("torch.")
    how = {"master": rule.keeping.masters, "orthogonal": bool(rule.keeping.orthogonal)}
    return Parameter("w", shape, (shape[1], 1), name, 0, nbytes, True, **how)


def part_of(rule: Any, dtype: torch.dtype, masters: Masters, shape: tuple[int, int]) -> Part:
    count = shape[0] * shape[1]
    generator = torch.Generator().manual_seed(0)
    value, gradient = (torch.randn(count, generator=generator).to(dtype) for _ in range(2))
    states = []
    for state in rule.state_names:
        form = form_of(state)
        values = form.count_for(Shape(shape, bool(rule.keeping.orthogonal)))
        states.append(torch.zeros(values, dtype=getattr(torch, form.dtype)))
    master = None
    if dtype is BF16 and rule.keeping.masters:
        master = value.float() if masters is Masters.WHOLE else torch.zeros(count, dtype=torch.int16)
    return Part(value, gradient, master, tuple(states), 0, None, shape, (shape[1], 1))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("name", "dtype", "masters"), CASES, ids=IDS)
def test_predictions_have_what_ops_move(name: str, dtype: torch.dtype, masters: Masters) -> None:
    """Of a parameter of as many elements as a call has, or two parts: bytes within a twentieth, launches within a
    tenth."""
    optimizer = MAKERS[name]([torch.nn.Parameter(torch.zeros(4, 4))])
    rule, group = read_optimizer(optimizer), optimizer.param_groups[0]
    in_parts = name_of(optimizer) == "adafactor"
    count = 2 * PART if in_parts else CALL
    shape = (count // 2048, 2048)
    part, arithmetic = part_of(rule, dtype, masters, shape), torch_arithmetic(rule)
    arithmetic.update([part], 1, group)
    counted = Counting()
    with counted:
        arithmetic.update([part], 2, group)
    expected = ops_of(parameter_of(rule, dtype, shape), rule.state_names, masters)
    assert counted.nbytes / count == pytest.approx(expected.nbytes, rel=0.05), counted.nbytes / count
    assert counted.launches == pytest.approx(expected.launches(count), rel=0.1, abs=1.5)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("rows", [3, 300, 2 * PIECE // 256 + 77])
@pytest.mark.parametrize(("name", "dtype", "masters"), CASES, ids=IDS)
def test_plans_have_room_for_what_ops_take(name: str, dtype: torch.dtype, masters: Masters, rows: int) -> None:
    """In a workspace of so many bytes nothing is made beside it but scales of blocks, flags of them, and numbers; and
    without one no more is made in all."""
    optimizer = MAKERS[name]([torch.nn.Parameter(torch.zeros(4, 4))])
    rule, group = read_optimizer(optimizer), optimizer.param_groups[0]
    shape = (rows, 256)
    parameter, count = parameter_of(rule, dtype, shape), rows * 256
    wide = count * widened_copies(parameter, masters)
    nbytes = workspace_nbytes(with_masters(rule.state_names, masters), count, wide, [parameter])
    small = count // 256 * 64 + 8192
    makes_its_own = name.startswith("lion")  # its rule, which knows of no workspace
    one, other = (part_of(rule, dtype, masters, shape) for _ in range(2))
    for part, workspace in ((one, torch.empty(nbytes, dtype=torch.uint8)), (other, None)):
        for step in (1, 2):
            counted = Counting()
            with counted:
                torch_arithmetic(rule, workspace).update([part], step, group)
        room = nbytes if workspace is None or makes_its_own else 0
        assert counted.most <= room + small, (counted.most, nbytes)
        if makes_its_own and workspace is None:
            assert counted.most >= nbytes, (counted.most, nbytes)
    assert torch.equal(one.parameter, other.parameter)
    assert all(torch.equal(a, b) for a, b in zip(one.states, other.states, strict=True))
