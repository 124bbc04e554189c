"""What only a GPU can show: the limit holds, the meter reads what was taken, a fit is proven under its budget.

None of these has run yet. ``scripts/gpu_check.py`` measures more, and writes it down.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memfit import MemFit, detect_device
from lightning_memfit.hardware.gpu_probe import probe_present
from lightning_memfit.observe.cuda_memory import CudaMeter, memory_limited
from lightning_memfit.probers import GpuProber, gpu_prober
from lightning_memfit.targets import CudaTarget, target_of
from lightning_memfit.trace.timeline import Signature, TensorShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU that this process can use")

GPU = torch.device("cuda", 0)
MIB = 2**20


def test_torch_refuses_what_is_beyond_the_limit_and_not_afterwards() -> None:
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved(GPU)
    with memory_limited(GPU, held + 256 * MIB):
        torch.empty(128 * MIB, dtype=torch.uint8, device=GPU)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(512 * MIB, dtype=torch.uint8, device=GPU)
    torch.empty(512 * MIB, dtype=torch.uint8, device=GPU)


def test_the_meter_reads_the_allocators_peaks() -> None:
    before = torch.cuda.memory_allocated(GPU)
    with CudaMeter(0, device=GPU) as meter:
        torch.empty(100 * MIB, dtype=torch.uint8, device=GPU)
    assert meter.peak_allocated_bytes == before + 100 * MIB
    assert meter.peak_reserved_bytes is not None and meter.peak_reserved_bytes >= meter.peak_allocated_bytes
    assert meter.device_total_bytes is not None and meter.device_total_bytes > meter.peak_reserved_bytes


def test_the_probe_measures_what_the_vendor_does_not_exceed() -> None:
    device = detect_device("cuda:0")
    probe = probe_present(device, cache_dir=None)
    assert probe.flops["fp32"] > 0
    for kind, rate in probe.flops.items():
        # Boosted clocks and TF32 in place of fp32 are the two ways to be above the vendor's number.
        assert rate < 1.2 * device.peak_flops.get(kind, rate)


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return self.layers(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def test_a_fit_is_proven_under_its_budget(tmp_path: Path) -> None:
    memfit = MemFit(budget=900 * MIB, cache_dir=tmp_path, verbose=False)
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        max_steps=2,
        plugins=[memfit],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Model(), DataLoader(torch.zeros(16384, 2048), batch_size=8192))
    assert trainer.global_step == 2
    assert memfit.measured is not None and memfit.measured.measured_peak_reserved_bytes is not None
    assert memfit.measured.measured_peak_reserved_bytes <= 900 * MIB
    assert torch.cuda.get_per_process_memory_fraction(GPU) == 1.0


def test_operators_are_run_in_a_process_that_leaves_nothing_behind() -> None:
    device = detect_device("cuda:0")
    target = target_of(device)
    assert isinstance(target, CudaTarget)
    image = TensorShape("float32", (8, 64, 56, 56), (200704, 3136, 56, 1), None)
    call = Signature("aten.gelu.default", (image,), {"approximate": "none"})
    free = torch.cuda.mem_get_info(GPU)[0]
    prober = gpu_prober(device, target, cache_dir=None)
    assert isinstance(prober, GpuProber)
    found = prober.probe([call])
    assert found.notes == ()
    # The output, 8 x 64 x 56 x 56 numbers of 4 bytes, and nothing beside it.
    assert found.results[0].output_bytes == {0: 6_422_528}
    assert found.results[0].temporary_bytes == 0
    prober.close()
    assert torch.cuda.mem_get_info(GPU)[0] >= free - 64 * MIB
