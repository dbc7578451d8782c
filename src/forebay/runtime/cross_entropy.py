"""Cross entropy of the logits ``hidden @ weight.T + bias`` without ever having all of them.

Every number is made by the op that makes it in plain PyTorch, from the same operands, a piece at a time:

forward    logits of some tokens and the whole vocabulary; their log-softmax; of that the entries asked for
backward   the same again, and from it the gradient of ``hidden`` for these tokens
           logits of all tokens and some of the vocabulary, and from them these rows of the gradient of ``weight``

So each sum runs over what it runs over when nothing is cut: the hidden size, the vocabulary, the tokens. The result has
the same bits wherever a matrix product gives to some rows or columns the bits that they have in the whole product. That
is up to the library; ``is_exact`` tries it out. The price are five matrix products of the head's size in the place of
three. Summing the gradient of ``weight`` over pieces of tokens would take four, and change its bits.

The second half of backward needs what normalises each row, for which the whole row would be wanted: forward keeps it
(``_normaliser``). A loss that never has all logits is in Wijmans et al., Cut Your Losses (2024, section 4), and in
Liger Kernel (Hsu et al. 2024, section 3.2), which computes both gradients in forward, the one of ``weight`` as a sum
over pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch.nn import functional as F

from forebay.errors import ModelError
from forebay.loss import ITEMSIZE, TOKENS, VOCABULARY, token_pieces, vocabulary_pieces

__all__ = [
    "Upstream",
    "gradient_of_rows",
    "gradients_of_weight",
    "is_exact",
    "picked_log_probabilities",
    "picked_of",
    "refuse_second_derivative",
]

aten = torch.ops.aten


def picked_log_probabilities(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, index: torch.Tensor, piece: int
) -> torch.Tensor:
    """``log_softmax(linear(hidden, weight, bias).float(), -1)`` at ``index``, differentiable once.

    ``hidden`` is (..., D), ``weight`` (V, D), ``bias`` (V) or None, ``index`` (N, 1) of integers below V, N being the
    product of the sizes of ``hidden`` but the last. Returns (N, 1) in fp32. There are ``piece`` bytes of logits at most
    at a time (``loss.pieces`` says how strictly), beside up to two more tensors of that size.

    Raises ``ModelError`` when a second derivative is asked for.
    """
    return cast(torch.Tensor, _Picked.apply(hidden, weight, bias, index, piece))  # type: ignore[no-untyped-call]


def picked_of(
    rows: torch.Tensor,
    index: torch.Tensor,
    vocabulary: int,
    piece: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The entries at ``index``, and ``_normaliser`` of each of ``rows``, (N, 1) each. ``logits_of`` makes the logits of
    some rows over all of the ``vocabulary``, in fp32."""
    picked = rows.new_empty((len(rows), 1), dtype=torch.float32)
    shift, scale = torch.empty_like(picked), torch.empty_like(picked)
    for first, end in token_pieces(len(rows), vocabulary, piece):
        logits = logits_of(rows[first:end])
        log = torch.log_softmax(logits, 1)
        picked[first:end] = log.gather(1, index[first:end])
        shift[first:end], scale[first:end] = _normaliser(logits, log)
        del logits, log  # before the next ones are made
    return picked, shift, scale


def gradient_of_rows(
    rows: torch.Tensor,
    index: torch.Tensor,
    gradient: torch.Tensor,
    vocabulary: int,
    piece: int,
    logits_of: Callable[[torch.Tensor], torch.Tensor],
    times_weight: Callable[[torch.Tensor, torch.Tensor], object],
) -> torch.Tensor:
    """The gradient of ``rows`` from ``gradient``, that of the entries picked. ``times_weight`` writes the product of
    its first argument and the weight into its second one."""
    made = torch.empty_like(rows)
    for first, end in token_pieces(len(rows), vocabulary, piece):
        log = torch.log_softmax(logits_of(rows[first:end]), 1)
        of_logits = _of_logits(log, index[first:end], gradient[first:end])
        del log
        times_weight(of_logits.to(rows.dtype), made[first:end])
        del of_logits
    return made


@final
@dataclass(frozen=True)
class Upstream:
    """What the gradient of a weight is made from, beside the hidden state: the (N, 1) of ``picked_of``, the index, and
    the gradient of what was picked."""

    index: torch.Tensor
    shift: torch.Tensor
    scale: torch.Tensor
    gradient: torch.Tensor


def gradients_of_weight(
    rows: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    upstream: Upstream,
    piece: int,
    *,
    start: int,
    columns: Sequence[tuple[int, int]],
    of_bias: bool,
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The gradient of ``weight``, the rows of one from number ``start`` on, in parts of these ``columns``, and
    (``of_bias``) that of its bias."""
    made = [weight.new_empty((len(weight), end - first)) for first, end in columns]
    third = torch.empty_like(bias) if bias is not None and of_bias else None
    for a, b in vocabulary_pieces(len(rows), len(weight), piece):
        log = _logits(rows, weight[a:b], None if bias is None else bias[a:b])
        log.sub_(upstream.shift).sub_(upstream.scale)
        of_logits = _of_some_logits(log, start + a, upstream.index, upstream.gradient).to(rows.dtype)
        del log
        for part, (first, end) in zip(made, columns, strict=True):
            torch.mm(of_logits.t(), rows[:, first:end], out=part[a:b])
        if third is not None:
            third[a:b] = of_logits.sum(0)
        del of_logits
    return made, third


def refuse_second_derivative() -> None:
    """Raises ``ModelError`` in a backward whose own graph is asked for."""
    if torch.is_grad_enabled():
        raise ModelError(
            "a loss that is computed in pieces has no second derivative (create_graph=True); prepare the model "
            "with loss='plain'"
        )


class _Picked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        index: torch.Tensor,
        piece: int,
    ) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])
        picked, *norms = picked_of(rows, index, len(weight), piece, lambda part: _logits(part, weight, bias))
        ctx.save_for_backward(hidden, weight, bias, index, *norms)
        ctx.piece = piece
        return picked

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        refuse_second_derivative()
        hidden, weight, bias, index, shift, scale = ctx.saved_tensors
        rows, gradient = hidden.reshape(-1, hidden.shape[-1]), gradients[0]
        first = second = third = None
        if ctx.needs_input_grad[0]:
            given = rows, index, gradient, len(weight), ctx.piece
            made = gradient_of_rows(
                *given, lambda part: _logits(part, weight, bias), lambda of, into: torch.mm(of, weight, out=into)
            )
            first = made.view(hidden.shape)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            columns = ((0, weight.shape[1]),) if ctx.needs_input_grad[1] else ()
            upstream, wanted = Upstream(index, shift, scale, gradient), ctx.needs_input_grad[2]
            parts, third = gradients_of_weight(
                rows, weight, bias, upstream, ctx.piece, start=0, columns=columns, of_bias=wanted
            )
            second = parts[0] if parts else None
        return first, second, third, None, None


def _logits(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(rows, weight, bias).float()


def _normaliser(logits: torch.Tensor, log: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(N, 1) each: the ``shift`` and ``scale`` with which ``logits - shift - scale`` has the bits of ``log``.

    The largest entry of a row is what torch's kernels subtract first. On ``cpu`` they subtract the logarithm of the sum
    next (``SoftMaxKernel.cpp``, vec_log_softmax_lastdim_chunk_kernel), which is what the largest entry has become. On
    ``cuda`` they subtract the sum of both at once (``SoftMax.cu``, LogSoftMaxForwardEpilogue).
    """
    largest, became = logits.amax(1, keepdim=True), log.amax(1, keepdim=True)
    if logits.device.type == "cpu":
        return largest, -became
    return largest - became, torch.zeros_like(became)


def _of_logits(log: torch.Tensor, index: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient of logits from that of their log-softmax ``log`` at ``index``; everywhere else that one is 0."""
    of_log = torch.zeros_like(log).scatter_(1, index, gradient)
    return cast(torch.Tensor, aten._log_softmax_backward_data.default(of_log, log, 1, log.dtype))


def _of_some_logits(log: torch.Tensor, start: int, index: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """``_of_logits`` for the columns of the vocabulary that begin at ``start``.

    torch's kernel wants the sum of a row's gradient, which is its one entry: a row whose entry is in other columns has
    it put in the first one here, and what that makes of the first one is mended.
    """
    inside = (index >= start) & (index < start + log.shape[1])
    found = _of_logits(log, torch.where(inside, index - start, 0), gradient)
    first = log[:, :1].expand(-1, 2).contiguous()
    mended = _of_logits(first, torch.ones_like(index), gradient)[:, :1]
    found[:, :1] = torch.where(inside, found[:, :1], mended)
    return found


def is_exact(width: int, dtype: torch.dtype, device: torch.device, *, bias: bool) -> bool:
    """Whether pieces give the bits of the whole on this ``device``, as far as some small products can tell.

    ``width`` is the hidden size. Some pieces of the least size and a rest are compared with what plain PyTorch makes of
    all: an answer in milliseconds for a few MiB of memory, and no proof for other sizes.
    """
    tokens, vocabulary = 5 * TOKENS + 3, 5 * VOCABULARY + 3
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int, spread: float) -> torch.Tensor:
        made = torch.randn(shape, generator=generator).mul_(spread).to(device=device, dtype=dtype)
        return made.requires_grad_()

    def compared() -> bool:
        hidden = numbers(tokens, width, spread=1.0)
        weight = numbers(vocabulary, width, spread=4 * width**-0.5)
        leaves = [hidden, weight, *([numbers(vocabulary, spread=1.0)] if bias else [])]
        index = torch.randint(0, vocabulary, (tokens, 1), generator=generator, device="cpu").to(device)
        offset = leaves[2] if bias else None
        whole = torch.log_softmax(F.linear(hidden, weight, offset).float(), 1).gather(1, index)
        # So small that both cuts are the finest.
        cut = picked_log_probabilities(hidden, weight, offset, index, ITEMSIZE)
        upstream = torch.linspace(0.0, 1.0, tokens, dtype=torch.float32, device=device)[:, None]
        pairs = zip(*(torch.autograd.grad(made, leaves, upstream) for made in (whole, cut)), strict=True)
        return torch.equal(whole, cut) and all(torch.equal(one, other) for one, other in pairs)

    with torch.enable_grad():
        try:
            return compared()
        except torch.OutOfMemoryError:
            return False  # a device with less room than that: nobody can tell
