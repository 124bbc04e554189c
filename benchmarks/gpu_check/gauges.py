"""What a device's allocator holds, behind one face for a GPU and for a CPU that counts like one.

Only a real device is asked here; ``CudaGauge`` has not been run on one yet.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from benchmarks.allocator.budget_allocator import BudgetAllocator, build_allocator


class Gauge(Protocol):
    """Bytes of torch's allocator on one device."""

    device: torch.device

    @property
    def live_bytes(self) -> int:
        """Allocated now."""

    @property
    def peak_bytes(self) -> int:
        """Most allocated at one moment since :meth:`reset`."""

    @property
    def peak_reserved_bytes(self) -> int | None:
        """Most reserved at one moment since :meth:`reset`; ``None`` on a CPU."""

    @property
    def used_bytes(self) -> int | None:
        """What the driver calls used now, by all processes; ``None`` on a CPU."""

    def reset(self) -> None:
        """Count peaks from here on."""

    def clean(self) -> None:
        """Give back what libraries and the cache hold."""

    def synchronize(self) -> None:
        """Wait until everything has run."""

    def limited(self, limit_bytes: int) -> AbstractContextManager[None]:
        """Let allocations fail within this context that would make the allocator hold more."""

    def counters(self) -> dict[str, int]:
        """How often it had to free its cache, and how often it gave up, since the process began."""


class CudaGauge:
    """Torch's caching allocator on a GPU."""

    def __init__(self, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.total_bytes = int(torch.cuda.get_device_properties(index).total_memory)

    @property
    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    @property
    def peak_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.device)

    @property
    def peak_reserved_bytes(self) -> int | None:
        return torch.cuda.max_memory_reserved(self.device)

    @property
    def used_bytes(self) -> int | None:
        free, total = torch.cuda.mem_get_info(self.device)
        return total - free

    def reset(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def clean(self) -> None:
        gc.collect()
        self.synchronize()
        # Missing in some builds; without it the workspaces of the case before stay, and count for this one too.
        clear: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        # The limit is set and not discovered: torch frees its cache, tries again, and raises before the driver would.
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / self.total_bytes), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    def counters(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats(self.device)
        return {"retries": int(stats.get("num_alloc_retries", 0)), "ooms": int(stats.get("num_ooms", 0))}


class HostGauge:
    """The counting allocator of the CPU; once made, it stays for the rest of the process."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._allocator = BudgetAllocator(build_allocator())
        self._allocator.install()

    @property
    def live_bytes(self) -> int:
        return self._allocator.live_bytes

    @property
    def peak_bytes(self) -> int:
        return self._allocator.peak_bytes

    @property
    def peak_reserved_bytes(self) -> int | None:
        return None

    @property
    def used_bytes(self) -> int | None:
        return None

    def reset(self) -> None:
        self._allocator.reset_peak()

    def clean(self) -> None:
        gc.collect()

    def synchronize(self) -> None:
        return None

    @contextlib.contextmanager
    def limited(self, limit_bytes: int) -> Iterator[None]:
        self._allocator.set_limit(limit_bytes)
        try:
            yield
        finally:
            self._allocator.set_limit(None)

    def counters(self) -> dict[str, int]:
        return {"retries": 0, "ooms": self._allocator.denied_count}


def gauge_of(device: str) -> Gauge:
    """The gauge of ``"cuda"`` or ``"cpu"``.

    Raises:
        RuntimeError: if there is no GPU, or on a CPU no compiler for the counting allocator.
    """
    if device == "cpu":
        return HostGauge()
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU that this process can use; --device cpu runs the check small.")
    return CudaGauge()
