"""The meter and the limit of a GPU ask ``torch.cuda`` for the right things, and give back what they change.

A stand-in answers for ``torch.cuda``: what a real one does is for ``scripts/gpu_check.py`` to find out.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memfit.observe.cuda_memory import CudaMeter, limit_of, memory_limited, meter_of, wait_for
from lightning_memfit.observe.meter import AllocationMeter

GPU = torch.device("cuda", 0)
GIB = 2**30


class FakeCuda:
    """A GPU of 80 GiB of which 20 GiB are used."""

    def __init__(self, fraction: float = 1.0) -> None:
        self.fraction = fraction
        self.asked: list[str] = []
        self.fractions: list[float] = []

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(total_memory=80 * GIB)

    def get_per_process_memory_fraction(self, device: torch.device) -> float:
        return self.fraction

    def set_per_process_memory_fraction(self, fraction: float, device: torch.device) -> None:
        self.fraction = fraction
        self.fractions.append(fraction)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        self.asked.append("mem_get_info")
        return 60 * GIB, 80 * GIB

    def max_memory_allocated(self, device: torch.device) -> int:
        self.asked.append("max_memory_allocated")
        return 7 * GIB

    def max_memory_reserved(self, device: torch.device) -> int:
        self.asked.append("max_memory_reserved")
        return 8 * GIB

    def empty_cache(self) -> None:
        self.asked.append("empty_cache")

    def synchronize(self, device: torch.device) -> None:
        self.asked.append("synchronize")

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.asked.append("reset_peak_memory_stats")


def test_the_three_statistics_are_read_after_everything_has_run() -> None:
    """Reported in hydra-ecosystem/hydra#2631: peaks are of the process until they are reset."""
    cuda = FakeCuda()
    with CudaMeter(123, device=GPU, cuda=cuda) as meter:
        assert cuda.asked == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
        cuda.asked.clear()
    assert cuda.asked == ["synchronize", "max_memory_allocated", "max_memory_reserved", "mem_get_info"]
    assert (meter.peak_allocated_bytes, meter.peak_reserved_bytes) == (7 * GIB, 8 * GIB)
    assert meter.device_total_bytes == 20 * GIB  # 80 GiB in all, 60 GiB free


def test_after_an_error_the_device_is_not_asked() -> None:
    cuda = FakeCuda()
    with pytest.raises(torch.OutOfMemoryError), CudaMeter(0, device=GPU, cuda=cuda) as meter:
        cuda.asked.clear()
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert cuda.asked == []
    assert meter.peak_reserved_bytes is None


def test_a_gpu_is_waited_for_and_a_host_is_not() -> None:
    cuda = FakeCuda()
    wait_for(torch.device("cpu"), cuda=cuda)
    assert cuda.asked == []
    wait_for(GPU, cuda=cuda)
    assert cuda.asked == ["synchronize"]


def test_the_limit_is_a_share_of_the_total_and_is_taken_back() -> None:
    cuda = FakeCuda()
    with memory_limited(GPU, 20 * GIB, cuda=cuda):
        assert cuda.fraction == 0.25
    assert cuda.fraction == 1.0


def test_the_limit_is_not_a_byte_short_of_what_was_asked_for() -> None:
    cuda = FakeCuda()
    for limit in range(20 * GIB, 20 * GIB + 100):
        with memory_limited(GPU, limit, cuda=cuda):
            assert int(cuda.fraction * 80 * GIB) == limit


def test_the_limit_is_taken_back_after_an_error() -> None:
    cuda = FakeCuda(fraction=0.5)
    with pytest.raises(torch.OutOfMemoryError), memory_limited(GPU, 20 * GIB, cuda=cuda):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert cuda.fractions == [0.25, 0.5]


def test_a_lower_limit_that_was_there_before_stays() -> None:
    cuda = FakeCuda(fraction=0.125)
    with memory_limited(GPU, 20 * GIB, cuda=cuda):
        assert cuda.fraction == 0.125
    assert cuda.fraction == 0.125


def test_a_torch_that_does_not_tell_its_limit_has_none_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    monkeypatch.delattr(FakeCuda, "get_per_process_memory_fraction")
    with memory_limited(GPU, 100 * GIB, cuda=cuda):
        assert cuda.fraction == 1.0  # more than the device has is no limit
    assert cuda.fractions == [1.0, 1.0]


def test_everything_that_is_asked_for_exists_in_torch() -> None:
    for name in ("get_device_properties", "set_per_process_memory_fraction", "get_per_process_memory_fraction"):
        assert hasattr(torch.cuda, name)
    for name in ("mem_get_info", "max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
        assert hasattr(torch.cuda, name)


def test_a_host_is_measured_by_the_profiler_and_has_no_limit() -> None:
    assert meter_of(torch.device("cpu")) is AllocationMeter
    with limit_of(torch.device("cpu"), 1):
        torch.zeros(1000)
    made = meter_of(GPU)(5)
    assert isinstance(made, CudaMeter)
