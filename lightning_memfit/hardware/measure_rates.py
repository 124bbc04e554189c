"""Measures how fast this device is, in about a second, and remembers it.

Adapter for a private name of torch: ``torch._C._has_mkldnn``.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from filelock import FileLock

from lightning_memfit.hardware.call_seconds import call_seconds
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.rate_samples import Halves, quantised_samples, samples
from lightning_memfit.hardware.rates import RATES_VERSION, AllocatorRates, DeviceRates
from lightning_memfit.hardware.sampled_curves import Clock, sampled_curves, seconds_of

MOST_NOISE = 0.25
"""Rates measured under more disturbance are used, and said to be rough, but not kept: the next run measures anew."""


def measure_rates(
    *, cache_dir: Path | None, quantised: bool | None = None, clock: Clock = time.perf_counter
) -> DeviceRates:
    """Measure the device, or read what was measured before.

    The result is kept per processor, torch version, instruction set, number of threads, precision of float32 products
    and allocator, unless the machine was too disturbed. Random states, the switches of gradients and autocast, and the
    default dtype are left as they are.

    Args:
        cache_dir: directory of the results' files; ``None`` measures anew.
        quantised: measure the step of bitsandbytes too, for which the library is imported; ``None``: if it already is.
        clock: seconds. On a busy machine the processor's time measures one thread better than the wall's.
    """
    if quantised is None:
        quantised = "bitsandbytes" in sys.modules
    path = None if cache_dir is None else cache_dir / f"rates-{_environment_key(clock)}.json"
    known = _read_cache(path)
    if known is not None and not (quantised and _lacks_quantised(known)):
        return known
    with _undisturbed():
        measured = _measured(clock) if known is None else known
        if quantised:
            measured = _with_quantised(measured, clock)
    if path is not None and measured.noise <= MOST_NOISE:
        with suppress(OSError):  # a folder that cannot be written costs a second of measuring, nothing else
            _write_cache(path, measured)
    return measured


def forget_rates(cache_dir: Path, clock: Clock = time.perf_counter) -> None:
    """Let the next run measure anew: what is known was disproved.

    Args:
        cache_dir: as for :func:`measure_rates`.
        clock: the same.
    """
    with suppress(OSError):
        (cache_dir / f"rates-{_environment_key(clock)}.json").unlink(missing_ok=True)


def _measured(clock: Clock) -> DeviceRates:
    allocator = _allocator_rates(clock)
    halves = Halves()
    found = sampled_curves(halves, samples(), clock)
    return DeviceRates(
        device=detect_device("cpu").name,
        threads=torch.get_num_threads(),
        torch_version=str(torch.__version__),
        curves=found.curves,
        calls=call_seconds(halves, found.curves, clock),
        allocator=allocator,
        noise=found.noise + found.held_up,
        unmeasured=found.unmeasured,
    )


def _lacks_quantised(known: DeviceRates) -> bool:
    looked_at = [*known.curves, *(line.split()[0] for line in known.unmeasured)]
    return "quantised_optimizer" not in looked_at


def _with_quantised(known: DeviceRates, clock: Clock) -> DeviceRates:
    found = sampled_curves(Halves(), quantised_samples(), clock)
    return dataclasses.replace(
        known,
        curves={**known.curves, **found.curves},
        noise=max(known.noise, found.noise + found.held_up),
        unmeasured=(*known.unmeasured, *found.unmeasured),
    )


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Gradients on, autocast off, float32 by default, no garbage collection; all as before at the end."""
    dtype, collecting = torch.get_default_dtype(), gc.isenabled()
    gc.disable()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if collecting:
            gc.enable()


# What new memory costs

_LARGE_BLOCK_BYTES = 40 * 2**20
_SMALL_BLOCK_BYTES = 2**20
_GLIBC_LARGEST_BLOCK_BYTES = 32 * 2**20
"""Source: glibc ``malloc/malloc.c``, ``DEFAULT_MMAP_THRESHOLD_MAX``: larger blocks are always mapped anew."""


def _allocator_rates(clock: Clock) -> AllocatorRates:
    # Held meanwhile: what the process freed earlier must not serve the blocks that follow.
    occupied = torch.empty(_LARGE_BLOCK_BYTES, dtype=torch.uint8)
    first, *further = _fill_times(clock)
    largest: int | None = None
    if _comes_anew(_SMALL_BLOCK_BYTES, tries=10):
        largest = 0
    elif _comes_anew(_LARGE_BLOCK_BYTES, tries=3):
        largest = _GLIBC_LARGEST_BLOCK_BYTES
    del occupied
    return AllocatorRates(
        seconds_per_new_byte=max(0.0, first - min(further)) / _LARGE_BLOCK_BYTES, largest_kept_block_bytes=largest
    )


def _fill_times(clock: Clock) -> list[float]:
    """Seconds that writing to a large new block takes, the first time and further times."""
    block = torch.empty(_LARGE_BLOCK_BYTES, dtype=torch.uint8)
    return [seconds_of(lambda: block.fill_(1), 1, clock) for _ in range(4)]


def _comes_anew(size: int, *, tries: int) -> bool:
    """Whether a block that was freed is fetched from the system every time that it is asked for again."""
    try:
        import resource  # not on Windows
    except ImportError:
        return False
    fetched = []
    for _ in range(tries):
        block = torch.empty(size, dtype=torch.uint8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block.fill_(1)
        fetched.append((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
        del block
    # The first ones teach the allocator what size is common, and let its heap grow.
    return min(fetched) > size // 2


# The cache

_ALLOCATOR_SETTINGS = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_")


def _environment_key(clock: Clock) -> str:
    parts = (
        str(RATES_VERSION),
        detect_device("cpu").name,
        platform.machine(),
        str(torch.__version__),
        torch.backends.cpu.get_cpu_capability(),
        str(torch._C._has_mkldnn and torch.backends.mkldnn.enabled),
        torch.get_float32_matmul_precision(),
        str(torch.get_num_threads()),
        *(f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_ALLOCATOR_SETTINGS)),
        clock.__name__,
    )
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:12]


def _read_cache(path: Path | None) -> DeviceRates | None:
    if path is None or not path.exists():
        return None
    try:
        return DeviceRates.from_dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):  # ValueError: neither UTF-8 nor JSON, or no rates
        return None  # a damaged cache costs a second of measuring, nothing else


def _write_cache(path: Path, rates: DeviceRates) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(rates.to_dict()), encoding="utf-8")
        temporary.replace(path)
