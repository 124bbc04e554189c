"""Measure and limit the caching allocator of a GPU during the warm-up, and wait for the GPU.

Nothing here has been run on a GPU yet: tests use a stand-in for ``torch.cuda``.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from lightning_memfit.observe.meter import AllocationMeter, Meter
from lightning_memfit.plan import OperatorCost


class CudaMeter:
    """Reads the caching allocator's own peaks between enter and exit.

    They are those of the whole process on this GPU, as the budget is. Reading them begins with an empty cache, so that
    what is reserved is what the steps reserve, and begins torch's peak statistics anew: what the user read of them
    before is lost.

    Args:
        resident_bytes: not needed: the allocator counts what is there.
        device: the GPU.
        cuda: ``torch.cuda``, or what stands for it.

    Ignores: time by operator.
    """

    peak_rss_bytes: int | None = None
    costliest_ops: tuple[OperatorCost, ...] = ()

    def __init__(self, resident_bytes: int, *, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._allocated = 0
        self._reserved: int | None = None
        self._total: int | None = None

    @property
    def peak_allocated_bytes(self) -> int:
        """Most bytes of tensors and workspaces alive at one moment."""
        return self._allocated

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Most bytes that the allocator held; ``None`` before the end."""
        return self._reserved

    @property
    def device_total_bytes(self) -> int | None:
        """What the driver called used at the end, by every process and contexts included; ``None`` before."""
        return self._total

    def __enter__(self) -> Self:
        """Begin counting."""
        gc.collect()
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Read the peaks; after an error the device may not answer any more, and nothing is read."""
        if error is not None:
            return
        self._cuda.synchronize(self._device)
        self._allocated = int(self._cuda.max_memory_allocated(self._device))
        self._reserved = int(self._cuda.max_memory_reserved(self._device))
        free, total = self._cuda.mem_get_info(self._device)
        self._total = int(total - free)


@contextmanager
def memory_limited(device: torch.device, limit_bytes: int, *, cuda: Any = torch.cuda) -> Iterator[None]:
    """Let torch reserve no more than a limit on a GPU within this context.

    The limit is set, not discovered: beyond it torch frees its cache, tries again, and raises
    ``torch.OutOfMemoryError``, while neighbours keep what they have. A lower limit that was set before stays.

    Source: ``setMemoryFraction`` and ``alloc_block`` of ``c10/cuda/CUDACachingAllocator.cpp``.

    Args:
        device: the GPU.
        limit_bytes: most bytes that the allocator of this process may hold.
        cuda: ``torch.cuda``, or what stands for it.

    Ignores: a limit that was set before, where torch has no ``get_per_process_memory_fraction`` to tell it: afterwards
    there is none.
    """
    total = int(cuda.get_device_properties(device).total_memory)
    ask = getattr(cuda, "get_per_process_memory_fraction", None)
    before = 1.0 if ask is None else float(ask(device))
    share = limit_bytes / total
    if int(share * total) < limit_bytes:  # as torch computes it back: a byte less would fail a plan that just fits
        share = math.nextafter(share, math.inf)
    cuda.set_per_process_memory_fraction(min(before, share), device)
    try:
        yield
    finally:
        cuda.set_per_process_memory_fraction(before, device)


def wait_for(device: torch.device, *, cuda: Any = torch.cuda) -> None:
    """Wait until a GPU has done all that it was asked for, so that a clock sees its work; a host is never behind."""
    if device.type == "cuda":
        cuda.synchronize(device)


def meter_of(device: torch.device) -> Callable[[int], Meter]:
    """What measures steps on a device: makes a meter of the bytes that are resident at its start."""
    return partial(CudaMeter, device=device) if device.type == "cuda" else AllocationMeter


def limit_of(device: torch.device, budget_bytes: int) -> AbstractContextManager[None]:
    """The limit of a warm-up: the budget on a GPU; none on a host, where torch has none."""
    return memory_limited(device, budget_bytes) if device.type == "cuda" else nullcontext()
