"""Moments in few bits: the codes are the papers', rounding has no bias, and training gets as far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from forebay.kernels.adam import COLUMNS as ADAM
from forebay.kernels.adam import adam_kernel, adam_scalars
from forebay.kernels.adam_low import COLUMNS as LOW
from forebay.kernels.adam_low import adam_low_kernel, codebook, state_nbytes
from forebay.kernels.codes import BINS, LOWER, MOST, code_table, dynamic_values, linear_values
from forebay.kernels.native import Form
from forebay.kernels.shares import BLOCK
from tests.parity.kernel_rig import memory, run, same

NUMBERS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}
Floats = npt.NDArray[np.float32]


def bitsandbytes_map(*, signed: bool, exponent_bits: int, bits: int) -> Floats:
    """``create_dynamic_map`` of bitsandbytes, which Dettmers et al. published with the paper."""
    found: list[float] = [0.0, 1.0]
    rest = bits - 1
    for i in range(exponent_bits):
        parts = 2 ** (i + rest - exponent_bits) + 1 if signed else 2 ** (i + rest - exponent_bits + 1) + 1
        edges = np.linspace(0.1, 1, parts)
        means = 10.0 ** (i - exponent_bits + 1) * (edges[:-1] + edges[1:]) / 2
        found += [*means, *(-means if signed else ())]
    return np.sort(np.array(found, dtype=np.float32))


@pytest.mark.parametrize(("bits", "signed"), [(8, True), (8, False), (4, True)])
def test_codes_are_the_papers(bits: int, signed: bool) -> None:
    expected = bitsandbytes_map(signed=signed, exponent_bits=bits - 1, bits=bits)
    found = dynamic_values(bits, signed=signed)
    assert len(found) == 2**bits
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize(("bits", "signed"), [(8, True), (8, False), (4, True)])
def test_magnitudes_change_their_decade_between_two_codes(bits: int, signed: bool) -> None:
    """Halfway between the last value of a decade and the first of the next one, to a millionth."""
    table, values = code_table(bits, signed=signed), dynamic_values(bits, signed=signed).astype(np.float64)
    positive = values[values >= 0]
    lasts = [2**j - 1 for j in range(bits)] if signed else [2**j - 2 for j in range(1, bits + 1)]
    middles = np.array([(positive[last] + positive[last + 1]) / 2 for last in lasts])
    found = []
    for x in (middles * (1 - 1e-6), middles * (1 + 1e-6)):
        whole, lower = x.astype(np.float32).view(np.int32), table[LOWER : LOWER + BINS].view(np.int32)
        found.append(table[MOST + ((whole - lower[whole >> 24 & 15]) >> 24 & 15)].tolist())
    above = [*lasts[1:], len(positive) - 1]
    assert found == [lasts, above]


def test_every_parameter_is_rounded_as_torch_rounds() -> None:
    """Processors that round to bf16 take tiny numbers for 0, and keep a part of a NaN."""
    count = 4 * BLOCK
    held, states = memory(count, Form.BF16, Form.BF16, states=0), LowStates(count, 8)
    states.codes[0].fill_(127)
    held.master[BLOCK : 2 * BLOCK] *= 1e-39
    held.master[2 * BLOCK + 7] = float("nan")
    held.master[3 * BLOCK :] = torch.arange(BLOCK, dtype=torch.int32).add(0x3F80_7F80).view(torch.float32)
    before = held.master.clone()
    scalars = adam_scalars(1, lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, coupled=False, maximize=False)
    kernel = adam_low_kernel(Form.BF16, Form.BF16, 8, coupled=False)
    run(kernel, [held.row(4) + states.addresses()], scalars, codebook(8), 1)
    assert same(held.master, before)
    assert same(held.parameter, before.bfloat16())


class LowStates:
    """The moments of ``count`` elements in ``bits`` bits, both 0."""

    def __init__(self, count: int, bits: int) -> None:
        codes, scales = state_nbytes(count, bits)
        # The last block is as long as the others: element 128 + i is in the byte of element i.
        whole, rest = divmod(count, 256)
        assert (codes, scales) == (whole * 256 * bits // 8 + min(rest, 32 * bits), 4 * -(-count // 256))
        self.count, self.bits = count, bits
        self.codes = [torch.zeros(codes, dtype=torch.uint8) for _ in range(2)]
        self.scales = [torch.zeros(scales // 4) for _ in range(2)]

    def addresses(self) -> list[int]:
        """Those of a row behind the master, and the place of its first element."""
        return [*(t.data_ptr() for pair in zip(self.codes, self.scales, strict=True) for t in pair), 0]

    def values(self, moment: int) -> Floats:
        """The values of all codes of a moment."""
        if moment == 0:
            return dynamic_values(self.bits, signed=True)
        return dynamic_values(8, signed=False) if self.bits == 8 else linear_values()

    def decode(self, moment: int) -> tuple[Floats, Floats]:
        """Every element's code as a value in [-1, 1], and its scale."""
        codes = self.codes[moment].numpy().astype(np.int64)
        if self.bits == 4:
            rows = np.pad(codes, (0, -len(codes) % 128)).reshape(-1, 128)
            codes = np.concatenate([rows & 15, rows >> 4], 1).ravel()[: self.count]
        return self.values(moment)[codes], np.repeat(self.scales[moment].numpy(), BLOCK)[: self.count]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 255, 1369, 40_013])
def test_each_moment_gets_the_nearest_code(bits: int, count: int) -> None:
    """The bound of Dettmers et al.: half of the gap between the codes around a value, times the block's largest."""
    held, states = memory(count, Form.FP32, Form.FP32, states=0), LowStates(count, bits)
    held.gradient.mul_(torch.exp(3 * torch.randn(count, generator=torch.Generator().manual_seed(1))))
    scalars = adam_scalars(1, **NUMBERS, coupled=False, maximize=False)
    kernel = adam_low_kernel(Form.FP32, Form.FP32, bits, coupled=False)
    row = [count, held.gradient.data_ptr(), held.parameter.data_ptr(), 0, *states.addresses()]
    assert len(row) == len(LOW)
    squares = run(kernel, [row], scalars, codebook(bits), 1)
    gradient = held.gradient.numpy()
    assert squares == pytest.approx(float(held.gradient.double().square().sum()), rel=1e-6)
    # From 0: the moments are the gradient and its square, times what is left of 1.
    moments = (gradient * scalars[0 + 1], gradient * scalars[4] * gradient)
    for number, moment in enumerate(moments):
        found, scale = states.decode(number)
        blocks = [np.abs(moment[i : i + BLOCK]).max() for i in range(0, count, BLOCK)]
        np.testing.assert_array_equal(states.scales[number].numpy(), np.array(blocks, dtype=np.float32))
        normal = moment / scale
        distance = np.abs(normal[:, None] - states.values(number)).min(1)
        assert (np.abs(normal - found) <= distance + 2e-7).all(), number
    worst = {8: (0.45 / 64, 0.45 / 128), 4: (0.45 / 4, 1 / 16)}[bits]
    for number, moment in enumerate(moments):
        found, scale = states.decode(number)
        # The largest gap of a code is in its last decade; there is no zero in the linear code, and no -1.
        assert (np.abs(moment / scale - found) <= worst[number] * 1.001).all(), number


def test_decoded_moments_are_what_a_step_starts_from() -> None:
    """Two steps with 8-bit moments are two of torch's, each from the decoded moments of the one before."""
    count = 1369
    held, states = memory(count, Form.FP32, Form.FP32, states=0), LowStates(count, 8)
    kernel = adam_low_kernel(Form.FP32, Form.FP32, 8, coupled=False)
    row = [count, held.gradient.data_ptr(), held.parameter.data_ptr(), 0, *states.addresses()]
    states.codes[0].fill_(127)  # the code of 0
    for step in (1, 2, 3):
        moments = [torch.from_numpy(np.multiply(*states.decode(n))).clone() for n in range(2)]
        theirs = held.parameter.clone()
        torch._fused_adamw_(
            [theirs],
            [held.gradient],
            [moments[0]],
            [moments[1]],
            [],
            [torch.full((), float(step))],
            amsgrad=False,
            maximize=False,
            **NUMBERS,
        )
        run(kernel, [row], adam_scalars(step, **NUMBERS, coupled=False, maximize=False), codebook(8), 1)
        whole = count - count % 8
        assert same(held.parameter[:whole], theirs[:whole]), step
        torch.testing.assert_close(held.parameter, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_block_that_overflows_spares_the_others(bits: int) -> None:
    count = 3 * BLOCK
    held, states = memory(count, Form.FP32, Form.FP32, states=0), LowStates(count, bits)
    held.gradient[BLOCK + 5] = float("inf")
    held.gradient[2 * BLOCK - 1] = float("nan")
    kernel = adam_low_kernel(Form.FP32, Form.FP32, bits, coupled=False)
    row = [count, held.gradient.data_ptr(), held.parameter.data_ptr(), 0, *states.addresses()]
    run(kernel, [row], adam_scalars(1, **NUMBERS, coupled=False, maximize=False), codebook(bits), 1)
    for number in range(2):
        assert [bool(s.isfinite()) for s in states.scales[number]] == [True, False, True]
        with np.errstate(invalid="ignore"):
            whole = np.isfinite(np.multiply(*states.decode(number))).reshape(3, BLOCK)
        assert whole.all(1).tolist() == [True, False, True]
        assert not whole[1].any()


def test_bits_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="8 or 4 bits, not 2"):
        adam_low_kernel(Form.FP32, Form.FP32, 2, coupled=False)
    with pytest.raises(ValueError, match="fp32 or bf16"):
        adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False, state=Form.FP16)


def bf16_step(count: int, seed: int, place: int = 0) -> list[torch.Tensor]:
    """A step from moments 0 with one gradient everywhere; the new moments, in bf16."""
    gradient, parameter = torch.full((count,), 0.3), torch.zeros(count)
    moments = [torch.zeros(count, dtype=torch.bfloat16) for _ in range(2)]
    kernel = adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False, state=Form.BF16)
    row = [count, gradient.data_ptr(), parameter.data_ptr(), 0, *(m.data_ptr() for m in moments), 0, place]
    assert len(row) == len(ADAM)
    run(kernel, [row], adam_scalars(1, **NUMBERS, coupled=False, maximize=False), seed)
    return moments


def test_rounding_by_chance_has_no_bias() -> None:
    count = 40_013
    first, second = bf16_step(count, seed=3)
    scalars = adam_scalars(1, **NUMBERS, coupled=False, maximize=False)
    gradient = np.float32(0.3)
    for moment, exact in ((first, gradient * scalars[1]), (second, scalars[4] * gradient * gradient)):
        seen = moment.double().unique()
        assert len(seen) == 2 and float(seen[0]) < exact < float(seen[1])
        # A mean of ``count`` draws between two values is this close to its expectation in all but 6 of 10^5 cases.
        spread = float(seen[1] - seen[0]) / 2 / count**0.5
        assert abs(float(moment.double().mean()) - exact) < 4 * spread
    ups = torch.stack([m == m.max() for m in (first, second)]).double()
    # Nor do the two moments, or neighbours, go up together.
    for left, right in ((ups[0], ups[1]), (ups[0, 1:], ups[0, :-1])):
        assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 4 / count**0.5


def test_chance_is_the_same_for_every_cut_and_new_in_every_step() -> None:
    whole = bf16_step(4096, seed=7)
    halves = [bf16_step(2048, seed=7, place=place) for place in (0, 2048)]
    for number in range(2):
        assert same(whole[number], torch.cat([half[number] for half in halves]))
        assert not same(whole[number], bf16_step(4096, seed=8)[number])


def losses(bits: int | None) -> list[float]:
    """A least-squares problem of 1,536 weights, trained for 60 steps with moments of ``bits``; None: fp32."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 48, generator=generator)
    targets = inputs @ torch.randn(48, 32, generator=generator)
    weight = torch.zeros(48, 32)
    states, moments = LowStates(weight.numel(), bits or 8), [torch.zeros(weight.numel()) for _ in range(2)]
    if bits is not None:
        states.codes[0].fill_(127 if bits == 8 else 0x77)
    found = []
    for step in range(1, 61):
        error = inputs @ weight - targets
        found.append(float(error.square().mean()))
        gradient = (2 / error.numel() * inputs.T @ error).contiguous()
        scalars = adam_scalars(step, 0.1, 0.9, 0.999, 1e-8, 0.0, coupled=False, maximize=False)
        row = [weight.numel(), gradient.data_ptr(), weight.data_ptr(), 0]
        if bits is None:
            kernel = adam_kernel(Form.FP32, Form.FP32, coupled=False, amsgrad=False)
            run(kernel, [[*row, *(m.data_ptr() for m in moments), 0, 0]], scalars, 0)
        else:
            low = adam_low_kernel(Form.FP32, Form.FP32, bits, coupled=False)
            run(low, [[*row, *states.addresses()]], scalars, codebook(bits), 1)
    return found


@pytest.mark.parametrize(("bits", "apart"), [(8, 0.02), (4, 0.2)])
def test_training_gets_as_far(bits: int, apart: float) -> None:
    exact, low = losses(None), losses(bits)
    assert exact[-1] < 0.05 * exact[0]
    # In units of what there was to learn.
    assert max(abs(a - b) for a, b in zip(exact, low, strict=True)) < apart * exact[0]


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_that_end_within_a_block_disturb_no_other(bits: int) -> None:
    counts = (BLOCK + 200, 7, 130, 1)
    held = [memory(count, Form.BF16, Form.BF16, states=0) for count in counts]
    states = [LowStates(count, bits) for count in counts]
    for own in states:
        own.scales[0].fill_(0.25)
        own.scales[1].fill_(0.125)
        own.codes[0].fill_(200 if bits == 8 else 0x9C)
        own.codes[1].fill_(200 if bits == 8 else 0x3D)
    alone = [m.copy() for m in held]
    kernel = adam_low_kernel(Form.BF16, Form.BF16, bits, coupled=False)
    scalars = adam_scalars(3, **NUMBERS, coupled=False, maximize=False)
    kept = [[tensor.clone() for tensor in (*own.codes, *own.scales)] for own in states]
    rows = [m.row(4) + own.addresses() for m, own in zip(held, states, strict=True)]
    squares = run(kernel, rows, scalars, codebook(bits), 1)
    expected = sum(float(m.gradient.double().square().sum()) for m in held)
    assert squares == pytest.approx(expected, rel=1e-6)
    for number, (m, own) in enumerate(zip(alone, states, strict=True)):
        fresh = LowStates(counts[number], bits)
        for tensor, value in zip((*fresh.codes, *fresh.scales), kept[number], strict=True):
            tensor.copy_(value)
        run(kernel, [m.row(4) + fresh.addresses()], scalars, codebook(bits), 1)
        assert same(m.master, held[number].master) and same(m.parameter, held[number].parameter)
        for left, right in zip((*fresh.codes, *fresh.scales), (*own.codes, *own.scales), strict=True):
            assert torch.equal(left, right)
