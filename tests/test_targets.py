"""What steps are forecast for. Run: ``pytest tests/test_targets.py``."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_memfit import forecast, make_plan
from lightning_memfit.errors import ConfigurationError, NoFeasiblePlanError, TraceError, UnsupportedError
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.hardware.catalog import catalog, catalog_device
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.plan import BatchSplit, Candidate, balanced_slices
from lightning_memfit.predict.cuda_temporaries import CudaArchitecture
from lightning_memfit.targets import CudaTarget, FormulaProber, HostTarget, target_of
from lightning_memfit.trace.op_probe import Probes
from lightning_memfit.trace.timeline import ProbeResult, Signature, TensorShape
from lightning_memfit.trace.training_step import program_of

MIB, GIB = 2**20, 2**30


class Net(nn.Module):
    """Eight blocks of two layers, 512 features wide: 4.2 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Dropout(0.1), nn.Linear(512, 512)) for _ in range(8)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def loss(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(module(batch), batch)


BATCH = torch.zeros(4096, 512)


def test_the_host_counts_what_is_allocated() -> None:
    target = target_of(detect_device("cpu"))
    assert isinstance(target, HostTarget)
    assert (target.rules.device_type, target.kept_bytes) == ("cpu", 0)


def test_the_environment_decides_on_cublas_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    # Two of 8,519,680 bytes, or of 16 x 8 KiB.
    assert target_of(catalog_device("a100-40gb")).kept_bytes == 17_039_360
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert target_of(catalog_device("a100-40gb")).kept_bytes == 262_144


def test_a_gpu_of_the_catalogue_has_rules_workspaces_and_an_allocator() -> None:
    target = target_of(catalog_device("a100-40gb"))
    assert isinstance(target, CudaTarget)
    assert target.architecture.compute_capability == (8, 0)
    assert target.architecture.multiprocessors == 108
    # Two workspaces of 8,519,680 bytes, which are whole blocks of 512 bytes.
    assert target.kept_bytes == 2 * 8_519_680
    assert not target.settings.expandable_segments


def test_the_allocator_is_set_up_as_the_environment_says() -> None:
    device = dataclasses.replace(catalog_device("a100-40gb"), allocator_settings="expandable_segments:True")
    target = target_of(device)
    assert isinstance(target, CudaTarget)
    assert target.settings.expandable_segments
    with pytest.raises(UnsupportedError):
        target_of(dataclasses.replace(device, allocator_settings="backend:cudaMallocAsync"))


def test_deterministic_algorithms_are_counted_where_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    target = target_of(catalog_device("a100-40gb"))
    assert isinstance(target, CudaTarget)
    assert target.architecture.deterministic_algorithms


def test_every_gpu_of_the_catalogue_can_be_forecast_for() -> None:
    for model in catalog():
        assert target_of(catalog_device(model.key)).rules.device_type == "cuda"


def test_formulas_answer_for_the_signatures_that_they_know() -> None:
    architecture = CudaArchitecture(compute_capability=(8, 0), multiprocessors=108)
    rows = TensorShape("float32", (8192, 768), (768, 1), None)
    signatures = [
        Signature("aten.sum.dim_IntList", (rows, (0,), True), {}),
        Signature("aten.gelu.default", (rows,), {}),
    ]
    found = FormulaProber(architecture).probe(signatures)
    assert set(found.results) == {0}
    assert found.results[0].temporary_bytes > 0
    assert found.failures == {}


def test_a_forecast_for_a_gpu_has_three_answers() -> None:
    memory = forecast(Net(), BATCH, loss=loss, optimizer=torch.optim.AdamW, device="a100-40gb")
    assert memory.peak_reserved_bytes is not None
    assert memory.minimum_feasible_bytes is not None
    assert memory.peak_allocated_bytes <= memory.minimum_feasible_bytes + 2 * MIB
    assert memory.minimum_feasible_bytes <= memory.peak_reserved_bytes
    assert sum(memory.by_category.values()) == memory.peak_allocated_bytes
    assert memory.least_bytes == memory.minimum_feasible_bytes


def test_mixed_precision_and_recomputing_take_less_on_a_gpu_too() -> None:
    peaks = [
        forecast(
            Net(), BATCH, loss=loss, optimizer=torch.optim.AdamW, device="a100-40gb",
            precision=precision, activation_checkpointing=checkpointing,
        ).peak_allocated_bytes
        for precision, checkpointing in [("32-true", "none"), ("bf16-mixed", "none"), ("bf16-mixed", "blocks")]
    ]  # fmt: skip
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 3


def test_a_gradient_scaler_takes_only_numbers_beside_the_step() -> None:
    peaks = [
        forecast(
            Net(), BATCH, loss=loss, optimizer=torch.optim.AdamW, device="a100-40gb", precision=precision
        ).peak_allocated_bytes
        for precision in ("bf16-mixed", "16-mixed")
    ]
    assert 0 <= peaks[1] - peaks[0] <= 10 * 512


def test_an_undivided_forecast_is_that_of_its_trace() -> None:
    # Forecasts for GPUs replay a derived timeline; slices of other sizes are read off a line between two of them.
    for micro_batch_size in (None, 1024, 683):
        memory = forecast(
            Net(), BATCH, loss=loss, optimizer=torch.optim.AdamW, device="a100-40gb", micro_batch_size=micro_batch_size
        )
        traced = _traced(micro_batch_size)
        assert memory.peak_allocated_bytes == pytest.approx(traced, rel=1e-3)


def _traced(micro_batch_size: int | None) -> int:
    target = target_of(catalog_device("a100-40gb"))
    assert isinstance(target, CudaTarget)
    forecaster = Forecaster(
        program_of(Net(), loss=loss, optimizer=torch.optim.AdamW),
        BATCH,
        prober=FormulaProber(target.architecture),
        target=target,
    )
    slices = 1 if micro_batch_size is None else -(-4096 // micro_batch_size)
    split = BatchSplit(effective_batch_size=4096, loader_batch_size=4096, slice_sizes=balanced_slices(4096, slices))
    return forecaster._traced(Candidate(precision="32-true", split=split)).memory.peak_allocated_bytes


def test_a_plan_for_a_gpu_uses_what_the_device_has() -> None:
    plan = make_plan(Net(), BATCH, effective_batch_size=8192, loss=loss, optimizer=torch.optim.AdamW, device="t4")
    assert plan.forecast.candidate.split.accumulate_grad_batches == 2
    assert plan.forecast.candidate.precision in ("32-true", "16-mixed")  # a T4 has no units for bfloat16
    assert plan.forecast.predicted_peak_bytes <= plan.budget.budget_bytes
    assert plan.forecast.predicted_step_seconds is not None
    assert not plan.device.is_present


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(NoFeasiblePlanError, match=r"No plan fits the budget of 40\.00 MiB"):
        make_plan(
            Net(), BATCH, effective_batch_size=4096, loss=loss, optimizer=torch.optim.AdamW, device="t4", budget="40MiB"
        )


def test_less_budget_never_gives_a_faster_plan() -> None:
    seconds = []
    for budget in ("400MiB", "220MiB", "150MiB"):
        plan = make_plan(
            Net(), BATCH, effective_batch_size=4096, loss=loss, optimizer=torch.optim.AdamW, device="a100-40gb",
            budget=budget, precision="32-true",
        )  # fmt: skip
        assert plan.forecast.predicted_peak_bytes <= plan.budget.budget_bytes
        seconds.append(plan.forecast.predicted_step_seconds)
    assert seconds == sorted(seconds)


def test_a_step_that_cannot_be_traced_is_not_measured_on_the_host_instead() -> None:
    def by_value(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return module(batch[batch[:, 0] > 0]).sum()

    with pytest.raises(TraceError, match="without the GPU nothing can be measured instead"):
        forecast(Net(), BATCH, loss=by_value, optimizer=torch.optim.AdamW, device="a100-40gb")


def test_an_unknown_device_names_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="could mean 4 GPUs of the catalogue"):
        forecast(Net(), BATCH, loss=loss, optimizer=torch.optim.AdamW, device="a100")


def test_rounding_that_the_allocator_is_told_to_do_is_in_the_allocated_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    # 3,000 x 3,000 parameters: 36,000,000 bytes lie between 32 and 64 MiB, and become 48 MiB if rounded to halves.
    peaks = []
    for text in ("", "roundup_power2_divisions:2"):
        monkeypatch.setenv("PYTORCH_ALLOC_CONF", text)
        memory = forecast(
            nn.Linear(3000, 3000, bias=False),
            torch.zeros(4, 3000),
            loss=lambda module, x: module(x).sum(),
            optimizer=torch.optim.AdamW,
            device="a100-40gb",
        )
        peaks.append(memory.by_category["parameters"])
        assert memory.peak_reserved_bytes is not None
        assert memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    assert peaks == [36_000_256, 48 * MIB]


def test_a_memory_fraction_in_the_allocators_settings_caps_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "per_process_memory_fraction:0.25")
    device = detect_device("a100-40gb")
    whole = catalog_device("a100-40gb").capacity_bytes
    assert device.context_high_bytes is not None
    assert device.capacity_bytes == whole // 4 + device.context_high_bytes  # which is no memory of torch's
    target = target_of(device)
    assert isinstance(target, CudaTarget)
    assert target.allowed_bytes == whole // 4


def test_convolutions_are_named_as_left_out() -> None:
    target = target_of(catalog_device("a100-40gb"))
    assert isinstance(target, CudaTarget)
    forecaster = Forecaster(
        program_of(nn.Conv2d(64, 64, 3), loss=lambda module, x: module(x).sum(), optimizer=torch.optim.SGD),
        torch.zeros(64, 64, 64, 64),
        prober=FormulaProber(target.architecture),
        target=target,
    )
    split = BatchSplit(effective_batch_size=64, loader_batch_size=64, slice_sizes=(64,))
    notes = forecaster(Candidate(precision="32-true", split=split)).notes
    assert any(note.startswith("aten.convolution.default could not be probed (its library decides") for note in notes)


class OnlyThisSize:
    """Knows of one operator that it hides a number of bytes, at one size of its first dimension."""

    def __init__(self, rows: int, hidden_bytes: int) -> None:
        self.rows, self.hidden_bytes = rows, hidden_bytes

    def probe(self, signatures: Sequence[Signature]) -> Probes:
        """Of matrix products with so many rows."""
        results = {
            number: ProbeResult(peak_bytes=0, output_bytes={}, hidden_bytes=self.hidden_bytes)
            for number, signature in enumerate(signatures)
            if signature.op == "aten.addmm.default" and signature.args[1].size[0] == self.rows
        }
        return Probes(results=results)


def test_gpus_that_differ_only_at_a_size_that_was_not_recorded_do_not_share_its_replay() -> None:
    # Recorded are 4,096 and 1,024 samples; of 683 only the second GPU hides anything, and more than all else together.
    target = target_of(catalog_device("a100-40gb"))
    program = program_of(Net(), loss=loss, optimizer=torch.optim.SGD)
    first = Forecaster(program, BATCH, prober=OnlyThisSize(683, 0), target=target)
    second = first.for_device(target, prober=OnlyThisSize(683, GIB), rates=None)
    split = BatchSplit(effective_batch_size=4096, loader_batch_size=4096, slice_sizes=balanced_slices(4096, 6))
    candidate = Candidate(precision="32-true", split=split)
    peaks = [forecaster(candidate).memory.peak_allocated_bytes for forecaster in (first, second, first)]
    assert peaks[0] == peaks[2] < GIB < peaks[1]
