"""A whole fit with MemFit in front of it: searched, proven under the budget as torch's own limit, and trained."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import tempfile
import time
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.gpu_check.cases import Case, triple, workload_of

_STEPS = 2


def fit_with_memfit(case: Case, device: str, budget_bytes: int) -> dict[str, Any]:
    """Let MemFit plan and prove a case under a budget, and train for two steps.

    Args:
        case: the model; its batch is the effective batch, and the levers are for the search to choose.
        device: ``"cuda"`` or ``"cpu"``.
        budget_bytes: bytes of torch's allocator.
    """
    from lightning_memfit import MemFit, NoFeasiblePlanError

    lightning: Any = _lightning()
    workload = workload_of(case)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.network = workload.network

        def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
            return workload.loss(self.network, batch)

        def configure_optimizers(self) -> Any:
            from torch.optim import AdamW

            return AdamW(self.parameters(), lr=1e-4)

    logging.getLogger(lightning.__name__).setLevel(logging.ERROR)
    memfit = MemFit(budget=budget_bytes, verbose=False, cache_dir=None)
    row: dict[str, Any] = {"model": case.model, "budget_bytes": budget_bytes}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            accelerator="gpu" if device == "cuda" else "cpu",
            devices=1,
            max_steps=_STEPS,
            plugins=[memfit],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        try:
            trainer.fit(Module(), DataLoader([workload.batch] * _STEPS, batch_size=None))  # type: ignore[arg-type]
        except NoFeasiblePlanError as error:
            return row | {"nothing_fits": str(error)}
        finally:
            workload.network.cpu().zero_grad()
    row["seconds"] = time.monotonic() - begin
    plan, found = memfit.plan, memfit.measured
    assert plan is not None and found is not None
    return row | {
        "trained_steps": trainer.global_step,
        "plan": plan.candidate.label,
        "notes": plan.notes,
        **triple(plan.forecast.memory),
        "measured": dataclasses.asdict(found),
    }


def _lightning() -> Any:
    try:
        return importlib.import_module("lightning.pytorch")
    except ImportError:
        return importlib.import_module("pytorch_lightning")
