"""The accuracy cases of one model: predicts each, then measures a plain fit, then lets MemFit plan the same fit.

    python -m benchmarks.accuracy_case "gpt 32-true none adamw" ... --library PATH --cache-dir DIRECTORY

Started by ``benchmarks.accuracy_cpu`` in a process for each model. Prints one JSON object for each case.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from benchmarks.allocator.budget_allocator import BudgetAllocator
from benchmarks.zoo import ZooCase, ZooModule, build, select_cases
from benchmarks.zoo_models.workload import Batch
from lightning_memfit import MemFit, Plan, forecast
from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.batch_tree import batch_size_of
from lightning_memfit.plan import Measurement, MemoryBreakdown
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.units import GIB

OPTIMIZER_STEPS = 3
"""The first creates the optimizer's states; from the second on the step is in the steady state."""
_AMPLE_BUDGET = 64 * GIB  # so that the plan is the case itself on every machine


@dataclass(frozen=True, kw_only=True)
class CaseResult:
    """What was predicted and measured for one case. All peaks are bytes of the torch allocator."""

    label: str
    """Of the case."""
    model: str
    """Key of ``zoo_models.MODELS``."""
    optimizer_states: str
    """Format of the optimizer's states: ``"as-configured"`` or ``"8bit"``."""
    implementation: str
    """How the optimizer's step is run: ``"as-configured"``, ``"foreach"`` or ``"fused"``."""
    measured_peak_bytes: int
    """Exact peak of a plain Trainer's fit above what was alive before module and batch were built."""
    predicted_raw_bytes: int
    """With operator probes, before anything ran."""
    predicted_unprobed_bytes: int
    """Without operator probes."""
    predicted_after_warm_up_bytes: int
    """By MemFit in a fit of its own: raw, and corrected by what its warm-up measured."""
    warm_up_peak_bytes: int
    """What that warm-up measured, by the profiler's memory events."""
    peak_phase: str
    """Of the predicted step."""
    peak_op: str | None
    """The operator at the predicted peak."""
    left_by_fit_bytes: int
    """Alive after the plain fit beyond module, gradients, states and batch: held by Lightning's loops."""
    notes: tuple[str, ...]
    """What the forecast says about itself: operators without a probe, a step that could not be traced."""

    @property
    def raw_error(self) -> float:
        """Of the raw prediction, as a share of the measured peak; negative where too little was predicted."""
        return self.predicted_raw_bytes / self.measured_peak_bytes - 1

    @property
    def unprobed_error(self) -> float:
        """The same without operator probes."""
        return self.predicted_unprobed_bytes / self.measured_peak_bytes - 1

    @property
    def warm_up_error(self) -> float:
        """The same after one warm-up."""
        return self.predicted_after_warm_up_bytes / self.measured_peak_bytes - 1


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("cases", nargs="+", help="their labels, or patterns of them")
    parser.add_argument("--library", type=Path, required=True, help="the built allocator")
    parser.add_argument("--cache-dir", type=Path, required=True, help="keeps the results of operator probes")
    chosen = parser.parse_args(arguments)
    allocator = BudgetAllocator(chosen.library)
    allocator.install()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    for case in (case for pattern in chosen.cases for case in select_cases(pattern)):
        print(json.dumps(dataclasses.asdict(run_case(case, allocator, chosen.cache_dir))), flush=True)


def run_case(case: ZooCase, allocator: BudgetAllocator, cache_dir: Path) -> CaseResult:
    """Predict, measure, and let MemFit plan one case."""
    raw = _predicted(case, cache_dir, probe_operators=True)
    unprobed = _predicted(case, cache_dir, probe_operators=False)
    measured, left = measure_plain_fit(case, allocator)
    plan, warm_up = planned_by_memfit(case, cache_dir)
    return CaseResult(
        label=case.label,
        model=case.name,
        optimizer_states=case.optimizer_states,
        implementation=case.implementation,
        measured_peak_bytes=measured,
        predicted_raw_bytes=raw.peak_allocated_bytes,
        predicted_unprobed_bytes=unprobed.peak_allocated_bytes,
        predicted_after_warm_up_bytes=plan.forecast.predicted_peak_bytes,
        warm_up_peak_bytes=warm_up.measured_peak_allocated_bytes,
        peak_phase=raw.peak_phase,
        peak_op=raw.peak_op,
        left_by_fit_bytes=left,
        notes=plan.forecast.notes,
    )


def _predicted(case: ZooCase, cache_dir: Path, *, probe_operators: bool) -> MemoryBreakdown:
    module, batch = build(case)
    return forecast(
        module,
        batch,
        precision=case.precision,
        activation_checkpointing=case.checkpointing,
        optimizer_states=case.optimizer_states,
        optimizer_implementation=case.implementation,
        probe_operators=probe_operators,
        cache_dir=cache_dir,
    )


def measure_plain_fit(case: ZooCase, allocator: BudgetAllocator) -> tuple[int, int]:
    """The peak of a fit without MemFit, and what the fit left alive beyond what training needs.

    Whatever Lightning's loops hold meanwhile is in the peak, as it would be on a device.
    """
    gc.collect()
    before = allocator.live_bytes
    allocator.reset_peak()
    module, batch, trainer = fit_plainly(case)
    assert trainer.global_step == OPTIMIZER_STEPS
    gc.collect()
    left = allocator.live_bytes - before - _needed_between_steps(module, trainer, batch)
    return allocator.peak_bytes - before, left


def fit_plainly(case: ZooCase, *callbacks: Callback) -> tuple[ZooModule, Batch, Trainer]:
    """Build a case and fit it for some optimizer steps without MemFit."""
    module, batch = build(case, with_optimizer_levers=True)
    if case.checkpointing == "blocks":
        checkpoint_modules(module, find_repeated_blocks(module))
    with tempfile.TemporaryDirectory() as directory:
        trainer = _trainer(directory, precision=case.precision, callbacks=list(callbacks))
        trainer.fit(module, _loader(batch))
    return module, batch, trainer


def planned_by_memfit(case: ZooCase, cache_dir: Path) -> tuple[Plan, Measurement]:
    """The plan and the warm-up of a fit with MemFit at exactly the settings of the case.

    Raises:
        RuntimeError: if the plan is another one.
    """
    module, batch = build(case)
    samples = batch_size_of(batch)
    memfit = MemFit(
        effective_batch_size=samples,
        budget=_AMPLE_BUDGET,
        precision=case.precision,
        activation_checkpointing=case.checkpointing,
        optimizer_states=case.optimizer_states,
        optimizer_implementation=case.implementation,
        micro_batch_size=samples,
        cache_dir=cache_dir,
        verbose=False,
    )
    with tempfile.TemporaryDirectory() as directory:
        _trainer(directory, plugins=[memfit]).fit(module, _loader(batch))
    plan, measured = memfit.plan, memfit.measured
    assert plan is not None and measured is not None
    chosen = plan.candidate
    wanted = (case.optimizer_states, case.implementation, 1, False)
    if wanted != (
        chosen.optimizer_states,
        chosen.optimizer_implementation,
        plan.split.num_slices,
        chosen.zero_gradients_early,
    ):
        raise RuntimeError(f"{case.label}: MemFit planned {chosen.label}, which is another case")
    return plan, measured


def _trainer(directory: str, **settings: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_steps=OPTIMIZER_STEPS,
        default_root_dir=directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def _loader(batch: Batch) -> DataLoader[Batch]:
    # The same collated batch every time: it is resident, as in the prediction.
    return DataLoader([batch] * OPTIMIZER_STEPS, batch_size=None)  # type: ignore[arg-type]


def _needed_between_steps(module: ZooModule, trainer: Trainer, batch: Batch) -> int:
    tensors = [*module.parameters(), *module.buffers(), *batch.values()]
    tensors += [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    for optimizer in trainer.optimizers:
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in tensors
        if isinstance(tensor, torch.Tensor)
    }
    return sum(storages.values())


if __name__ == "__main__":
    main()
