"""Adapter for ``torch.cuda`` and, where it is installed, for NVIDIA's management library (``nvidia-ml-py``)."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from lightning_memfit.hardware.detect_cuda import GpuFacts
from lightning_memfit.hardware.device import Neighbour

# pytorch/pytorch c10/core/AllocatorConfig.h: the first that is set counts.
_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class TorchDriver:
    """Asks torch about the GPU, and NVML about other processes and the driver's model.

    Reading what is free makes a CUDA context in this process, if it has none.
    """

    def __init__(self, *, root: Path = Path("/")) -> None:
        """Ask about this machine.

        Args:
            root: the directory that holds ``proc``.
        """
        self._root = root

    def device_count(self) -> int:
        """GPUs that this process can use; 0 without CUDA."""
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def current_index(self) -> int:
        """The one that torch uses where none is named."""
        return torch.cuda.current_device()

    def facts(self, index: int) -> GpuFacts:
        """What does not change."""
        properties = torch.cuda.get_device_properties(index)
        is_amd = torch.version.hip is not None
        uuid = getattr(properties, "uuid", None)
        return GpuFacts(
            name=properties.name,
            total_bytes=int(properties.total_memory),
            uuid=None if uuid is None else str(uuid),
            multiprocessors=getattr(properties, "multi_processor_count", None),
            compute_capability=None if is_amd else (int(properties.major), int(properties.minor)),
            gfx=properties.gcnArchName.split(":")[0] if is_amd else None,
            is_integrated=bool(getattr(properties, "is_integrated", 0)),
        )

    def free_bytes(self, index: int) -> int:
        """What the driver calls free now."""
        return int(torch.cuda.mem_get_info(index)[0])

    def reserved_bytes(self, index: int) -> int:
        """What torch's allocator of this process has reserved."""
        return int(torch.cuda.memory_reserved(index))

    def memory_fraction(self, index: int) -> float | None:
        """The share of the total that torch may reserve; ``None`` where this torch does not say."""
        ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        return None if ask is None else float(ask(index))

    def processes(self, uuid: str) -> tuple[Neighbour, ...] | None:
        """All processes on the GPU, this one too; ``None`` where NVML is missing or refuses."""
        with _nvml() as nvml:
            handle = None if nvml is None else _handle(nvml, uuid)
            if nvml is None or handle is None:
                return None
            try:
                listed = [
                    *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
                    *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
                ]
            except nvml.NVMLError:
                return None
        held: dict[int, int | None] = {}
        for each in listed:  # one that computes and draws is listed twice, and perhaps with its bytes once
            pid, size = int(each.pid), each.usedGpuMemory
            held[pid] = held.get(pid) if size is None else int(size)
        return tuple(Neighbour(pid=pid, held_bytes=size) for pid, size in sorted(held.items()))

    def spills(self, uuid: str | None) -> bool:
        """Whether the driver moves what does not fit to the host: under Windows' display driver model and in WSL."""
        if sys.platform != "win32":
            return "microsoft" in _text(self._root / "proc/version").lower()
        with _nvml() as nvml:
            handle = None if nvml is None or uuid is None else _handle(nvml, uuid)
            if nvml is None or handle is None:
                return True
            try:
                return bool(nvml.nvmlDeviceGetCurrentDriverModel(handle) == nvml.NVML_DRIVER_WDDM)
            except nvml.NVMLError:
                return True

    def allocator_settings(self) -> str | None:
        """What the environment tells torch's allocator."""
        return next((os.environ[name] for name in _SETTINGS if os.environ.get(name)), None)

    def pid(self) -> int:
        """This process."""
        return os.getpid()

    def driver_version(self) -> str:
        """The version of NVIDIA's driver, by NVML or by its file under ``/proc``; empty where neither tells."""
        with _nvml() as nvml:
            if nvml is not None:
                with suppress(nvml.NVMLError):
                    found = nvml.nvmlSystemGetDriverVersion()
                    return found.decode() if isinstance(found, bytes) else str(found)
        told = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text(self._root / "proc/driver/nvidia/version"))
        return "" if told is None else told.group(1)


@contextmanager
def _nvml() -> Iterator[Any]:
    """NVML, initialised for the duration; ``None`` where it or the driver is missing."""
    try:
        import pynvml  # optional: lightning-memfit[cuda]
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _handle(nvml: Any, uuid: str) -> Any:
    """NVML's handle of a GPU or MIG instance; torch's text of the identifier lacks the prefix."""
    names = (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"GPU-{uuid}", f"MIG-{uuid}")
    for name in names:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError:
            continue
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
