"""The kernels with fp32 states give the bits of torch's fused ones, with casts before and after for 16-bit values.

torch's bits are those of its compiler on x86-64 with a fused multiply-add; elsewhere they may differ in the last place.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from forebay.kernels.adam import COLUMNS as ADAM
from forebay.kernels.adam import adam_kernel, adam_scalars
from forebay.kernels.lion import COLUMNS as LION
from forebay.kernels.lion import lion_kernel, lion_scalars
from forebay.kernels.native import Form
from forebay.kernels.sgd import COLUMNS as SGD
from forebay.kernels.sgd import sgd_kernel, sgd_scalars
from tests.parity.kernel_rig import COUNTS, DTYPES, Memory, memory, run, same

FORMS = [(Form.FP32, Form.FP32), (Form.BF16, Form.BF16), (Form.FP16, Form.FP16), (Form.BF16, Form.FP32)]
"""Parameter and gradient: what models have, and bf16 models whose gradients are summed in fp32."""

COMMON = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
ADAM_CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw-amsgrad-maximize": {"amsgrad": True, "maximize": True},
    "adam-decay": {"coupled": True},
    "adam": {"weight_decay": 0.0},
    # torch's lerp takes the other end when 1 - beta1 is a half or more.
    "adamw-fast": {"beta1": 0.5, "beta2": 0.9},
}

torchs_bits = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's bits are known for x86-64 with a fused multiply-add",
)


def torch_adam(held: Memory, step: int, options: dict[str, Any]) -> None:
    amsgrad = options.get("amsgrad", False)
    numbers = {**COMMON, **options}
    fused = torch._fused_adam_ if options.get("coupled", False) else torch._fused_adamw_
    m, v, *top = held.states
    fused(
        [held.master],
        [held.gradient.float()],
        [m],
        [v],
        top if amsgrad else [],
        [torch.full((), float(step))],
        amsgrad=amsgrad,
        maximize=options.get("maximize", False),
        **{name: numbers[name] for name in COMMON},
    )
    held.parameter.copy_(held.master)


def our_adam(held: Memory, step: int, options: dict[str, Any], parameter: Form, gradient: Form) -> float:
    coupled = options.get("coupled", False)
    kernel = adam_kernel(parameter, gradient, coupled=coupled, amsgrad=options.get("amsgrad", False))
    numbers = {**COMMON, **options}
    scalars = adam_scalars(
        step,
        **{name: numbers[name] for name in COMMON},
        coupled=coupled,
        maximize=options.get("maximize", False),
    )
    return run(kernel, [held.row(len(ADAM))], scalars, 0)


def assert_same(got: Memory, wanted: Memory, what: object) -> None:
    for number, (left, right) in enumerate(zip(got.everything(), wanted.everything(), strict=True)):
        assert same(left, right), (what, number, (left != right).sum())


@torchs_bits
@pytest.mark.parametrize("name", ADAM_CASES)
def test_adam_gives_torchs_bits(name: str) -> None:
    for parameter, gradient in FORMS if name == "adamw" else FORMS[:1]:
        for count in COUNTS:
            ours = memory(count, parameter, gradient, states=3)
            theirs = ours.copy()
            for step in (1, 2, 1000):
                squares = our_adam(ours, step, ADAM_CASES[name], parameter, gradient)
                torch_adam(theirs, step, ADAM_CASES[name])
                assert_same(ours, theirs, (parameter, gradient, count, step))
                expected = float(ours.gradient.double().square().sum())
                assert squares == pytest.approx(expected, rel=1e-6)


@torchs_bits
@pytest.mark.parametrize("parameter", [Form.FP32, Form.BF16, Form.FP16])
def test_extremes_of_adam(parameter: Form) -> None:
    """inf, NaN, denormals, the largest values and signed zeros go the way of torch, and stay where they are."""
    limits = torch.finfo(DTYPES[parameter])
    odd = [float("inf"), -float("inf"), float("nan"), limits.max, -limits.max, limits.tiny, limits.tiny / 4, -0.0, 0.0]
    ours = memory(1369, parameter, parameter, states=2)
    for place, value in enumerate(odd):
        ours.gradient[11 * place] = value  # in vectors
        ours.parameter[11 * place + 3] = ours.master[11 * place + 3] = value
        ours.states[0][11 * place + 5] = value
        ours.states[1][11 * place + 6] = abs(value)
    ours.gradient[-1], ours.gradient[-2] = float("nan"), float("inf")  # in what is left over
    before, theirs = ours.copy(), ours.copy()
    our_adam(ours, 3, {}, parameter, parameter)
    torch_adam(theirs, 3, {})
    assert_same(ours, theirs, parameter)
    assert same(ours.gradient, before.gradient)
    touched = {11 * place + shift for place in range(len(odd)) for shift in (0, 3, 5, 6)} | {1367, 1368}
    rest = torch.tensor([i for i in range(1369) if i not in touched])
    assert all(tensor[rest].isfinite().all() for tensor in ours.everything())


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_a_cut_changes_no_bit(shares: int) -> None:
    """However many threads share the work, and whether a run is one row or several that begin at a multiple of 8."""
    whole = memory(40_013, Form.BF16, Form.BF16, states=2)
    cut = whole.copy()
    our_adam(whole, 5, {}, Form.BF16, Form.BF16)
    kernel = adam_kernel(Form.BF16, Form.BF16, coupled=False, amsgrad=False)
    scalars = adam_scalars(5, **COMMON, coupled=False, maximize=False)
    edges = (0, 16, 1024, 33_000, 40_013)
    parts = [
        Memory(cut.gradient[a:b], cut.parameter[a:b], cut.master[a:b], [s[a:b] for s in cut.states])
        for a, b in pairwise(edges)
    ]
    run(kernel, [part.row(len(ADAM)) for part in parts], scalars, 0, shares=shares)
    assert_same(cut, whole, shares)


SGD_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "momentum": {"momentum": 0.9},
    "nesterov": {"momentum": 0.9, "nesterov": True},
    "dampening-maximize": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.0, "maximize": True},
}


@torchs_bits
@pytest.mark.parametrize("name", SGD_CASES)
def test_sgd_gives_torchs_bits(name: str) -> None:
    options = {"weight_decay": 0.1, "momentum": 0.0, "dampening": 0.0, "nesterov": False, "maximize": False}
    options.update(SGD_CASES[name])
    momentum = options["momentum"] != 0
    for parameter, gradient in FORMS if name == "nesterov" else FORMS[:1]:
        kernel = sgd_kernel(
            parameter,
            gradient,
            decay=options["weight_decay"] != 0,
            momentum=momentum,
            nesterov=options["nesterov"],
        )
        for count in COUNTS:
            ours = memory(count, parameter, gradient, states=1)
            ours.states[0].fill_(float("nan"))  # the first step reads no momentum
            theirs = ours.copy()
            for first in (True, False):
                given = {k: options[k] for k in ("momentum", "dampening", "weight_decay", "maximize")}
                squares = run(kernel, [ours.row(len(SGD))], sgd_scalars(0.1, **given, first=first))
                torch._fused_sgd_(
                    [theirs.master],
                    [theirs.gradient.float()],
                    theirs.states if momentum else [],
                    lr=0.1,
                    is_first_step=first and momentum,
                    **options,
                )
                theirs.parameter.copy_(theirs.master)
                assert_same(ours, theirs, (parameter, gradient, count, first))
                assert squares == pytest.approx(float(ours.gradient.double().square().sum()), rel=1e-6)


@pytest.mark.parametrize("forms", [(Form.FP32, Form.FP32), (Form.BF16, Form.FP16)])
def test_lion_is_the_papers(forms: tuple[Form, Form]) -> None:
    lr, beta1, beta2, decay = 1e-2, 0.9, 0.99, 0.1
    for count in COUNTS:
        ours = memory(count, *forms, states=1)
        if count > 8:
            ours.gradient[2], ours.states[0][2] = 0.0, 0.0  # no direction
            ours.gradient[3] = float("nan")
        theirs = ours.copy()
        run(lion_kernel(*forms), [ours.row(len(LION))], lion_scalars(lr, beta1, beta2, decay), 1)
        gradient, momentum = theirs.gradient.float(), theirs.states[0]
        direction = momentum * beta1 + gradient * (1 - beta1)
        theirs.master.mul_(1 - lr * decay).sub_(lr * direction.sign() + 0 * direction)  # torch's sign of NaN is 0
        momentum.mul_(beta2).add_(gradient * (1 - beta2))
        theirs.parameter.copy_(theirs.master)
        assert_same(ours, theirs, (forms, count))
