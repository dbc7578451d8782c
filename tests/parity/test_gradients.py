"""Landed gradients: ``param.grad`` stands for bytes on the host and behaves like the tensor that torch would have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, final

import pytest
import torch
from torch import nn

import forebay
from forebay.device.base import Delays
from forebay.device.cpu import CpuDevice
from forebay.device.delays import RandomDelays
from forebay.errors import ForebayError
from forebay.model import Parameter
from forebay.runtime.gradient_buffer import GradientBuffer
from forebay.runtime.gradients import LandedGradient
from forebay.runtime.landing import Landing
from forebay.timeline import Lane

CPU = torch.device("cpu")
SHAPE = (6, 10)
WINDOW = 4096


def spec(name: str, shape: tuple[int, ...], stride: tuple[int, ...] | None = None, dtype: str = "float32") -> Parameter:
    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    return Parameter(name, shape, stride or tensor.stride(), dtype, tensor.nbytes, 0, True)


def random(seed: int, shape: tuple[int, ...] = SHAPE, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def device() -> Iterator[CpuDevice]:
    """Copies and sums arrive late: whoever does not wait for them reads old bytes."""
    device = CpuDevice(delays=RandomDelays(0, 0.002, [Lane.D2H]))
    yield device
    device.close()


@pytest.fixture
def landing(device: CpuDevice) -> Landing:
    # Room for one and a half of the gradients here: accumulation goes in pieces.
    return Landing(device, WINDOW, torch.empty(6 * 10 * 6, dtype=torch.uint8))


def as_in_backward(land: Callable[[], object]) -> None:
    """Calls ``land`` where autograd gives a gradient, whose arrival nobody waits for."""
    given = torch.zeros((), requires_grad=True)
    given.register_hook(lambda _: (land(), None)[1])
    given.clone().backward()


def landed(landing: Landing, gradient: torch.Tensor, name: str = "weight") -> LandedGradient:
    described = spec(name, tuple(gradient.shape), gradient.stride(), str(gradient.dtype).removeprefix("torch."))
    buffer = GradientBuffer(described, torch.empty(gradient.numel(), dtype=gradient.dtype), landing)
    as_in_backward(lambda: buffer.land(gradient))
    return LandedGradient(buffer, CPU)


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "norm": lambda g: g.norm(),
    "vector norm": lambda g: torch.linalg.vector_norm(g, 2),
    "norm of 1": lambda g: torch.linalg.vector_norm(g, 1),
    "largest": lambda g: torch.linalg.vector_norm(g, float("inf")),
    "norm by row": lambda g: torch.linalg.vector_norm(g, 2, dim=1),
    "foreach norm": lambda g: torch._foreach_norm([g, g], 2)[1],
    "sum": lambda g: g.sum(),
    "mean": lambda g: g.mean(dim=0),
    "isnan": lambda g: g.isnan().any(),
    "isfinite": lambda g: torch.isfinite(g).all(),
    "times": lambda g: g * 2,
    "with a tensor": lambda g: g + random(9),
    "tensor first": lambda g: random(9) - g,
    "with itself": lambda g: g * g,
    "matmul": lambda g: g @ random(1, (10, 3)),
    "to": lambda g: g.to(torch.float64),
    "float": lambda g: g.bfloat16(),
    "cpu": lambda g: g.cpu() + 0,
    "clone": lambda g: g.clone(),
    "view": lambda g: g.view(-1).sum(),
    "deep view": lambda g: g.t()[2:5].reshape(3, 2, 3)[:, 1].flatten() * 1,
    "rows": lambda g: g[1:3] + 0,
    "element": lambda g: g[2, 3] + 0,
    "masked": lambda g: g[g > 0],
    "item": lambda g: g[2, 3].item(),
    "stack": lambda g: torch.stack([g, g]),
    "cat of views": lambda g: torch.cat([g.view(-1), g.flatten()]),
    "chunks": lambda g: torch.cat(g.chunk(3)),
    "sort": lambda g: g.flatten().sort()[0],
    "any op": lambda g: torch.nn.functional.softmax(g, dim=-1),
    "equal": lambda g: torch.equal(g, random(0)),
    "shape": lambda g: (tuple(g.shape), g.stride(), g.dtype, g.device, g.numel(), g.is_sparse, g.layout),
    "out": lambda g: torch.mul(g, 3, out=torch.empty(SHAPE)),
}


@pytest.mark.parametrize("read", READS)
def test_reads(landing: Landing, read: str) -> None:
    got, expected = READS[read](landed(landing, random(0))), READS[read](random(0))
    assert type(got) is type(expected)
    assert torch.equal(got, expected) if isinstance(got, torch.Tensor) else got == expected


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda g: g.add_(random(1)),
    "add three times": lambda g: g.add_(random(1)).add_(random(2)).add_(random(3)),
    "add scaled": lambda g: g.add_(random(1), alpha=0.5),
    "add a number": lambda g: g.add_(1.0),
    "add broadcast": lambda g: g.add_(random(1, (10,))),
    "add another kind": lambda g: g.add_(random(1, dtype=torch.bfloat16)),
    "add itself": lambda g: g.add_(g),
    "iadd": lambda g: g.__iadd__(random(1)),
    "mul": lambda g: g.mul_(0.3),
    "mul by a tensor": lambda g: g.mul_(torch.tensor(0.3)),
    "mul by elements": lambda g: g.mul_(random(1)),
    "div": lambda g: g.div_(3),
    "foreach mul": lambda g: torch._foreach_mul_([g], 0.3),
    "foreach mul by a tensor": lambda g: torch._foreach_mul_([g], torch.tensor(0.3)),
    "foreach zero": lambda g: torch._foreach_zero_([g]),
    "foreach add": lambda g: torch._foreach_add_([g], [random(1)]),
    "foreach clamp": lambda g: torch._foreach_clamp_max_([g], 0.1),
    "zero": lambda g: g.zero_(),
    "fill": lambda g: g.fill_(2.0),
    "copy": lambda g: g.copy_(random(1)),
    "clamp": lambda g: g.clamp_(-0.1, 0.1),
    "where": lambda g: g.masked_fill_(g > 0, 0.0),
    "nan to num": lambda g: torch.nan_to_num_(g),
    "out": lambda g: torch.mul(random(1), 2, out=g),
    "a row": lambda g: g[2].zero_(),
    "an element": lambda g: g.__setitem__((2, 3), 7.0),
    "rows by index": lambda g: g.__setitem__(torch.tensor([0, 2]), 7.0),
    "by mask": lambda g: g.__setitem__(g < 0, 0.0),
    "flat": lambda g: g.view(-1)[5:9].mul_(2),
    "transposed": lambda g: g.t()[1:3].copy_(random(1, (2, 6))),
    "view of a view": lambda g: g.view(2, 3, 10)[1].t()[::2, 1:].add_(1),
    "view, then whole": lambda g: (g[0].zero_(), g.mul_(2), g.view(-1)[-1].fill_(5)),
    "detached": lambda g: g.detach().mul_(2),
    "data": lambda g: g.data.mul_(2),
    "data set": lambda g: setattr(g, "data", g.data * 0.5),
    "data set, then changed": lambda g: (setattr(g, "data", random(1)), g.mul_(2)),
    "data set to a view": lambda g: setattr(g, "data", random(1, (3, 60))[1].view(SHAPE)),
    "split": lambda g: [p.mul_(i + 2) for i, p in enumerate(g.split(2))],
    "unbound": lambda g: [p.fill_(i) for i, p in enumerate(g.unbind(1))],
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_land(landing: Landing, write: str) -> None:
    ours, theirs = landed(landing, random(0)), random(0)
    WRITES[write](ours)
    WRITES[write](theirs)
    ours.buffer.settle()
    assert torch.equal(ours.buffer.host.view(SHAPE), theirs)
    assert torch.equal(ours.clone(), theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("memory", ["contiguous", "channels last", "transposed"])
def test_any_dtype_and_order_of_memory(landing: Landing, dtype: torch.dtype, memory: str) -> None:
    first, second = (random(s, (4, 3, 2, 2), dtype) for s in (0, 1))
    like = {"contiguous": first, "channels last": first.to(memory_format=torch.channels_last), "transposed": None}
    laid = like[memory]
    if laid is None:
        laid = first.permute(1, 0, 2, 3).contiguous().permute(1, 0, 2, 3)
    gradient = landed(landing, laid.clone(memory_format=torch.preserve_format))
    gradient.add_(second)  # in another order of memory than the parameter
    assert gradient.stride() == laid.stride()
    assert torch.equal(gradient.clone(), laid + second)
    assert torch.equal(gradient.norm(), (laid + second).norm())


def test_data_of_another_kind_is_refused(landing: Landing) -> None:
    gradient = landed(landing, random(0), "layer.weight")
    for value in (random(1, (10, 6)), random(1).double(), random(1).to("meta")):
        with pytest.raises(ForebayError, match=r"grad\.data of layer\.weight is set to a tensor of .*\(6, 10\)"):
            gradient.data = value
    assert torch.equal(gradient.clone(), random(0))


def test_replaced_data_is_what_a_step_takes() -> None:
    """As in loops that clip with ``p.grad.data = ...``, or set it to what it is. What it was set to is not looked at
    again, so that it must not change: the step is refused, and goes on once ``data`` was set anew."""
    torch.manual_seed(0)
    reference, model = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(2))
    model.load_state_dict(reference.state_dict())
    plain = torch.optim.AdamW(reference.parameters(), fused=True)
    model, optimizer = forebay.prepare(
        model, torch.optim.AdamW(model.parameters()), device_memory="1MiB", policy="stream", device="cpu"
    )
    for subject, used in ((reference, plain), (model, optimizer)):
        subject(random(1, (4, 8))).square().sum().backward()
        for parameter in subject.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data.clamp(-0.1, 0.1)
            same = parameter.grad.data
            parameter.grad.data = same
            parameter.grad.mul_(0.5)
        used.step()
        shared = [torch.ones_like(p) for p in reference.parameters()]
        for parameter, gradient in zip(subject.parameters(), shared, strict=True):
            assert parameter.grad is not None
            parameter.grad.data = gradient.view_as(gradient)
            gradient.mul_(2)
        if used is optimizer:
            with pytest.raises(ForebayError, match=r"what grad\.data of 0\.weight was set to has changed since"):
                used.step()
            for parameter, gradient in zip(subject.parameters(), shared, strict=True):
                assert parameter.grad is not None
                parameter.grad.data = gradient
        used.step()
    assert all(torch.equal(forebay.parameters(model)[n], p) for n, p in reference.named_parameters())
    forebay.close(model)


def test_a_tensor_of_one_element_and_an_empty_one(landing: Landing) -> None:
    single = landed(landing, torch.tensor(3.0))
    single.add_(torch.tensor(1.0))
    assert single.item() == 4.0
    nothing = landed(landing, torch.empty(0, 4))
    nothing.add_(torch.empty(0, 4)).mul_(2)
    assert nothing.norm() == 0


def test_lists_of_landed_and_plain(landing: Landing) -> None:
    """Foreach ops, as clipping uses them, over gradients of both kinds."""
    plain = [random(seed) for seed in range(4)]
    mixed = [landed(landing, random(seed), f"p{seed}") if seed % 2 else random(seed) for seed in range(4)]
    for ours, theirs in zip(torch._foreach_norm(mixed, 2), torch._foreach_norm(plain, 2), strict=True):
        assert torch.equal(ours, theirs)
    torch._foreach_mul_(mixed, 0.5)
    torch._foreach_mul_(plain, 0.5)
    torch._foreach_add_(mixed, plain)
    torch._foreach_add_(plain, plain)
    assert all(torch.equal(ours.clone(), theirs) for ours, theirs in zip(mixed, plain, strict=True))


def unscale(gradients: list[torch.Tensor], inverse: float = 0.3) -> torch.Tensor:
    """As ``GradScaler.unscale_`` does it, all gradients at once."""
    found = torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.tensor([inverse]))
    return found


LISTS: dict[str, Callable[[list[torch.Tensor], list[torch.Tensor]], Any]] = {
    "norm": lambda g, other: torch._foreach_norm(g, 2.0),
    "norm in another dtype": lambda g, other: torch._foreach_norm(g, 2.0, dtype=torch.float64),
    "mul": lambda g, other: torch._foreach_mul_(g, 0.5),
    "mul by a tensor": lambda g, other: torch._foreach_mul_(g, torch.tensor(0.3)),
    "mul by numbers": lambda g, other: torch._foreach_mul_(g, [0.1 * (i + 1) for i in range(len(g))]),
    "zero": lambda g, other: torch._foreach_zero_(g),
    "clamp": lambda g, other: torch._foreach_clamp_max_(g, 0.1),
    "add": lambda g, other: torch._foreach_add_(g, other, alpha=0.5),
    "addcdiv": lambda g, other: torch._foreach_addcdiv_(g, other, other, torch.arange(float(len(g)))),
    "new ones": lambda g, other: torch._foreach_add(g, other),
    "powers of a number": lambda g, other: torch._foreach_pow(2.0, g),
    "unscale": lambda g, other: unscale(g),
}
ON_THE_HOST = ("norm", "norm in another dtype", "mul", "mul by a tensor", "zero", "unscale")


@pytest.mark.parametrize("name", LISTS)
def test_ops_on_lists_have_one_gradient_on_the_device_at_a_time(
    landing: Landing, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a landed gradient takes there is one copy, made by ``torch.empty_strided``."""
    plain, others = ([random(seed) for seed in range(start, start + 5)] for start in (0, 10))
    ours = [landed(landing, random(seed), f"p{seed}") for seed in range(5)]
    made: list[weakref.ref[torch.Tensor]] = []
    most, right = [0], torch.empty_strided

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        copy = right(*args, **kwargs)
        made.append(weakref.ref(copy))
        most[0] = max(most[0], sum(one() is not None for one in made))
        return copy

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty_strided", counting)
        result = LISTS[name](list(ours), others)
    expected = LISTS[name](plain, others)
    found, wanted = ([] if one is None else list(one) for one in (result, expected))
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert all(torch.equal(one.clone(), other) for one, other in zip(ours, plain, strict=True))
    assert most[0] == (0 if name in ON_THE_HOST else 1)


@pytest.mark.parametrize("name", ["mul", "clamp", "unscale"])
def test_a_list_with_one_that_is_gone_changes_none(landing: Landing, name: str) -> None:
    ours = [landed(landing, random(seed), f"p{seed}") for seed in range(3)]
    ours[2].buffer.land(random(5))
    with pytest.raises(ForebayError, match="p2 is that of an earlier backward"):
        LISTS[name](list(ours), [])
    assert all(torch.equal(gradient.clone(), random(seed)) for seed, gradient in enumerate(ours[:2]))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("inverse", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_value_that_is_not_finite_is_found_in_any_place(
    landing: Landing, value: float, inverse: float, dtype: torch.dtype
) -> None:
    """Of landed gradients and one that is not; nothing is written by 1."""
    plain = [random(seed, dtype=dtype) for seed in range(3)]
    gradients = [landed(landing, random(seed, dtype=dtype), f"p{seed}") for seed in range(2)]
    ours: list[torch.Tensor] = [*gradients, plain[2].clone()]
    assert unscale(ours, inverse) == unscale(plain, inverse) == 0
    version = gradients[0].buffer.version
    for both in (ours, plain):
        both[1][2, 3] = value
    assert unscale(ours, inverse) == unscale(plain, inverse) == 1
    assert all(torch.equal(a.clone().isfinite(), b.isfinite()) for a, b in zip(ours, plain, strict=True))
    assert torch.equal(ours[0].clone(), plain[0]) and torch.equal(ours[2], plain[2])
    assert (gradients[0].buffer.version == version) is (inverse == 1)


def test_autograd_accumulates_into_it(landing: Landing) -> None:
    parameter = nn.Parameter(torch.ones(SHAPE))
    gradient = landed(landing, random(0))
    parameter.grad = gradient
    (parameter * random(1)).sum().backward()
    assert parameter.grad is gradient
    assert torch.equal(gradient.clone(), random(0) + random(1))


def test_an_old_one_is_not_read_as_the_new_one(landing: Landing) -> None:
    gradient = landed(landing, random(0), "layer.weight")
    part = gradient[1:]
    gradient.buffer.land(random(1))
    for use in (gradient.norm, gradient.zero_, gradient.clone, part.sum, gradient.detach, lambda: gradient.add_(1)):
        with pytest.raises(ForebayError, match=r"layer\.weight is that of an earlier backward.*clone\(\) it"):
            use()
    current = LandedGradient(gradient.buffer, CPU)
    assert torch.equal(current.clone(), random(1))


def test_what_a_tensor_without_memory_cannot_do_is_refused(landing: Landing) -> None:
    gradient = landed(landing, random(0))
    for use in (gradient.tolist, gradient.numpy):
        with pytest.raises(RuntimeError, match=r"tensor subclasses|Cannot access data"):
            use()
    assert gradient.clone().tolist() == random(0).tolist()


def test_it_says_what_it_is(landing: Landing) -> None:
    assert repr(landed(landing, random(0), "layer.weight")) == "LandedGradient(layer.weight, (6, 10), torch.float32)"


@final
class LateLanding(Delays):
    """Holds every D2H job back, and notes when each copy of a gradient was submitted."""

    def __init__(self) -> None:
        self.device: CpuDevice | None = None
        self.submitted: list[tuple[float, str]] = []

    def seconds(self, lane: Lane, what: str) -> float:
        if lane is Lane.D2H and what.startswith("gradient ") and self.device is not None:
            self.submitted.append((self.device.now(), what))
        return 0.002 if lane is Lane.D2H else 0.0


@pytest.mark.parametrize("end", [Landing.drain, Landing.empty])
@pytest.mark.parametrize("window", [0, 1024, 4096, 1 << 20])
@pytest.mark.parametrize("accumulate", [False, True])
def test_no_more_than_the_window_is_under_way(window: int, accumulate: bool, end: Callable[[Landing], None]) -> None:
    """The way itself, and no buffer: that one waits for each gradient that comes outside of a backward."""
    delays = LateLanding()
    device = CpuDevice(delays=delays)
    delays.device = device
    sizes = [64, 128, 64, 256, 32, 1024, 2048, 64, 64, 64, 512, 8, 8, 8]  # elements of 4 bytes
    landing = Landing(device, window, torch.empty(4096, dtype=torch.uint8))
    targets = [torch.zeros(n) for n in sizes]
    for number, target in enumerate(targets):
        (landing.accumulate if accumulate else landing.copy)(target, torch.ones_like(target), f"p{number}")
    end(landing)
    assert all(torch.equal(target, torch.ones_like(target)) for target in targets)
    device.synchronize()
    ends = {e.what: e.end for e in device.drain_events() if e.what.startswith("gradient ")}
    device.close()
    nbytes = {f"gradient p{i}": 4 * n for i, n in enumerate(sizes)}
    first: dict[str, float] = {}
    for at, what in delays.submitted:
        first.setdefault(what, at)
    assert set(first) == set(ends) == set(nbytes)
    most = 0
    for now in first.values():
        under_way = [what for what, at in first.items() if at <= now < ends[what]]
        total = sum(nbytes[what] for what in under_way)
        # A gradient larger than the window goes alone.
        assert total <= window or len(under_way) == 1, (total, under_way)
        most = max(most, len(under_way))
    # The delay holds several back at one time, so that the bound above is put to the test.
    assert window < 4096 or most > 2


@pytest.mark.parametrize("policy", ["auto", "stream"])
def test_sparse_gradients_are_refused(policy: str) -> None:
    """With the name and what to change; the model goes on once that is done. Before anything has moved, and where that
    is not seen, in backward."""
    torch.manual_seed(0)
    embedding = nn.Embedding(16, 8, sparse=True)
    model = nn.Sequential(embedding, nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ForebayError, match=r"embedding 0 makes sparse gradients.*sparse=False"):
        forebay.prepare(model, torch.optim.AdamW(model.parameters()), device_memory="1MiB", policy=policy, device="cpu")
    embedding.sparse = False
    model, optimizer = forebay.prepare(
        model, torch.optim.AdamW(model.parameters()), device_memory="1MiB", policy=policy, device="cpu"
    )
    ids = torch.arange(4)
    embedding.sparse = True
    with pytest.raises(ForebayError, match=r"gradient of 0\.weight is sparse.*sparse=False"):
        model(ids).sum().backward()
    optimizer.zero_grad()
    embedding.sparse = False
    model(ids).sum().backward()
    optimizer.step()
    assert set(forebay.gradients(model)) == {n for n, _ in model.named_parameters()}
    forebay.close(model)
