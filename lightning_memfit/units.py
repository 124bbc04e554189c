"""Bytes in, bytes out: the one parser and the one renderer."""

from __future__ import annotations

import re

from lightning_memfit.errors import ConfigurationError

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024**4,
    "kb": 1000,
    "mb": 1000**2,
    "gb": 1000**3,
    "tb": 1000**4,
}
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(value: int | str, *, setting: str) -> int:
    """Turn ``"700MiB"``, ``"1.5 GiB"``, ``"2GB"`` or a number of bytes into bytes.

    Binary units (KiB, MiB, GiB, TiB) are powers of 1024, decimal ones (KB, MB, GB, TB) powers of 1000.

    Args:
        value: the text or the number of bytes.
        setting: the name of the setting, for the message.

    Raises:
        ConfigurationError: if the text is no size, or the size is not positive.

    >>> parse_bytes("1.5 KiB", setting="budget")
    1536
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigurationError(f"{setting}={value!r} is not a size. Write bytes as an int, or text such as '700MiB'.")
    if isinstance(value, int):
        size = value
    else:
        match = _PATTERN.fullmatch(value)
        if match is None or match.group(2).lower() not in _FACTORS:
            raise ConfigurationError(
                f"{setting}={value!r} is not a size. Write a number and a unit: "
                "B, KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (powers of 1000), such as '700MiB'."
            )
        size = int(float(match.group(1)) * _FACTORS[match.group(2).lower()])
    if size <= 0:
        raise ConfigurationError(f"{setting}={value!r} is {size} bytes; it must be more than 0.")
    return size


def format_bytes(size: int) -> str:
    """Render bytes with a binary unit and four significant digits.

    >>> format_bytes(1536), format_bytes(-10 * 1024**2), format_bytes(12), format_bytes(1010 * 1024**2)
    ('1.500 KiB', '-10.00 MiB', '12 B', '1010 MiB')
    """
    sign, magnitude = ("-" if size < 0 else ""), abs(size)
    for unit, factor in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= factor:
            number = magnitude / factor
            digits = 3 if number < 9.9995 else 2 if number < 99.995 else 1 if number < 999.95 else 0
            return f"{sign}{number:.{digits}f} {unit}"
    return f"{sign}{magnitude} B"


def format_seconds(seconds: float) -> str:
    """Render seconds with three significant digits, from 1,000 on whole.

    >>> [format_seconds(each) for each in (1.5, 0.0123, 0.0000456, 0.0, 1800)]
    ['1.5 s', '12.3 ms', '45.6 us', '0 s', '1,800 s']
    """
    if abs(seconds) >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-6:.3g} us"
