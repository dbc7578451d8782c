"""How the loss of a language model is cut into pieces, so that its logits are never all there. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from forebay.errors import ConfigError
from forebay.plans import Plan
from forebay.units import MiB, format_bytes

__all__ = [
    "DEFAULT",
    "ITEMSIZE",
    "NO_LOGITS",
    "ROUNDED_OTHERWISE",
    "TOKENS",
    "VOCABULARY",
    "Cut",
    "Loss",
    "LossPolicy",
    "expect_loss",
    "logits_nbytes",
    "pieces",
    "token_pieces",
    "vocabulary_pieces",
]

Loss = Literal["auto", "plain", "chunked"]
"""``plain``: as the model computes it. ``chunked``: in pieces. ``auto``: in pieces where that is exact and the plan
gains by it."""


def expect_loss(loss: str) -> None:
    """Raises ``ConfigError`` for what is not a ``Loss``."""
    *others, last = get_args(Loss)
    if loss not in (*others, last):
        raise ConfigError(f"loss must be {', '.join(others)} or {last}, got {loss!r}")


ITEMSIZE = 4
"""Bytes of a logit in the loss: models upcast to fp32."""

TOKENS, VOCABULARY = 16, 64
"""A piece has so many tokens or entries at least, and a multiple of them where another follows: matrix products of very
few rows or columns take other kernels, which round otherwise (docs/log.md, 2026-11-21)."""


@dataclass(frozen=True)
class LossPolicy:
    """Sizes of pieces. One is at most ``most`` bytes of logits and at most one ``share``-th of the device budget.

    ``notable``: ``auto`` does not think of pieces where all logits together are less than one ``notable``-th of the
    device budget.
    """

    most: int = 256 * MiB
    share: int = 64
    notable: int = 32

    def __post_init__(self) -> None:
        if self.most < ITEMSIZE or self.share < 1 or self.notable < 1:
            raise ConfigError(f"sizes of a loss in pieces must be positive, got {self}")

    def piece_nbytes(self, device: int) -> int:
        """Bytes of logits of one piece under a device budget of ``device`` bytes."""
        return max(ITEMSIZE, min(self.most, device // self.share))

    def worth_a_thought(self, logits: int, device: int) -> bool:
        """Whether ``logits`` bytes matter under a device budget of ``device`` bytes."""
        return logits * self.notable >= device


DEFAULT = LossPolicy()


def logits_nbytes(tokens: int, vocabulary: int) -> int:
    """Bytes of all logits as the loss reads them."""
    return tokens * vocabulary * ITEMSIZE


def token_pieces(tokens: int, vocabulary: int, nbytes: int) -> tuple[tuple[int, int], ...]:
    """``tokens`` cut so that the logits of a piece are ``nbytes`` at most, with the whole vocabulary."""
    return pieces(tokens, nbytes // (ITEMSIZE * vocabulary), TOKENS)


def vocabulary_pieces(tokens: int, vocabulary: int, nbytes: int) -> tuple[tuple[int, int], ...]:
    """``vocabulary`` cut so that the logits of a piece are ``nbytes`` at most, with all tokens."""
    return pieces(vocabulary, nbytes // (ITEMSIZE * max(1, tokens)), VOCABULARY)


def pieces(total: int, most: int, grain: int) -> tuple[tuple[int, int], ...]:
    """``range(total)`` cut into pieces (first, end) of about one size, multiples of ``grain`` but for the last.

    None is smaller than ``grain`` (unless ``total`` is), so that the last may be up to ``grain - 1`` larger than
    ``most``; and where ``most`` is less than ``grain``, that much is taken all the same.
    """
    most = max(grain, most - most % grain)
    count = max(1, -(-total // most))
    size = min(most, -(-total // (count * grain)) * grain)
    starts = list(range(0, total, max(size, 1)))
    if len(starts) > 1 and total - starts[-1] < grain:
        del starts[-1]
    return tuple(pairwise([*starts, total]))


@dataclass(frozen=True)
class Cut:
    """The loss of a model in pieces of ``piece`` bytes of logits, where all would be ``logits`` bytes.

    ``exact``: on the device of the run pieces were seen to give the bits of the whole.
    """

    piece: int
    logits: int
    exact: bool

    def of(self, plan: Plan) -> Plan:
        """``plan``, made for a step with such a loss, with what is to be said about that."""
        return replace(
            plan,
            loss_piece=self.piece,
            reasons=(*plan.reasons, f"{self.words}: all at once they would be {format_bytes(self.logits)}"),
            notes=(*plan.notes, NO_LOGITS),
            changes_numbers=plan.changes_numbers if self.exact else (*plan.changes_numbers, ROUNDED_OTHERWISE),
        )

    @property
    def words(self) -> str:
        """What is done."""
        return f"the loss is computed in pieces of at most {format_bytes(self.piece)} of logits"


NO_LOGITS = "in training the model's output holds logits of no tokens; where they are read, use loss='plain'"

ROUNDED_OTHERWISE = (
    "the loss is computed in pieces: the same sums, but on this device matrix products of pieces round otherwise than "
    "those of the whole, or that has not been tried"
)
