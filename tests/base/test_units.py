"""Sizes, rates and times have one grammar, and each is formatted in one way."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from mbaas.base import units


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (2048, 2048),
        (2e9, 2_000_000_000),
        ("7", 7),
        ("2 GiB", 2 << 30),
        ("500MB", 5 * 10**8),
        ("1.5 KiB", 1536),
        ("3k", 3000),
        ("1e9", 10**9),
        ("107.7 KB", 107_700),
        (" 4 tib ", 4 << 40),
    ],
)
def test_sizes(text: object, size_bytes: int) -> None:
    found = units.parse_bytes(text)
    assert found == size_bytes
    assert isinstance(found, int)


@pytest.mark.parametrize(
    "text",
    [
        -1,
        True,
        1.5,
        "1.5",
        "",
        "1e999 GB",
        10**400,
        "GiB",
        "2 iB",
        "2 GiB each",
        "-2 GiB",
        "3 MB/s",
        None,
        [1],
        math.inf,
        math.nan,
    ],
)
def test_no_sizes(text: object) -> None:
    assert units.parse_bytes(text) is None


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("330 MB/s", 330e6),
        ("330 MB", 330e6),
        ("1 GiB / s", 2.0**30),
        ("5", 5.0),
        (7, 7.0),
        ("1.5", 1.5),
        (math.inf, math.inf),
    ],
)
def test_rates(text: object, bytes_per_s: float) -> None:
    assert units.parse_bytes_per_s(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("text", ["fast", "3 MB/h", "/s", "1e400 MB/s", "9e307 TB", True, -1, None, math.nan])
def test_no_rates(text: object) -> None:
    assert units.parse_bytes_per_s(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1.6 ms", 0.0016),
        ("30 us", 30e-6),
        ("30µs", 30e-6),
        ("2s", 2),
        ("2 min", 120),
        ("1 h", 3600),
        ("1 d", 86400),
        ("3.2 days", 276_480),
        ("3", 3),
        (0.5, 0.5),
        (0, 0),
    ],
)
def test_times(text: object, seconds: float) -> None:
    assert units.parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["soon", "3 weeks", "-1 s", "1 s 2", "1e999", "1e305 days", True, -1, math.nan, None])
def test_no_times(text: object) -> None:
    assert units.parse_seconds(text) is None


def test_fields_of_models_take_what_people_write() -> None:
    assert TypeAdapter(units.Bytes).validate_python("2 GiB") == 2 << 30
    assert TypeAdapter(units.Seconds).validate_json('"2 min"', strict=True) == 120.0
    with pytest.raises(ValidationError, match=r"must be a rate such as '330 MB/s'"):
        TypeAdapter(units.BytesPerS).validate_python("fast")
    assert {"type": "string"} in TypeAdapter(units.Bytes).json_schema()["anyOf"]


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (812, "812 B"),
        (999.6, "1 kB"),
        (9_633_792, "9.63 MB"),
        (40e9, "40 GB"),
        (999_499_999, "999 MB"),
        (999_500_000, "1 GB"),
        (3e18, "3,000 PB"),
    ],
)
def test_a_size_is_written_with_three_digits(size_bytes: float, text: str) -> None:
    assert units.size(size_bytes) == text
    assert units.rate(size_bytes) == f"{text}/s"


@given(st.integers(0, 10**17))
def test_a_size_that_was_written_is_read_again(size_bytes: int) -> None:
    assert units.parse_bytes(units.size(size_bytes)) == pytest.approx(size_bytes, rel=0.005)


@given(st.floats(1e-6, 1e7))
def test_a_time_that_was_written_is_read_again(value: float) -> None:
    assert units.parse_seconds(units.seconds(value)) == pytest.approx(value, rel=0.0051)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (30e-6, "30 µs"),
        (0.0016, "1.6 ms"),
        (1.0, "1 s"),
        (0.99999, "1 s"),
        (41, "41 s"),
        (119, "119 s"),
        (130, "130 s"),
        (130.4, "2.17 min"),
        (720, "12 min"),
        (27_000, "7.5 h"),
        (276_480, "3.2 days"),
    ],
)
def test_how_long_something_takes(value: float, text: str) -> None:
    assert units.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text", "short"),
    [
        (0, "0 s", "0 s"),
        (59.9, "59 s", "59 s"),
        (185, "3 min 05 s", "3 min"),
        (7620, "2 h 07 min", "2 h"),
        (273_600, "3 d 04 h", "3 d"),
    ],
)
def test_how_long_something_runs(value: float, text: str, short: str) -> None:
    assert units.duration(value) == text
    assert units.duration(value, parts=1) == short


@pytest.mark.parametrize(
    ("fraction", "text", "signed"),
    [(0, "0 %", "+0 %"), (0.12, "12 %", "+12 %"), (0.004, "0.4 %", "+0.4 %"), (-0.031, "-3.1 %", "-3.1 %")],
)
def test_shares(fraction: float, text: str, signed: str) -> None:
    assert units.percent(fraction) == text
    assert units.percent(fraction, signed=True) == signed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.01234, "0.0123"),
        (4.5, "4.5"),
        (99.96, "100"),
        (12_345, "12,300"),
        (math.inf, "inf"),
        (-2.5, "-2.5"),
    ],
)
def test_numbers_have_three_significant_digits(value: float, text: str) -> None:
    assert units.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.05, "0.05"),
        (30.0, "30"),
        (0.1 + 0.2, "0.3"),
        (2**31 - 1, "2,147,483,647"),
        (1e9, "1,000,000,000"),
        (math.inf, "inf"),
    ],
)
def test_a_bound_is_written_with_all_its_digits(value: float, text: str) -> None:
    assert units.exact(value) == text


def test_things_are_counted() -> None:
    assert units.counted(1, "worker") == "1 worker"
    assert units.counted(3000, "worker") == "3,000 workers"
    assert units.count(12_345.4) == "12,345"


def test_an_interval_has_two_ends_or_says_nothing() -> None:
    assert units.interval(21, 25, units.seconds) == "21 s to 25 s"
    assert units.interval(3, 4) == "3 to 4"
    assert units.interval(3.001, 3.002) == ""
