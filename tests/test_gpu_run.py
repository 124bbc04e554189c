"""A run on a GPU, as far as it can be followed without one: who forecasts, which budget, where batches wait."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_memfit import MemFit, fit_session, preparation, probers, real_steps
from lightning_memfit.batch_functions import BatchFunctions
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.fit_session import FitSession
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.hardware.catalog import catalog_device
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.hardware.gpu_probe import GpuProbe
from lightning_memfit.observe.meter import AllocationMeter
from lightning_memfit.plan import BatchSplit, Candidate, PlanRequest
from lightning_memfit.preconditions import check_trainer
from lightning_memfit.predict.budget import form_budget
from lightning_memfit.preparation import Preparation
from lightning_memfit.probers import Probers
from lightning_memfit.ranks import OneRank
from lightning_memfit.real_steps import RealSteps
from lightning_memfit.run_forecaster import forecaster_of
from lightning_memfit.trace.op_probe import Probes
from lightning_memfit.trace.timeline import ProbeResult
from lightning_memfit.validate import warmup
from lightning_memfit.validate.arrived_batch import arrived_batch

A100 = catalog_device("a100-40gb")
GIB = 2**30


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1000, 1000)
        self.seen: list[torch.device] = []

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.seen.append(device)
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def training_step(self, batch: Tensor, batch_idx: int = 0) -> Tensor:
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def attached(module: LightningModule) -> Trainer:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.strategy._lightning_module = module
    module._trainer = trainer
    trainer._data_connector.attach_data(module, train_dataloaders=None)
    return trainer


def run_forecaster(module: LightningModule, device: DeviceSpec, probing: Probers | None = None) -> Any:
    return forecaster_of(
        attached(module),
        module,
        torch.zeros(64, 1000),
        functions=BatchFunctions(split_batch=None, loss_weight="samples"),
        probers=probing,
        resident_batches=1,
        waiting_batch=None,
        rates=None,
        callback_bytes=0,
        device=device,
    )


def candidate() -> Candidate:
    return Candidate(
        precision="32-true", split=BatchSplit(effective_batch_size=64, loader_batch_size=64, slice_sizes=(64,))
    )


def test_a_run_on_a_gpu_is_forecast_by_its_rules_and_its_allocator() -> None:
    forecaster = run_forecaster(Model(), A100)
    assert isinstance(forecaster, Forecaster)
    memory = forecaster(candidate()).memory
    # 1,001,000 parameters: 4,004,000 bytes in fp32. AdamW's foreach step holds parameters, gradients and two states,
    # and makes one list of temporaries at least: 20 bytes per parameter; two workspaces of cuBLAS, 8,519,680 each.
    assert memory.peak_allocated_bytes > 5 * 4_004_000 + 2 * 8_519_680
    assert memory.peak_reserved_bytes is not None and memory.peak_reserved_bytes >= memory.peak_allocated_bytes
    assert memory.minimum_feasible_bytes is not None


class Process:
    """Stands for the process on a GPU; finds that a product takes a gigabyte inside, or fails at all."""

    def __init__(self, error: Exception | None = None) -> None:
        self.done: list[str] = []
        self._error = error

    def probe(self, signatures: Any) -> Probes:
        if self._error is not None:
            raise self._error
        products = [n for n, signature in enumerate(signatures) if signature.op.startswith("aten.mm")]
        found = {n: ProbeResult(peak_bytes=0, output_bytes={}) for n in range(len(signatures))}
        return Probes(results=found | {n: ProbeResult(peak_bytes=GIB, output_bytes={}) for n in products})

    def end_process(self) -> None:
        self.done.append("ended")

    def close(self) -> None:
        self.done.append("closed")


def forecast_on_a_present_gpu(monkeypatch: pytest.MonkeyPatch, process: Process) -> Any:
    monkeypatch.setattr(probers, "process_on", lambda *_: process)
    present = replace(A100, is_present=True, uuid="1234-56")
    return run_forecaster(Model(), present, Probers(cache_dir=None))(candidate())


def test_on_a_gpu_that_is_here_operators_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    by_formulas = run_forecaster(Model(), A100)(candidate()).memory
    seen = forecast_on_a_present_gpu(monkeypatch, Process())
    assert seen.memory.peak_allocated_bytes > GIB > by_formulas.peak_allocated_bytes
    assert "aten.mm" in str(seen.memory.peak_op)
    assert not any("could not be run on the GPU" in note for note in seen.notes)


def test_a_probe_that_fails_leaves_the_forecast_to_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    by_formulas = run_forecaster(Model(), A100)(candidate()).memory
    found = forecast_on_a_present_gpu(monkeypatch, Process(RuntimeError("no kernel image")))
    assert found.memory == by_formulas
    assert (
        "operators could not be run on the GPU (RuntimeError: no kernel image): formulas stand for what they take "
        "inside"
    ) in found.notes


def test_the_probing_process_has_left_the_gpu_when_it_is_looked_at_and_when_plans_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    session = FitSession(
        attached(Model()),
        Model(),
        PlanRequest(),
        BatchFunctions(split_batch=None, loss_weight="samples"),
        worst_batch=None,
        cache_dir=None,
        ranks=OneRank(),
    )
    prepared: Any = SimpleNamespace(
        looked_at_again=lambda: done.append("looked at") or prepared,
        validation_batch=lambda: None,
        device=A100,
        budget=SimpleNamespace(budget_bytes=1),
    )
    plan: Any = SimpleNamespace(device=A100)

    def prove(planning: Any, steps: Any, validation: Any) -> Any:
        steps._leave_gpu()
        done.append("ran")
        return SimpleNamespace(prove=lambda plan, report: (plan, None))

    monkeypatch.setattr(session._probers, "leave_gpu", lambda: done.append("left"))
    monkeypatch.setattr(session._probers, "close", lambda: done.append("closed"))
    monkeypatch.setattr(fit_session, "Proving", prove)
    monkeypatch.setattr(session, "_rates_doubted", lambda plan, measurement: plan)
    monkeypatch.setattr(session, "_remember", lambda planning, plan: None)
    session._planning, session.plan = SimpleNamespace(prepared=prepared), plan  # type: ignore[assignment]
    session._prepared = prepared
    session.prove(lambda *_: None, lambda _: None)
    assert done == ["left", "looked at", "left", "ran", "closed"]


def test_the_probing_process_has_left_the_gpu_when_the_module_is_moved_there(monkeypatch: pytest.MonkeyPatch) -> None:
    session = FitSession(
        attached(Model()),
        Model(),
        PlanRequest(),
        BatchFunctions(split_batch=None, loss_weight="samples"),
        worst_batch=None,
        cache_dir=None,
        ranks=OneRank(),
    )
    done: list[str] = []

    def search(*_: Any, **__: Any) -> Any:
        done.append("searched")
        raise ConfigurationError("nothing to plan")

    monkeypatch.setattr(session._probers, "start", lambda: None)
    monkeypatch.setattr(session._probers, "leave_gpu", lambda: done.append("left"))
    monkeypatch.setattr(fit_session.TrainLoader, "request", lambda trainer: None)
    monkeypatch.setattr(fit_session, "prepare", search)
    with pytest.raises(ConfigurationError, match="nothing to plan"):
        session.make_plan(lambda _: None)
    assert done == ["searched", "left"]


def test_every_warm_up_begins_without_a_probing_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    steps = RealSteps(
        prepared(A100),
        None,  # type: ignore[arg-type]
        None,
        ranks=OneRank(),
        leave_gpu=lambda: done.append("left"),
    )
    monkeypatch.setattr(Preparation, "loaders_in_sight", lambda _: done.append("begun") or pytest.fail("begun"))
    with pytest.raises(BaseException, match="begun"):
        steps.warm_up(SimpleNamespace(candidate=candidate()), timed=False)  # type: ignore[arg-type]
    assert done == ["left", "begun"]


def test_a_host_is_forecast_as_before() -> None:
    host = replace(A100, kind="cpu", compute_capability=None)
    memory = run_forecaster(Model(), host)(candidate()).memory
    assert memory.peak_reserved_bytes is None


def test_manual_optimization_on_a_gpu_is_refused() -> None:
    module = Model()
    module.automatic_optimization = False
    with pytest.raises(UnsupportedError, match=r"^Model has automatic_optimization=False, and .* for a GPU"):
        run_forecaster(module, A100)


def test_a_batch_that_is_planned_with_stays_on_the_host() -> None:
    module = Model()
    trainer = attached(module)
    trainer.strategy._root_device = torch.device("meta")  # stands for a GPU
    arrived = arrived_batch(trainer, module, torch.ones(2, 2))
    assert arrived.failure is None
    assert arrived.batch.device.type == "cpu"


def test_the_clock_of_a_warm_up_waits_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    run: Any = SimpleNamespace(
        trainer=SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cuda", 0))),
        _training_batch=lambda batch, index: seen.append("batch"),
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: seen.append(f"waited for {device}"))
    assert warmup._WarmUp._timed_batch(run, None, 0) >= 0
    assert seen == ["waited for cuda:0", "batch", "waited for cuda:0"]


def test_one_gpu_is_driven() -> None:
    strategy: Any = SingleDeviceStrategy(device="cuda:0")
    trainer: Any = SimpleNamespace(strategy=strategy, num_devices=1, num_nodes=1, callbacks=())
    check_trainer(trainer, PlanRequest())


def test_a_pinned_precision_is_mixed_on_the_device_of_the_run() -> None:
    memfit = MemFit(precision="bf16-mixed")
    assert memfit.delegate.device == "cpu"
    trainer = attached(Model())
    memfit._fit_delegate_to(trainer)
    before = memfit.delegate
    trainer.strategy._root_device = torch.device("cuda", 0)
    memfit._fit_delegate_to(trainer)
    assert memfit.delegate.device == "cuda"
    assert memfit.delegate is not before


def prepared(device: DeviceSpec) -> Preparation:
    values: dict[str, Any] = dict.fromkeys(Preparation.__dataclass_fields__)
    request = PlanRequest()
    values |= {
        "request": request,
        "module": Model(),
        "batch": torch.zeros(64, 1000),
        "device": device,
        "budget": form_budget(device, request, resident_bytes=0),
        "forecaster": SimpleNamespace(callback_bytes=0),
    }
    return Preparation(**values)


def test_the_budget_is_formed_again_of_what_a_neighbour_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reported in hydra-ecosystem/hydra#1331."""
    monkeypatch.setattr(
        preparation, "detect_again", lambda device: replace(device, capacity_bytes=device.capacity_bytes - 5 * GIB)
    )
    first = prepared(A100)
    again = first.looked_at_again()
    # Headroom is 5 % of the capacity: 5 GiB less capacity are 4.75 GiB less budget, but for a rounded byte.
    assert first.budget.budget_bytes - again.budget.budget_bytes == pytest.approx(4.75 * GIB, abs=1)
    assert again.device.capacity_bytes == A100.capacity_bytes - 5 * GIB


def test_a_measured_context_counts_again_in_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparation, "detect_again", lambda device: A100)
    probe = GpuProbe(
        gpu="GPU-1",
        driver="580.1",
        torch_version="2.13",
        context_bytes=300_000_000,
        workspace_bytes=None,
        flops={},
        bandwidth_bytes_per_second=None,
    )
    again = replace(prepared(A100), probe=probe).looked_at_again()
    assert again.budget.non_torch_bytes == 300_000_000


def test_a_host_is_not_looked_at_again() -> None:
    host = prepared(replace(A100, kind="cpu", process_bytes=GIB))
    assert host.looked_at_again() is host


def test_what_a_gpus_meter_reads_is_measured_limited_and_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Meter(AllocationMeter):
        peak_reserved_bytes = 3 * GIB
        device_total_bytes = 4 * GIB

    limits: list[tuple[str, int]] = []

    @contextmanager
    def limited(device: torch.device, budget_bytes: int) -> Iterator[None]:
        limits.append(("begin", budget_bytes))
        yield
        limits.append(("end", budget_bytes))

    monkeypatch.setattr(real_steps, "meter_of", lambda device: Meter)
    monkeypatch.setattr(real_steps, "limit_of", limited)
    monkeypatch.setattr(preparation, "measure_rates", lambda cache_dir: None)
    memfit = MemFit(budget=GIB, optimizer_implementation="as-configured", cache_dir=tmp_path)
    trainer = Trainer(
        accelerator="cpu",
        max_steps=1,
        plugins=[memfit],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(Model(), DataLoader(torch.zeros(8, 1000), batch_size=4))
    assert memfit.measured is not None
    assert memfit.measured.measured_peak_reserved_bytes == 3 * GIB
    assert memfit.measured.measured_device_total_bytes == 4 * GIB
    assert limits[:2] == [("begin", GIB), ("end", GIB)]
    report = capsys.readouterr().out
    assert "reserved peak, training" in report
    assert "device total, all processes" in report
