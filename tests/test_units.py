"""Bytes in, bytes out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.units import GIB, KIB, MIB, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("700MiB", 734_003_200),
        ("700 mib", 734_003_200),
        (" 1.5 GiB ", 1_610_612_736),
        ("2GB", 2_000_000_000),
        ("3 kb", 3_000),
        ("4KiB", 4_096),
        ("5MB", 5_000_000),
        ("1TiB", 1_099_511_627_776),
        ("1TB", 1_000_000_000_000),
        ("12B", 12),
        ("12", 12),
        (12, 12),
    ],
)
def test_sizes_are_read_with_binary_and_decimal_units(text: int | str, size: int) -> None:
    assert parse_bytes(text, setting="budget") == size


@pytest.mark.parametrize("text", ["12 bananas", "", "MiB", "-5MiB", "1e9", "1,5GiB", "1.GiB", "auto", "5 Mi B", "nan"])
def test_text_that_is_no_size_is_refused_with_the_units(text: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(text, setting="budget")
    assert str(caught.value) == (
        f"budget={text!r} is not a size. Write a number and a unit: B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, "
        "GB, TB (powers of 1000), such as '700MiB'."
    )


@pytest.mark.parametrize("value", [True, None, 1.5, b"1MiB"])
def test_values_that_are_no_text_and_no_int_are_refused(value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(value, setting="headroom")
    assert str(caught.value) == (f"headroom={value!r} is not a size. Write bytes as an int, or text such as '700MiB'.")


@pytest.mark.parametrize(("value", "size"), [(0, 0), (-5, -5), ("0MiB", 0), ("0.4B", 0)])
def test_a_size_of_nothing_is_refused(value: int | str, size: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_bytes(value, setting="budget")
    assert str(caught.value) == f"budget={value!r} is {size} bytes; it must be more than 0."


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (KIB, "1.000 KiB"),
        (1536, "1.500 KiB"),
        (10 * MIB, "10.00 MiB"),
        (734_003_200, "700.0 MiB"),
        (GIB, "1.000 GiB"),
        (3 * 1024**4, "3.000 TiB"),
        (-3 * MIB, "-3.000 MiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_binary_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(st.integers(min_value=1, max_value=2**50))
def test_what_is_shown_can_be_read_back_within_its_digits(size: int) -> None:
    # Four significant digits: the last is rounded, so the error is at most half of 1e-3.
    assert abs(parse_bytes(format_bytes(size), setting="budget") - size) <= max(1, size * 0.5e-3)
