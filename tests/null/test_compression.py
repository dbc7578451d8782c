"""Sizes of compressed activations: what a planner counts without torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.compression import CODE_BITS, DEFAULT, GROUP, WORKSPACE, Compression, encoded_nbytes, groups_of
from forebay.errors import ConfigError
from forebay.units import MiB


@pytest.mark.parametrize(
    ("numel", "itemsize", "bits", "nbytes"),
    [
        (1024, 4, 0, 4096),
        (1024, 4, 8, 4 * 2 * 4 + 1024),  # 4 groups, minimum and maximum in fp32, a byte a code
        (1024, 2, 4, 4 * 2 * 2 + 512),
        (1024, 2, 2, 4 * 2 * 2 + 256),
        (1024, 2, 1, 128),
        (257, 2, 2, 2 * 2 * 2 + 65),  # a second group for one element; 514 bits
        (1, 4, 2, 2 * 4 + 1),
        (9, 1, 1, 2),
        (0, 4, 8, 0),
        (0, 4, 1, 0),
    ],
)
def test_bytes_are_bounds_and_codes(numel: int, itemsize: int, bits: int, nbytes: int) -> None:
    assert encoded_nbytes(numel, itemsize, bits) == nbytes


def test_a_16_bit_tensor_at_2_bits_takes_2_and_an_eighth_bits_an_element() -> None:
    """ActNN's account (section 4.1): 256 elements share two 16-bit numbers."""
    numel = 1 << 20
    assert 8 * encoded_nbytes(numel, 2, 2) == 2.125 * numel
    assert 8 * encoded_nbytes(numel, 4, 2) == 2.25 * numel


@given(
    st.integers(0, 10**7), st.sampled_from((2, 4)), st.sampled_from(CODE_BITS), st.integers(1, 64).map(lambda n: 8 * n)
)
def test_more_elements_never_take_less_and_larger_groups_never_more(
    numel: int, itemsize: int, bits: int, group: int
) -> None:
    nbytes = encoded_nbytes(numel, itemsize, bits, group)
    assert nbytes <= encoded_nbytes(numel + 1, itemsize, bits, group)
    assert nbytes >= encoded_nbytes(numel, itemsize, bits, 2 * group)
    assert nbytes == 2 * itemsize * groups_of(numel, group) + (numel * bits + 7) // 8


@given(st.integers(0, 10**7), st.integers(1, 64).map(lambda n: 8 * n), st.integers(1, 8))
def test_work_is_on_whole_groups_and_within_the_workspace(numel: int, group: int, mebibytes: int) -> None:
    policy = Compression(group, mebibytes * MiB)
    assert policy.piece % group == 0 and policy.piece > 0
    assert 0 <= policy.workspace_nbytes(numel) <= policy.workspace
    # It holds the arithmetic in fp32 on a piece, three numbers at a time.
    assert policy.workspace_nbytes(numel) >= 12 * min(numel, policy.piece)


def test_the_defaults_are_those_of_the_paper_and_4_mib() -> None:
    assert Compression() == DEFAULT == Compression(group=256, workspace=4 * MiB)
    assert [GROUP, WORKSPACE / MiB] == [256, 4]
    assert DEFAULT.workspace_nbytes(1 << 30) <= 4 * MiB


@pytest.mark.parametrize("bits", [3, 16, -1])
def test_other_bits_are_refused(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"8, 4, 2 or 1 bits an element, got {bits}"):
        encoded_nbytes(10, 4, bits)


@pytest.mark.parametrize(("numel", "itemsize"), [(-1, 4), (1, 0)])
def test_sizes_below_nothing_are_refused(numel: int, itemsize: int) -> None:
    with pytest.raises(ConfigError, match=f"got {numel} of {itemsize}"):
        encoded_nbytes(numel, itemsize, 8)


@pytest.mark.parametrize("group", [0, 4, 12, -8])
def test_a_group_is_whole_bytes_of_masks(group: int) -> None:
    with pytest.raises(ConfigError, match=f"multiple of 8 elements, got {group}"):
        Compression(group=group)
    with pytest.raises(ConfigError, match=f"multiple of 8 elements, got {group}"):
        encoded_nbytes(10, 4, 8, group)


def test_a_workspace_too_small_for_one_group_says_what_would_do() -> None:
    with pytest.raises(ConfigError, match="give 6144 or more"):
        Compression(workspace=6143)
    assert Compression(workspace=6144).piece == 256
