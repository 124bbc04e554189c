"""What the probe of a GPU makes of times and bytes; a stand-in does the work, in seconds that are known."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_memfit.hardware.catalog import catalog_device
from lightning_memfit.hardware.gpu_probe import COPIED_BYTES, SIDE, GpuProbe, probe_gpu, probed_rates, with_probe

A100 = catalog_device("a100-40gb")
T4 = catalog_device("t4")


class FakeGpu:
    """Products take a millisecond in 16 bits, two in TF32 and eight in fp32; a copy takes half a millisecond."""

    SECONDS = {"fp32": 0.008, "tf32": 0.002, "bf16": 0.001, "fp16": 0.001}  # noqa: RUF012

    def __init__(self, *, room_bytes: int = 2**40, context: int | None = 500_000_000) -> None:
        self.now = 0.0
        self.runs = 0
        self._room, self._context = room_bytes, context

    def clock(self) -> float:
        return self.now

    def _taking(self, seconds: float, num_bytes: int) -> Callable[[], None]:
        if num_bytes > self._room:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        def work() -> None:
            self.now += seconds
            self.runs += 1

        return work

    def product(self, kind: str, side: int) -> Callable[[], None]:
        return self._taking(self.SECONDS[kind], 8 * side * side)

    def copy(self, num_bytes: int) -> Callable[[], None]:
        return self._taking(0.0005, 2 * num_bytes)

    def convolution(self) -> None:
        self.runs += 1

    def synchronize(self) -> None:
        """Nothing runs behind."""

    def workspace_bytes(self) -> int | None:
        return 8_519_680

    def context_bytes(self) -> int | None:
        return self._context


def probed(gpu: FakeGpu, cache_dir: Path | None = None, driver: str = "580.1") -> GpuProbe:
    return probe_gpu(A100, driver_version=driver, gpu=gpu, cache_dir=cache_dir, clock=gpu.clock)


def test_rates_are_work_over_seconds() -> None:
    probe = probed(FakeGpu())
    # 2 x 4096^3 = 137,438,953,472 FLOP; in 8 ms 17.2 TFLOP/s, in 1 ms 137.4. The copy reads and writes
    # 268,435,456 bytes each in 0.5 ms: 1.07 TB/s.
    assert SIDE == 4096 and COPIED_BYTES == 268_435_456
    assert probe.flops["fp32"] == pytest.approx(17.18e12, rel=1e-3)
    assert probe.flops["bf16"] == pytest.approx(137.4e12, rel=1e-3)
    assert probe.bandwidth_bytes_per_second == pytest.approx(1.0737e12, rel=1e-3)
    assert (probe.context_bytes, probe.workspace_bytes) == (500_000_000, 8_519_680)


def test_a_gpu_without_bf16_units_is_not_asked_for_them() -> None:
    gpu = FakeGpu()
    probe = probe_gpu(T4, driver_version="1", gpu=gpu, cache_dir=None, clock=gpu.clock)
    assert set(probe.flops) == {"fp32", "fp16"}


def test_the_second_run_reads_what_the_first_measured(tmp_path: Path) -> None:
    first, again = FakeGpu(), FakeGpu()
    assert probed(first, tmp_path) == probed(again, tmp_path)
    assert first.runs > 0 == again.runs


def test_another_driver_and_a_damaged_file_are_measured_anew(tmp_path: Path) -> None:
    probed(FakeGpu(), tmp_path)
    other = FakeGpu()
    probed(other, tmp_path, driver="590.1")
    assert other.runs > 0
    for path in tmp_path.glob("gpu-*.json"):
        path.write_text('{"gpu": 1}')
    damaged = FakeGpu()
    probed(damaged, tmp_path)
    assert damaged.runs > 0


def test_where_memory_is_short_nothing_is_made_up() -> None:
    probe = probed(FakeGpu(room_bytes=1000))
    assert (probe.flops, probe.bandwidth_bytes_per_second) == ({}, None)
    assert probed_rates(probe) is None


def test_what_there_was_no_room_for_is_measured_the_next_time(tmp_path: Path) -> None:
    probed(FakeGpu(room_bytes=1000), tmp_path)
    assert probed(FakeGpu(), tmp_path).bandwidth_bytes_per_second is not None


def test_a_context_that_has_grown_since_the_probe_is_taken_off_whole() -> None:
    grown = dataclasses.replace(A100, is_present=True, context_low_bytes=900_000_000, context_high_bytes=950_000_000)
    assert with_probe(grown, probed(FakeGpu())).context_high_bytes == 900_000_000  # the probe saw 500,000,000


def test_a_full_gpu_is_told_by_its_budget_and_not_by_the_probe() -> None:
    class Full(FakeGpu):
        def workspace_bytes(self) -> int | None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        def convolution(self) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    probe = probed(Full(room_bytes=1000))
    assert (probe.workspace_bytes, probe.context_bytes) == (None, None)
    assert with_probe(A100, probe) is A100


def test_other_errors_pass_through() -> None:
    class Broken(FakeGpu):
        def copy(self, num_bytes: int) -> Callable[[], None]:
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="device-side assert"):
        probed(Broken())


def test_a_measured_context_takes_the_place_of_an_assumed_one() -> None:
    assert A100.context_low_bytes != 500_000_000
    spec = with_probe(A100, probed(FakeGpu()))
    assert (spec.context_low_bytes, spec.context_high_bytes) == (500_000_000, 500_000_000)
    assert "context" not in spec.unknowns
    assert with_probe(A100, probed(FakeGpu(context=None))) is A100


def test_predicted_products_take_as_long_as_measured_ones() -> None:
    rates = probed_rates(probed(FakeGpu()))
    assert rates is not None
    curve = rates.curves["matmul"]["bfloat16"]
    assert curve.seconds[-1] / curve.work[-1] * 2 * SIDE**3 == pytest.approx(0.001, rel=1e-3)
    assert rates.unmeasured[0].startswith("all but products and copies")
