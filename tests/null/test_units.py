"""Sizes, times and rates: what is read, what is refused, and that what is printed can be read again."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import UnitError, UsageError
from forebay.units import (
    GiB,
    KiB,
    MiB,
    TiB,
    format_bytes,
    format_count,
    format_enough,
    format_rate,
    format_seconds,
    parse_bytes,
    parse_disk,
    parse_disks,
)

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

BAD_SIZES = [
    "",
    "   ",
    "GiB",
    "-1GiB",
    "+1GiB",
    "nan",
    "nanGiB",
    "inf",
    "1e3",
    "1_000",
    "1,5GiB",
    "1..5GiB",
    "1.GiB",
    ".",
    "24G",
    "24Gib/s",
    "24 GiB 3",
    "24XiB",
    "1 G iB",
    "0x10",
    "\u0663GiB",
]


def test_constants() -> None:
    assert (KiB, MiB, GiB, TiB) == (2**10, 2**20, 2**30, 2**40)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 25_769_803_776),
        ("500MB", 500_000_000),
        ("1.5 GiB", 1_610_612_736),
        (".5KiB", 512),
        ("1024", 1024),
        (" 1tib\n", 1_099_511_627_776),
        ("0", 0),
        ("1.9B", 1),
        (4096, 4096),
        (0, 0),
    ],
)
def test_parse_bytes(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", BAD_SIZES)
def test_bad_size_is_refused_with_the_units_listed(text: str) -> None:
    with pytest.raises(UnitError) as caught:
        parse_bytes(text)
    message = str(caught.value)
    assert repr(text) in message
    assert all(unit in message for unit in UNITS)


@pytest.mark.parametrize("value", [-1, 1.5, math.nan, None, True, b"1GiB"])
def test_bad_type_or_sign_is_refused(value: object) -> None:
    with pytest.raises(UnitError, match="units are"):
        parse_bytes(value)  # type: ignore[arg-type]


def test_unit_error_is_a_usage_error_and_a_value_error() -> None:
    assert issubclass(UnitError, UsageError)
    assert issubclass(UnitError, ValueError)


@given(
    st.decimals(min_value=0, max_value=10**6, places=3, allow_nan=False, allow_infinity=False),
    st.sampled_from(sorted(UNITS)),
    st.sampled_from(["", " ", "\t"]),
    st.sampled_from([str, str.lower, str.upper]),
)
def test_parse_bytes_is_number_times_unit(number: Decimal, unit: str, gap: str, case: type[str]) -> None:
    assert parse_bytes(f"{number}{gap}{case(unit)}") == int(number * UNITS[unit])


@given(st.integers(min_value=0, max_value=2**50))
def test_what_is_printed_reads_as_the_same_size_to_one_decimal(nbytes: int) -> None:
    text = format_bytes(nbytes)
    number, unit = text.split()
    if unit == "B":
        assert parse_bytes(text) == nbytes < 1024
    elif unit in UNITS:
        assert 1.0 <= float(number) < 1024.0
        assert abs(parse_bytes(text) - nbytes) <= 0.05 * UNITS[unit] + 1
    else:
        assert nbytes >= 1023.9 * TiB


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (MiB - 1, "1.0 MiB"),
        (24 * GiB, "24.0 GiB"),
        (1023 * GiB, "1023.0 GiB"),
        (2048 * TiB, "2.0 PiB"),
        (-3 * MiB, "-3.0 MiB"),
        (10**400, "inf B"),
    ],
)
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_a_size_to_be_given_is_enough_and_no_more_than_a_tenth_too_much(nbytes: int) -> None:
    text = format_enough(nbytes)
    assert nbytes <= parse_bytes(text) <= nbytes + max(nbytes // 10, 1)
    assert len(text) <= len("1023.9GiB")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0B"), (1023, "1023B"), (1024, "1KiB"), (32 * MiB, "32MiB"), (32 * MiB + 1, "32.1MiB"), (MiB - 1, "1024KiB")],
)
def test_format_enough(nbytes: int, text: str) -> None:
    assert format_enough(nbytes) == text


@given(st.integers(min_value=0, max_value=2**60), st.integers(min_value=0, max_value=2**60))
def test_larger_sizes_never_print_smaller(a: int, b: int) -> None:
    def printed(nbytes: int) -> tuple[int, float]:
        number, unit = format_bytes(nbytes).split()
        return BINARY.index(unit), float(number)

    low, high = sorted((a, b))
    assert printed(low) <= printed(high)


@pytest.mark.parametrize(
    ("text", "path", "nbytes"),
    [
        ("/nvme", "/nvme", None),
        ("/nvme:1TiB", "/nvme", TiB),
        ("/nvme: 1.5 GiB", "/nvme", 1_610_612_736),
        ("/nvme:4096", "/nvme", 4096),
        ("relative/folder:2GB", "relative/folder", 2 * 10**9),
        ("/mnt/host:a/b", "/mnt/host:a/b", None),
        ("/mnt/host:a/b:2GiB", "/mnt/host:a/b", 2 * GiB),
        ("/mnt/12:30/runs", "/mnt/12:30/runs", None),
        ("/mnt/run:2024-01", "/mnt/run:2024-01", None),
        ("/mnt/host:8080/", "/mnt/host:8080/", None),
    ],
)
def test_parse_disk(text: str, path: str, nbytes: int | None) -> None:
    assert parse_disk(text) == (path, nbytes)


@pytest.mark.parametrize("text", ["", "  ", ":1GiB", "/nvme:", "/nvme:-1GiB", "/nvme:12XiB", "/nvme:1.2.3GiB"])
def test_bad_disk_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match="PATH or PATH:SIZE"):
        parse_disk(text)


@given(
    st.text(alphabet=st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1).filter(str.strip),
    st.integers(min_value=0, max_value=2**50),
)
def test_a_disk_with_a_size_gives_back_path_and_size(path: str, nbytes: int) -> None:
    assert parse_disk(f"{path}:{nbytes}") == (path, nbytes)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (1.5e-6, "1.50 us"),
        (0.00099999, "1.00 ms"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (4.561, "4.56 s"),
        (9.999, "10.0 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (125.0, "2 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (11_220.0, "3 h 07 min"),
        (-0.0123, "-12.3 ms"),
        (math.nan, "nan s"),
        (math.inf, "inf s"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(0.0, "0 B/s"), (1.2 * GiB, "1.2 GiB/s"), (1023.99 * KiB, "1.0 MiB/s"), (math.inf, "inf B/s")],
)
def test_format_rate(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (999, "999"), (1000, "1.0 k"), (999_999, "1.0 M"), (134_515_008, "134.5 M")]
)
def test_format_count(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(
    ("text", "folders"),
    [
        ("/a", (("/a", None),)),
        ("/a:1GiB,/b:2GiB", (("/a", GiB), ("/b", 2 * GiB))),
        ("a:1GiB,b:2GiB,c:3GiB", (("a", GiB), ("b", 2 * GiB), ("c", 3 * GiB))),
        ("/a,/b", (("/a", None), ("/b", None))),
        ("/a,b:1GiB", (("/a,b", GiB),)),  # neither a size before the comma nor a slash after it
        ("/a,b", (("/a,b", None),)),
    ],
)
def test_parse_disks(text: str, folders: tuple[tuple[str, int | None], ...]) -> None:
    assert parse_disks(text) == folders


@pytest.mark.parametrize("text", ["", "/a:1GiB,", "/a:1GiB,/b:12XiB"])
def test_bad_disks_are_refused(text: str) -> None:
    with pytest.raises(UnitError, match="PATH or PATH:SIZE"):
        parse_disks(text)
