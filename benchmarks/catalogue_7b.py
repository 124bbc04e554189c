"""A Llama-shaped module of 7B parameters on every GPU of the catalogue: does it fit, how, and how long is a step.

    python -m benchmarks.catalogue_7b [--size 7B] [--processes 2] [--json PATH] [--markdown PATH]

Nothing is trained and no GPU is needed. Batches of 4 sequences of 2048 tokens, 64 sequences per optimizer step, AdamW;
precision, recomputed blocks, slices, and the optimizer's states and implementation are the plan's choice. Seconds are
by the roofline model with assumed shares of the vendor's peaks: no step was timed. Ends with code 1 if the table took
more than two minutes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.llama import SHAPES, Llama, LlamaShape, next_token_loss
from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from lightning_memfit.errors import NoFeasiblePlanError
from lightning_memfit.forecasting import make_plans
from lightning_memfit.hardware.catalog import GpuModel, catalog, find_gpu
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.roofline import SHARE_OF_BANDWIDTH, SHARE_OF_PEAK_FLOPS
from lightning_memfit.plan import Plan
from lightning_memfit.targets import target_of
from lightning_memfit.units import format_bytes, format_seconds

LOADER_BATCH, EFFECTIVE_BATCH = 4, 64
SECONDS_TARGET = 120
"""Wall-clock seconds of the whole table, imports of the children included."""
_DTYPE_OF = {"32-true": "fp32", "bf16-mixed": "bf16", "16-mixed": "fp16"}


@dataclass(frozen=True, kw_only=True)
class GpuRow:
    """What is predicted for one GPU."""

    gpu: str
    """The catalogue's key."""
    total_bytes: int
    """All memory, the least that torch may report."""
    budget_bytes: int
    """What a plan may use: all memory less the context and 5 % of headroom."""
    fits: bool
    """Whether a plan was found."""
    plan: str | None
    """The plan in words; ``None`` where nothing fits."""
    harm_tier: int | None
    """Of the plan: 0 is equal up to rounding, 1 has quantised optimizer states."""
    predicted_bytes: int
    """Smallest capacity in which the plan survives; where nothing fits, of the smallest plan that was found."""
    predicted_reserved_bytes: int | None
    """Peak of reserved bytes of the plan on a GPU without limit; ``None`` where nothing fits."""
    predicted_step_seconds: float | None
    """Seconds of one optimizer step, by assumed rates; ``None`` where nothing fits."""
    predicted_share_of_peak: float | None
    """Model FLOPs of those seconds by the vendor's peak of the plan's dtype, what is recomputed not counted; ``None``
    where nothing fits or the catalogue has no such peak."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is planned."""

    shape: LlamaShape
    """The module."""
    loader_batch: int = LOADER_BATCH
    """Sequences per batch of the loader."""
    effective_batch: int = EFFECTIVE_BATCH
    """Sequences per optimizer step."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=SHAPES, default="7B")
    parser.add_argument("--processes", type=int, default=2, help="groups of GPUs that are planned at the same time")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    began = time.perf_counter()
    rows = plan_all(Workload(shape=SHAPES[chosen.size]), console, processes=chosen.processes)
    seconds = time.perf_counter() - began
    console.print(_table(rows, chosen.size))
    console.print(about(chosen.size, seconds, machine), style="dim")
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(rows, chosen.size, seconds, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(rows, chosen.size, seconds, machine))
    missed = seconds > SECONDS_TARGET
    console.print(f"{'missed' if missed else 'met'}: {seconds:.0f} s, target {SECONDS_TARGET} s")
    return int(missed)


def plan_all(workload: Workload, console: Console, *, processes: int) -> list[GpuRow]:
    """Plan for every GPU of the catalogue, in its order."""
    groups = groups_of_alike(catalog())
    found: dict[str, GpuRow] = {}
    with (
        progress_bar(console) as progress,
        # Forked children would inherit the threads of torch.
        ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool,
    ):
        task = progress.add_task("planning", total=sum(map(len, groups)))
        for rows in pool.map(partial(plan_group, workload), groups):
            found.update({row.gpu: row for row in rows})
            progress.advance(task, len(rows))
    return [found[model.key] for model in catalog()]


def groups_of_alike(models: Sequence[GpuModel]) -> list[tuple[str, ...]]:
    """Keys of GPUs that follow the same rules, so that they share what is traced; the largest group first."""
    groups: dict[Any, list[str]] = {}
    for model in models:
        groups.setdefault(target_of(detect_device(model.key)).rules, []).append(model.key)
    return sorted(map(tuple, groups.values()), key=len, reverse=True)


def plan_group(workload: Workload, keys: Sequence[str]) -> list[GpuRow]:
    """Plan for GPUs that follow the same rules."""
    torch.set_num_threads(1)
    shape = workload.shape
    with torch.device("meta"):
        module, ids = Llama(shape), torch.zeros(workload.loader_batch, shape.length + 1, dtype=torch.long)
    plans = make_plans(
        module,
        ids,
        devices=keys,
        effective_batch_size=workload.effective_batch,
        loss=next_token_loss,
        optimizer=torch.optim.AdamW,
    )
    return [row_of(find_gpu(key), plan) for key, plan in plans.items()]


def row_of(model: GpuModel, found: Plan | NoFeasiblePlanError) -> GpuRow:
    """One line of the table."""
    if not isinstance(found, Plan):
        assert found.budget_bytes is not None and found.best_peak_bytes is not None
    return GpuRow(
        gpu=model.key,
        total_bytes=model.torch_total_bytes.low,
        budget_bytes=found.budget.budget_bytes if isinstance(found, Plan) else found.budget_bytes,
        fits=isinstance(found, Plan),
        plan=found.candidate.label if isinstance(found, Plan) else None,
        harm_tier=found.candidate.harm_tier if isinstance(found, Plan) else None,
        predicted_bytes=found.forecast.predicted_peak_bytes if isinstance(found, Plan) else found.best_peak_bytes,
        predicted_reserved_bytes=found.forecast.memory.peak_reserved_bytes if isinstance(found, Plan) else None,
        predicted_step_seconds=found.forecast.predicted_step_seconds if isinstance(found, Plan) else None,
        predicted_share_of_peak=share_of_peak(model, found) if isinstance(found, Plan) else None,
    )


def share_of_peak(model: GpuModel, plan: Plan) -> float | None:
    """FLOPs of the model per predicted second and peak; what is recomputed is no work of the model's.

    Source: Chowdhery et al., PaLM (arXiv 2204.02311), appendix B: model FLOPs utilization.
    """
    forecast, peak = plan.forecast, model.peak_flops.get(_DTYPE_OF[plan.candidate.precision])
    if peak is None or forecast.flops is None or forecast.predicted_step_seconds is None:
        return None
    return (forecast.flops - (forecast.recomputed_flops or 0)) / forecast.predicted_step_seconds / peak


def about(size: str, seconds: float, machine: Machine) -> str:
    """What the table is of, and how it was made."""
    return (
        f"Llama-shaped, {size}, {SHAPES[size].length} tokens, batches of {LOADER_BATCH}, {EFFECTIVE_BATCH} sequences "
        "per optimizer step, AdamW. Predicted, on no GPU: bytes by a replay of torch's allocator, seconds by assumed "
        f"rates ({100 * SHARE_OF_PEAK_FLOPS:.0f} % of the vendor's FLOP/s in matrix products, "
        f"{100 * SHARE_OF_BANDWIDTH:.0f} % of its bandwidth), which rank settings; how far off they "
        "are was not measured. "
        "Budget: what torch reports as the GPU's memory, less the CUDA context and 5 % of headroom. Share of peak: "
        "FLOPs of the model, "
        f"without what is recomputed. Made in {seconds:.0f} s. {machine.caption}."
    )


def as_json(rows: Sequence[GpuRow], size: str, seconds: float, machine: Machine) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "catalogue_7b",
        "statistic": "predicted; seconds by assumed rates",
        "machine": machine.to_dict(),
        "settings": {"size": size, "loader_batch": LOADER_BATCH, "effective_batch": EFFECTIVE_BATCH},
        "seconds": seconds,
        "target_seconds": SECONDS_TARGET,
        "gpus": [asdict(row) for row in rows],
    }


def as_markdown(rows: Sequence[GpuRow], size: str, seconds: float, machine: Machine) -> str:
    """The table for the documentation."""
    return "\n".join(
        [
            "| GPU | memory | budget | fits | plan | needs | seconds per step (assumed rates) | share of peak |",
            "|---|--:|--:|---|---|--:|--:|--:|",
            *(f"| {' | '.join(_cells(row))} |" for row in rows),
            "",
            about(size, seconds, machine),
            "",
        ]
    )


def _cells(row: GpuRow) -> list[str]:
    step, share = row.predicted_step_seconds, row.predicted_share_of_peak
    return [
        row.gpu,
        format_bytes(row.total_bytes),
        format_bytes(row.budget_bytes),
        "yes" if row.fits else "no",
        row.plan or "the smallest plan is too large",
        format_bytes(row.predicted_bytes),
        "" if step is None else format_seconds(step),
        "" if share is None else f"{100 * share:.0f} %",
    ]


def _table(rows: Sequence[GpuRow], size: str) -> Table:
    table = plain_table(f"{size} on every GPU of the catalogue (predicted)")
    table.add_column("GPU", no_wrap=True)
    for column in ("memory", "budget"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("fits")
    table.add_column("plan")
    table.add_column("needs", justify="right", no_wrap=True)
    table.add_column("step\n(assumed)", justify="right", no_wrap=True)
    table.add_column("of\npeak", justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


if __name__ == "__main__":
    sys.exit(main())
