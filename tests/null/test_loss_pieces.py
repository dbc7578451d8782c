"""How a loss is cut: pieces cover everything once, none is small, and none is larger than it may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.loss import DEFAULT, LossPolicy, pieces, token_pieces, vocabulary_pieces
from forebay.units import GiB, MiB


@given(total=st.integers(1, 5000), most=st.integers(0, 3000), grain=st.sampled_from([1, 16, 64]))
def test_pieces_cover_everything_once_and_none_is_small_or_large(total: int, most: int, grain: int) -> None:
    made = pieces(total, most, grain)
    assert made[0][0] == 0
    assert made[-1][1] == total
    assert [end for _, end in made[:-1]] == [first for first, _ in made[1:]]
    sizes = [end - first for first, end in made]
    assert min(sizes) >= min(grain, total)
    assert all(size % grain == 0 for size in sizes[:-1])
    assert max(sizes) <= max(most, grain) + grain - 1


def test_nothing_is_cut_into_nothing() -> None:
    assert pieces(0, 100, 16) == ()


def test_both_cuts_are_of_the_same_bytes() -> None:
    """Llama-3-8B at 32k tokens: 16.8 GB of logits in 64 pieces of 512 tokens, or 63 of 2,048 entries and a rest."""
    tokens, vocabulary = 32768, 128256
    piece = DEFAULT.piece_nbytes(24 * GiB)
    assert piece == 256 * MiB
    rows, columns = token_pieces(tokens, vocabulary, piece), vocabulary_pieces(tokens, vocabulary, piece)
    assert (len(rows), len(columns)) == (64, 63)
    assert all((end - first) * vocabulary * 4 <= piece for first, end in rows)
    assert all((end - first) * tokens * 4 <= piece for first, end in columns)


def test_a_small_device_has_small_pieces() -> None:
    assert DEFAULT.piece_nbytes(64 * MiB) == MiB
    assert LossPolicy(most=4096).piece_nbytes(64 * MiB) == 4096
    assert not DEFAULT.worth_a_thought(MiB, 64 * MiB)
    assert DEFAULT.worth_a_thought(2 * MiB, 64 * MiB)


@pytest.mark.parametrize("wrong", [{"most": 0}, {"share": 0}, {"notable": 0}])
def test_a_policy_without_sizes_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        LossPolicy(**wrong)
