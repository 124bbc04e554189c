"""The device itself: versions, what a context takes, and how fast products and copies are."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

import torch

from benchmarks.gpu_check.gauges import Gauge
from lightning_memfit import __version__
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.torch_driver import TorchDriver

_LIBRARIES = ("lightning", "pytorch-lightning", "numpy", "bitsandbytes", "transformers", "nvidia-ml-py", "rich")


def described(device: str) -> dict[str, Any]:
    """Names and versions of everything that numbers depend on, and the date."""
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "lightning_memfit": __version__,
        "torch": torch.__version__,
        "libraries": {name: _version(name) for name in _LIBRARIES},
    }
    if device != "cuda":
        return facts
    properties = torch.cuda.get_device_properties(0)
    return facts | {
        "gpu": properties.name,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "compute_capability": list(torch.cuda.get_device_capability(0)),
        "multiprocessors": properties.multi_processor_count,
        "total_bytes": int(properties.total_memory),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": TorchDriver().driver_version(),
    }


def spec(device: str) -> dict[str, Any]:
    """What the package finds out about the device."""
    return asdict(detect_device("cuda:0" if device == "cuda" else "cpu"))


def context(gauge: Gauge) -> dict[str, Any]:
    """What the process holds beside torch's allocator, as the libraries load one after the other.

    What other processes hold is in these numbers; their differences are this process's own.
    """
    device = gauge.device
    if device.type != "cuda":
        return {"steps": []}
    steps: list[dict[str, Any]] = []

    def note(what: str) -> None:
        gauge.synchronize()
        beside = (gauge.used_bytes or 0) - torch.cuda.memory_reserved(device)
        steps.append({"after": what, "used_beside_allocator_bytes": beside})

    torch.zeros(1, device=device)
    note("a first tensor")
    small = torch.ones(256, 256, device=device)
    small @ small
    note("a product in float32")
    small.bfloat16() @ small.bfloat16()
    note("a product in bfloat16")
    torch.nn.functional.linear(small, small, small[0])
    note("a linear layer")
    images = torch.ones(1, 8, 32, 32, device=device)
    torch.nn.functional.conv2d(images, torch.ones(8, 8, 3, 3, device=device))
    note("a convolution")
    query = torch.ones(1, 4, 64, 64, device=device, dtype=torch.bfloat16)
    torch.nn.functional.scaled_dot_product_attention(query, query, query)
    note("attention")
    return {"steps": steps}


def rates(gauge: Gauge, *, full: bool) -> list[dict[str, Any]]:
    """FLOP per second of a square product by dtype, bytes per second of a copy, seconds of a tiny operator."""
    device, side, elements = gauge.device, 8192 if full else 128, 2**28 if full else 2**16
    rows: list[dict[str, Any]] = []
    before = torch.get_float32_matmul_precision()
    kinds = [("fp32", torch.float32, "highest"), ("tf32", torch.float32, "high")]
    kinds += [("bf16", torch.bfloat16, "highest"), ("fp16", torch.float16, "highest")]
    for name, dtype, precision in kinds:
        if device.type == "cpu" and name in ("tf32", "fp16"):
            continue
        torch.set_float32_matmul_precision(precision)
        try:
            matrix = torch.ones(side, side, device=device, dtype=dtype)
            out = torch.empty_like(matrix)
            seconds = _fastest(gauge, lambda left=matrix, into=out: torch.mm(left, left, out=into))  # type: ignore[misc]
        finally:
            torch.set_float32_matmul_precision(before)
        rows.append({"what": f"product in {name}", "side": side, "measured_flops": 2 * side**3 / seconds})
        del matrix, out
    source = torch.ones(elements, device=device)
    target = torch.empty_like(source)
    seconds = _fastest(gauge, lambda: target.copy_(source))
    rows.append({"what": "copy", "measured_bytes_per_second": 2 * 4 * elements / seconds})
    tiny = torch.ones(1, device=device)
    repeated = 1000
    seconds = _fastest(gauge, lambda: [tiny.add_(1) for _ in range(repeated)])
    rows.append({"what": "tiny operator", "measured_seconds": seconds / repeated})
    return rows


def _fastest(gauge: Gauge, work: Callable[[], Any], times: int = 5) -> float:
    work()
    best = float("inf")
    for _ in range(times):
        gauge.synchronize()
        start = time.perf_counter()
        work()
        gauge.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
