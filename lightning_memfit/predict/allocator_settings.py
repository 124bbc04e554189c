"""The options of torch's CUDA caching allocator, read from the text of ``PYTORCH_CUDA_ALLOC_CONF``.

Source: pytorch/pytorch c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h@v2.13 (keys, defaults), and the
parser in c10/core/AllocatorConfig.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_memfit.errors import ConfigurationError, UnsupportedError

MIB = 2**20
LARGEST_LARGE_SEGMENT_REQUEST_BYTES = 10 * MIB
MIN_BLOCK_BYTES = 512
ROUNDUP_INTERVALS = 16
"""Powers of two with divisions of their own: from 1 MiB (and below) to 32 GiB (and above)."""

WITHOUT_EFFECT = (
    "graph_capture_record_stream_reuse",
    "pinned_free_catch_all",
    "pinned_max_cached_size_mb",
    "pinned_max_round_threshold_mb",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_background_threads",
    "pinned_use_cuda_host_register",
    "pinned_use_hip_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
)
"""Options of torch that change pinned host memory, locks or graph capture, but no block of one stream."""


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """What torch's caching allocator is told to do; the defaults are torch's."""

    expandable_segments: bool = False
    """One growing range of addresses for each pool, instead of one segment for each device allocation."""
    max_split_size_bytes: int | None = None
    """Blocks of this size or more are not split, and serve no smaller request; ``None``: every block may be split."""
    max_non_split_rounding_bytes: int | None = None
    """How much larger than its request an unsplit block may be; ``None``: ``large_segment_bytes``."""
    roundup_power2_divisions: int | tuple[tuple[int | None, int], ...] = 0
    """Parts between two powers of two that sizes are rounded up to; or (MiB, parts) pairs, ``None`` for ``>``."""
    garbage_collection_threshold: float | None = None
    """Share of the allowed memory above which cached segments are given back; works only with a memory fraction."""
    large_segment_bytes: int = 20 * MIB
    """Size of a segment for requests between 1 and 10 MiB, and the granule of large expandable segments."""
    per_process_memory_fraction: float = 1.0
    """Share of the device that torch allows itself; 1: no such limit."""
    without_effect: tuple[str, ...] = ()
    """Options given that change nothing here."""

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """The settings in ``key:value,key:value``, as torch reads them from the environment.

        Raises:
            ConfigurationError: if a key is unknown, or a value is missing or out of its range.
            UnsupportedError: if another allocator is asked for, or one that refuses instead of trying again.
        """
        options = _options(text)
        _refuse_unsupported(options)
        found: dict[str, Any] = {}
        # Two other options have the segment's size as their least value, wherever in the text it stands.
        large_segment = _mib("large_segment_size_mb", options.get("large_segment_size_mb", "20"), 11)
        for key, value in options.items():
            if key in _READERS:
                field, read = _READERS[key]
                found[field] = read(key, value, large_segment)
        ignored = tuple(key for key in options if key in WITHOUT_EFFECT or key in _ONE_CHOICE)
        return cls(**found, without_effect=ignored)

    @property
    def non_split_rounding_bytes(self) -> int:
        """How much larger than its request an unsplit block may be."""
        given = self.max_non_split_rounding_bytes
        return self.large_segment_bytes if given is None else given

    def divisions_by_interval(self) -> tuple[int, ...]:
        """Divisions for sizes below 2 MiB, 4 MiB, and so on; the last for 32 GiB and more."""
        given = self.roundup_power2_divisions
        if isinstance(given, int):
            return (given,) * ROUNDUP_INTERVALS
        divisions = [0] * ROUNDUP_INTERVALS
        last, is_first = 0, True
        for boundary_mib, parts in given:
            if boundary_mib is None:
                divisions[last + 1 :] = [parts] * (ROUNDUP_INTERVALS - last - 1)
                continue
            last = min(boundary_mib.bit_length() - 1, ROUNDUP_INTERVALS - 1)
            if is_first:  # the first also holds for everything below it
                divisions[:last] = [parts] * last
                is_first = False
            divisions[last] = parts
        return tuple(divisions)

    def rounded_bytes(self, size: int) -> int:
        """A requested size as the allocator gives it out; 0 for nothing.

        >>> settings = AllocatorSettings()
        >>> settings.rounded_bytes(0), settings.rounded_bytes(1), settings.rounded_bytes(513)
        (0, 512, 1024)
        """
        return rounded_size(size, self.divisions_by_interval()) if size else 0

    def allowed_bytes(self, device_total_bytes: int) -> int | None:
        """Bytes torch allows itself on a device; ``None`` without a memory fraction below 1."""
        if self.per_process_memory_fraction >= 1:
            return None
        return int(self.per_process_memory_fraction * device_total_bytes)


def rounded_size(size: int, divisions: Sequence[int]) -> int:
    """The size of the block for a request of at least one byte.

    Args:
        size: bytes asked for.
        divisions: of :meth:`AllocatorSettings.divisions_by_interval`.

    Source: ``DeviceCachingAllocator::round_size`` of ``c10/cuda/CUDACachingAllocator.cpp``.
    """
    if size < MIN_BLOCK_BYTES:
        return MIN_BLOCK_BYTES
    parts = divisions[min(max(size.bit_length() - MIB.bit_length(), 0), ROUNDUP_INTERVALS - 1)]
    step = MIN_BLOCK_BYTES
    if parts > 1 and size > MIN_BLOCK_BYTES * parts:
        step = (1 << (size.bit_length() - 1)) // parts
    return -(-size // step) * step


def _options(text: str) -> dict[str, str]:
    """Keys and the texts of their values; the commas within brackets separate nothing."""
    compact = re.sub(r"\s", "", text).removesuffix(",")
    options: dict[str, str] = {}
    for part in re.split(r",(?![^\[]*\])", compact) if compact else []:
        key, colon, value = part.partition(":")
        known = (*_READERS, *_ONE_CHOICE, *WITHOUT_EFFECT)
        if key not in known:
            raise _refusal(key, value, f"no option of torch 2.13's allocator; the options are {', '.join(known)}")
        if not colon or not value:
            raise _refusal(key, value, "without a value; write key:value")
        options[key] = value
    return options


def _refuse_unsupported(options: Mapping[str, str]) -> None:
    for key, (usable, other, why) in _ONE_CHOICE.items():
        value = options.get(key, usable)
        if value == other:
            raise UnsupportedError(f"{key}:{value} in the allocator's settings {why}; leave it out or use {usable!r}.")
        if value != usable:
            raise _refusal(key, value, f"not one of {usable}, {other}")


def _refusal(key: str, value: str, why: str) -> ConfigurationError:
    given = f"{key}:{value}" if value else key
    names = "PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF"
    return ConfigurationError(f"The allocator's settings ({names}) have {given!r}, {why}.")


def _mib(key: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise _refusal(key, value, f"not a whole number of MiB from {least}")
    return int(value) * MIB


def _read_mib(key: str, value: str, large_segment: int) -> int:
    return _mib(key, value, large_segment // MIB)


def _read_large_segment(key: str, value: str, large_segment: int) -> int:
    return large_segment


def _read_switch(key: str, value: str, large_segment: int) -> bool:
    if value not in ("True", "False"):
        raise _refusal(key, value, "not one of True, False")
    return value == "True"


def _read_threshold(key: str, value: str, large_segment: int) -> float:
    number = _number(value)
    if number is None or not 0 < number < 1:
        raise _refusal(key, value, "not a number above 0 and below 1")
    return number


def _read_fraction(key: str, value: str, large_segment: int) -> float:
    number = _number(value)
    if number is None or not 0 <= number <= 1:
        raise _refusal(key, value, "not a number from 0 to 1")
    return number


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _read_divisions(key: str, value: str, large_segment: int) -> int | tuple[tuple[int | None, int], ...]:
    why = "not a power of two, nor a list such as [256:1,512:2,>:8] of powers of two in MiB and divisions (0: none)"
    if not value.startswith("["):
        if not _is_power_of_two(value):
            raise _refusal(key, value, why)
        return int(value)
    pairs: list[tuple[int | None, int]] = []
    for item in value.removeprefix("[").removesuffix("]").split(","):
        boundary, _, parts = item.partition(":")
        if not value.endswith("]") or not (boundary == ">" or _is_power_of_two(boundary)):
            raise _refusal(key, value, why)
        if not (parts == "0" or _is_power_of_two(parts)):
            raise _refusal(key, value, why)
        pairs.append((None if boundary == ">" else int(boundary), int(parts)))
    return tuple(pairs)


def _is_power_of_two(value: str) -> bool:
    return value.isdecimal() and int(value).bit_count() == 1


_READERS: Mapping[str, tuple[str, Callable[[str, str, int], object]]] = {
    "expandable_segments": ("expandable_segments", _read_switch),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_threshold),
    "large_segment_size_mb": ("large_segment_bytes", _read_large_segment),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
    "max_split_size_mb": ("max_split_size_bytes", _read_mib),
    "per_process_memory_fraction": ("per_process_memory_fraction", _read_fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
}
_ONE_CHOICE: Mapping[str, tuple[str, str, str]] = {
    "backend": ("native", "cudaMallocAsync", "is another allocator, with other rules"),
    "throw_on_cudamalloc_oom": ("False", "True", "refuses requests before cached memory was given back"),
}
