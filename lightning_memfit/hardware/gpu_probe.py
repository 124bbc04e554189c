"""Measures in about a second what a GPU of this machine does with products, copies and its context, and remembers it.

Nothing here has been run on a GPU yet: tests use a stand-in for the device.

Adapter for a private name of torch: ``torch._C._cuda_clearCublasWorkspaces``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from filelock import FileLock

from lightning_memfit.errors import is_out_of_memory
from lightning_memfit.hardware.detect_cuda import Driver, index_of
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.hardware.rates import DeviceRates
from lightning_memfit.hardware.roofline import SHARE_OF_BANDWIDTH, SHARE_OF_PEAK_FLOPS, roofline_rates
from lightning_memfit.hardware.torch_driver import TorchDriver

PROBE_VERSION = 1
"""Of what is kept."""
SIDE = 4096
"""Rows and columns of the products: 137 GFLOP each."""
COPIED_BYTES = 256 * 1024**2
"""Bytes of the copy, far more than any cache."""
_PRODUCTS = ("fp32", "tf32", "bf16", "fp16")
_TIMES = 5
_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class GpuProbe:
    """What was measured on one GPU."""

    gpu: str
    """The driver's identifier of the GPU, or its name."""
    driver: str
    """The driver's version; empty where it is not known."""
    torch_version: str
    """The version of torch."""
    context_bytes: int | None
    """What this process holds beside torch's allocator with cuBLAS and cuDNN loaded; ``None`` where nobody tells."""
    workspace_bytes: int | None
    """What cuBLAS keeps of torch's allocator in one thread; ``None`` where it could not be measured."""
    flops: Mapping[str, int] = field(hash=False)
    """FLOP per second that products reached, by ``fp32``, ``tf32``, ``bf16``, ``fp16``."""
    bandwidth_bytes_per_second: int | None
    """Bytes that a copy read and wrote per second; ``None`` where there was no room for it."""


class ProbedGpu(Protocol):
    """What the probe does on a device."""

    def product(self, kind: str, side: int) -> Callable[[], None]:
        """A square product; its arguments are made now."""

    def copy(self, num_bytes: int) -> Callable[[], None]:
        """A copy; both sides are made now."""

    def convolution(self) -> None:
        """One, so that its library is loaded."""

    def synchronize(self) -> None:
        """Wait until everything has run."""

    def workspace_bytes(self) -> int | None:
        """What a first product leaves allocated."""

    def context_bytes(self) -> int | None:
        """What this process holds on the device beside torch's allocator."""


def probe_gpu(
    device: DeviceSpec,
    *,
    driver_version: str,
    gpu: ProbedGpu,
    cache_dir: Path | None,
    clock: Callable[[], float] = time.perf_counter,
) -> GpuProbe:
    """Measure a GPU, or read what was measured before on the same GPU with the same driver and torch.

    Args:
        device: the GPU.
        driver_version: of the GPU's driver.
        gpu: the device at work.
        cache_dir: directory of the results' files; ``None`` measures anew.
        clock: seconds.
    """
    identity = (device.uuid or device.name, driver_version, str(torch.__version__))
    path = None if cache_dir is None else cache_dir / f"gpu-{_key(identity)}.json"
    known = _read(path)
    if known is not None:
        return known
    measured = _measured(identity, device, gpu, clock)
    if path is not None and _is_whole(measured):
        with suppress(OSError):  # a folder that cannot be written costs a second of measuring, nothing else
            _write(path, measured)
    return measured


def probe_present(device: DeviceSpec, *, cache_dir: Path | None, driver: TorchDriver | None = None) -> GpuProbe:
    """Probe a GPU of this machine; what the probe took of its memory is given back.

    Args:
        device: the GPU, as it was detected.
        cache_dir: keeps what was measured.
        driver: whom to ask about GPUs; torch and NVML if ``None``.

    Raises:
        ConfigurationError: if the GPU is gone.
    """
    driver = TorchDriver() if driver is None else driver
    index = driver.current_index() if device.uuid is None else index_of(device.uuid, driver=driver)
    gpu = TorchGpu(index, driver=driver, uuid=device.uuid)
    try:
        return probe_gpu(device, driver_version=driver.driver_version(), gpu=gpu, cache_dir=cache_dir)
    finally:
        torch.cuda.empty_cache()


def with_probe(device: DeviceSpec, probe: GpuProbe) -> DeviceSpec:
    """The device with what was measured of its context in place of what was assumed."""
    if probe.context_bytes is None:
        return device
    # What the context of a present GPU is taken to hold by now is in its capacity: no less may be taken off again.
    held = (device.context_low_bytes or 0) if device.is_present else 0
    context = max(probe.context_bytes, held)
    return replace(
        device,
        context_low_bytes=context,
        context_high_bytes=context,
        unknowns=tuple(word for word in device.unknowns if word != "context"),
    )


def probed_rates(probe: GpuProbe) -> DeviceRates | None:
    """Rates by the roofline through what was measured; ``None`` where products or the copy were not.

    Of operators other than products and copies the shares of the roofline are assumed.
    """
    bandwidth, flops = probe.bandwidth_bytes_per_second, probe.flops
    if bandwidth is None or not flops.get("fp32"):
        return None
    peaks = {kind: round(rate / SHARE_OF_PEAK_FLOPS) for kind, rate in flops.items()}
    rates = roofline_rates(probe.gpu, peaks, round(bandwidth / SHARE_OF_BANDWIDTH))
    words = "all but products and copies: rates are assumed shares of what those reached"
    return replace(rates, torch_version=probe.torch_version, unmeasured=(words,))


def _measured(
    identity: tuple[str, str, str], device: DeviceSpec, gpu: ProbedGpu, clock: Callable[[], float]
) -> GpuProbe:
    end = clock() + _SECONDS
    workspace = _unless_memory_is_short(gpu.workspace_bytes)
    flops: dict[str, int] = {}
    for kind in _PRODUCTS:
        if not _has(device, kind):
            continue
        seconds = _fastest(lambda kind=kind: gpu.product(kind, SIDE), gpu, end, clock)  # type: ignore[misc]
        if seconds:
            flops[kind] = round(2 * SIDE**3 / seconds)
    seconds = _fastest(lambda: gpu.copy(COPIED_BYTES), gpu, end, clock)

    def context_bytes() -> int | None:
        gpu.convolution()
        return gpu.context_bytes()

    return GpuProbe(
        gpu=identity[0],
        driver=identity[1],
        torch_version=identity[2],
        context_bytes=_unless_memory_is_short(context_bytes),
        workspace_bytes=workspace,
        flops=flops,
        bandwidth_bytes_per_second=round(2 * COPIED_BYTES / seconds) if seconds else None,
    )


def _unless_memory_is_short(measure: Callable[[], int | None]) -> int | None:
    try:
        return measure()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def _is_whole(probe: GpuProbe) -> bool:
    """Whether there was room for everything: what others left no room for is measured the next time."""
    return "fp32" in probe.flops and probe.bandwidth_bytes_per_second is not None


def _has(device: DeviceSpec, kind: str) -> bool:
    """Whether the GPU has units of a kind: emulated ones take long."""
    since_ampere = device.compute_capability is None or device.compute_capability >= (8, 0)
    return since_ampere if kind in ("tf32", "bf16") else True


def _fastest(
    make: Callable[[], Callable[[], None]], gpu: ProbedGpu, end: float, clock: Callable[[], float]
) -> float | None:
    """Seconds of the fastest of a few runs after one that is not counted; ``None`` where memory is short."""
    try:
        work = make()
        work()
        best: float | None = None
        for _ in range(_TIMES):
            gpu.synchronize()
            begin = clock()
            work()
            gpu.synchronize()
            seconds = clock() - begin
            best = seconds if best is None else min(best, seconds)
            if clock() >= end:
                break
        return best
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


class TorchGpu:
    """The probe's work through ``torch.cuda``.

    Args:
        index: torch's index of the GPU.
        driver: tells what processes hold.
        uuid: the driver's identifier of the GPU; ``None`` where it is not known.
    """

    def __init__(self, index: int, *, driver: Driver, uuid: str | None) -> None:
        self._index, self._driver, self._uuid = index, driver, uuid
        self._device = torch.device("cuda", index)

    def product(self, kind: str, side: int) -> Callable[[], None]:
        """A square product; its arguments are made now."""
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(kind, torch.float32)
        matrix = torch.ones(side, side, device=self._device, dtype=dtype)
        into = torch.empty_like(matrix)

        def multiply() -> None:
            # Not torch.get_float32_matmul_precision, which raises once the user has set what is set here.
            products = torch.backends.cuda.matmul
            before = products.fp32_precision
            products.fp32_precision = "tf32" if kind == "tf32" else "ieee"
            try:
                torch.mm(matrix, matrix, out=into)
            finally:
                products.fp32_precision = before

        return multiply

    def copy(self, num_bytes: int) -> Callable[[], None]:
        """A copy; both sides are made now."""
        source = torch.ones(num_bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)

        def copied() -> None:
            target.copy_(source)

        return copied

    def convolution(self) -> None:
        """One, so that its library is loaded."""
        images = torch.ones(1, 8, 32, 32, device=self._device)
        torch.nn.functional.conv2d(images, torch.ones(8, 8, 3, 3, device=self._device))

    def synchronize(self) -> None:
        """Wait until everything has run."""
        torch.cuda.synchronize(self._device)

    def workspace_bytes(self) -> int | None:
        """What a first product leaves allocated; ``None`` where this torch cannot forget earlier ones."""
        forget: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if forget is None:
            return None
        forget()
        before = torch.cuda.memory_allocated(self._device)
        matrix = torch.ones(256, 256, device=self._device)
        torch.mm(matrix, matrix)
        del matrix
        return int(torch.cuda.memory_allocated(self._device)) - before

    def context_bytes(self) -> int | None:
        """What this process holds on the device beside torch's allocator; ``None`` where NVML does not tell."""
        listed = None if self._uuid is None else self._driver.processes(self._uuid)
        own = next((each.held_bytes for each in listed or () if each.pid == self._driver.pid()), None)
        return None if own is None else max(0, own - self._driver.reserved_bytes(self._index))


def _key(identity: tuple[str, str, str]) -> str:
    return hashlib.sha256("|".join((str(PROBE_VERSION), *identity)).encode()).hexdigest()[:12]


def _read(path: Path | None) -> GpuProbe | None:
    if path is None or not path.exists():
        return None
    try:
        return GpuProbe(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # TypeError: other fields
        return None  # a damaged cache costs a second of measuring, nothing else


def _write(path: Path, probe: GpuProbe) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(str(path) + ".lock"):
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(probe)), encoding="utf-8")
        temporary.replace(path)
