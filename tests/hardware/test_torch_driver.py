"""The adapter for torch and NVML, with both of them made up."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_memfit.hardware.detect import detect_again, detect_device
from lightning_memfit.hardware.device import Neighbour
from lightning_memfit.hardware.torch_driver import TorchDriver
from lightning_memfit.units import MIB


class NVMLError(Exception):
    """As of the library."""


class FakeNvml(SimpleNamespace):
    """NVML with one GPU and one MIG instance; counts what is left initialised."""

    NVMLError = NVMLError
    NVML_DRIVER_WDDM = 0
    opened = 0
    fails: tuple[str, ...] = ()
    driver_model = 0
    compute = (SimpleNamespace(pid=7, usedGpuMemory=100), SimpleNamespace(pid=8, usedGpuMemory=None))

    def _may_fail(self, name: str) -> None:
        if name in self.fails:
            raise NVMLError(name)

    def nvmlInit(self) -> None:
        self._may_fail("init")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in ("GPU-aaaa", "MIG-mmmm"):
            raise NVMLError("not found")
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> Any:
        self._may_fail("processes")
        return self.compute

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> Any:
        return (SimpleNamespace(pid=3, usedGpuMemory=5),)

    def nvmlSystemGetDriverVersion(self) -> bytes:
        self._may_fail("version")
        return b"580.65.06"

    def nvmlDeviceGetCurrentDriverModel(self, handle: str) -> int:
        self._may_fail("model")
        return self.driver_model


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    return fake


@pytest.mark.parametrize("uuid", ["aaaa", "GPU-aaaa", "mmmm", "MIG-mmmm"])
def test_processes_are_found_by_any_form_of_the_identifier(nvml: FakeNvml, uuid: str) -> None:
    assert TorchDriver().processes(uuid) == (
        Neighbour(pid=3, held_bytes=5),
        Neighbour(pid=7, held_bytes=100),
        Neighbour(pid=8, held_bytes=None),
    )
    assert nvml.opened == 0


@pytest.mark.parametrize("fails", ["init", "processes"])
def test_what_nvml_refuses_is_unknown_and_it_is_shut_down(nvml: FakeNvml, fails: str) -> None:
    nvml.fails = (fails,)
    assert TorchDriver().processes("aaaa") is None
    assert nvml.opened == 0


def test_a_gpu_that_nvml_does_not_know_is_not_mistaken_for_another(nvml: FakeNvml) -> None:
    assert TorchDriver().processes("zzzz") is None


def test_without_the_library_processes_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert TorchDriver().processes("aaaa") is None


def test_wsl_spills_and_linux_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert not TorchDriver(root=tmp_path).spills("aaaa")
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/version").write_text("Linux version 5.15.167.4-microsoft-standard-WSL2")
    assert TorchDriver(root=tmp_path).spills("aaaa")
    (tmp_path / "proc/version").write_text("Linux version 6.8.0-51-generic")
    assert not TorchDriver(root=tmp_path).spills("aaaa")


@pytest.mark.parametrize(("model", "fails", "spills"), [(0, (), True), (1, (), False), (1, ("model",), True)])
def test_windows_spills_under_the_display_driver_model(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, model: int, fails: tuple[str, ...], spills: bool
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    nvml.driver_model, nvml.fails = model, fails
    assert TorchDriver().spills("aaaa") == spills


def test_the_allocators_settings_are_those_that_torch_reads_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    assert TorchDriver().allocator_settings() is None
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    assert TorchDriver().allocator_settings() == "max_split_size_mb:128"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    assert TorchDriver().allocator_settings() == "expandable_segments:True"


def test_torchs_properties_become_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="NVIDIA A10G", major=8, minor=6, total_memory=22587 * 2**20, uuid="599b5aa1", is_integrated=0
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    facts = TorchDriver().facts(0)
    assert (facts.name, facts.uuid, facts.compute_capability) == ("NVIDIA A10G", "599b5aa1", (8, 6))
    assert facts.gfx is None and not facts.is_integrated


def test_on_rocm_the_version_numbers_are_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(
        name="AMD Instinct MI300X", major=9, minor=4, total_memory=1, gcnArchName="gfx942:sramecc+:xnack-"
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    facts = TorchDriver().facts(0)
    assert (facts.gfx, facts.compute_capability, facts.uuid) == ("gfx942", None, None)


def test_free_reserved_and_share_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (3 + index, 10))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 4 + index)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: 0.5, raising=False)
    driver = TorchDriver()
    assert (driver.free_bytes(1), driver.reserved_bytes(1), driver.memory_fraction(1)) == (4, 5, 0.5)
    assert driver.pid() == os.getpid()
    monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")
    assert driver.memory_fraction(1) is None


def test_without_cuda_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert TorchDriver().device_count() == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch can use")
def test_a_real_gpu_keeps_its_capacity_while_this_process_takes_some_of_it() -> None:
    before = detect_device("cuda")
    kept = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
    after = detect_again(before)
    assert after.process_bytes >= before.process_bytes + kept.numel()
    assert after.available_bytes <= before.available_bytes - kept.numel()
    assert after.total_bytes is not None and after.capacity_bytes <= after.total_bytes
    # Other processes on a shared GPU come and go.
    assert abs(after.capacity_bytes - before.capacity_bytes) < after.total_bytes // 20


def test_the_drivers_version_is_nvmls(nvml: FakeNvml) -> None:
    assert TorchDriver().driver_version() == "580.65.06"
    assert nvml.opened == 0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build\n", "550.54.15"),
        (None, ""),
    ],
)
def test_without_nvml_the_drivers_version_is_that_of_its_file(
    nvml: FakeNvml, tmp_path: Path, text: str | None, version: str
) -> None:
    nvml.fails = ("version",)
    if text is not None:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").write_text(text)
    assert TorchDriver(root=tmp_path).driver_version() == version
