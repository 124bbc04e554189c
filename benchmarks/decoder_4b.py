"""A decoder of 4B parameters in mixed precision, taken apart: where 85 GB go, and how it fits into less.

    python -m benchmarks.decoder_4b [--json PATH] [--markdown PATH]

The rule of thumb says 18 bytes per parameter: weights 6, gradients 4, states of AdamW 8 (8-bit ones 2), and
activations on top. The step is traced for an A100 with 80 GB: what of
the rule it shows, at which sequence length batches of 16 need 85 GB in all, what the optimizer's step alone needs by
implementation, and MemFit's plans for 24, 40, 48 and 80 GB.
Everything is predicted on the CPU, without weights; no step was run.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from benchmarks.llama import Llama, LlamaShape, next_token_loss
from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, progress_bar, write_text
from lightning_memfit.errors import NoFeasiblePlanError
from lightning_memfit.forecasting import forecast, make_plans, trace_step
from lightning_memfit.plan import MemoryBreakdown, Plan
from lightning_memfit.trace.timeline import Free, Operation, Timeline
from lightning_memfit.units import format_bytes, format_seconds

GB = 10**9
SHAPE = LlamaShape(width=3072, depth=38, heads=24, key_value_heads=8, mlp_width=8192)
"""4,022,049,792 parameters: 2 x 32,000 x 3,072 of the embedding and the head, 38 blocks of 100,669,440, 3,072."""
BATCH = 16
TOTAL_BYTES = 85 * GB
TRACED_FOR = "a100-80gb"
PLANNED_FOR = ("rtx-4090", "a100-40gb", "l40s", "a100-80gb")
IMPLEMENTATIONS = (("as-configured", "as-configured"), ("as-configured", "fused"), ("8bit", "as-configured"))
"""Pairs of optimizer states and implementation whose step is looked at; AdamW as configured is ``foreach`` on a GPU."""


class Data(NamedTuple):
    """A module without weights and one batch."""

    module: nn.Module
    ids: Tensor


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The step in mixed precision as it is, batch undivided."""

    length: int
    """Tokens in a sequence."""
    num_parameters: int
    """Elements of the parameters."""
    predicted_bytes: int
    """Peak of allocated bytes."""
    by_category: dict[str, int]
    """What the peak consists of."""
    by_phase: dict[str, int]
    """Peak of allocated bytes within each phase."""
    cast_weights_bytes: int
    """Copies of weights in 16 bits that autocast made in the forward and autograd holds at its end; activations."""

    def per_parameter(self, size: int) -> float:
        """Bytes per parameter."""
        return size / self.num_parameters


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """What the optimizer's step needs in 32-true."""

    optimizer_states: str
    optimizer_implementation: str
    predicted_bytes: int
    """Peak within the optimizer's step."""
    bytes_per_parameter: float


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A plan for one GPU."""

    gpu: str
    precision: str
    """As asked for: ``"auto"``, or one that the user must ask for."""
    budget_bytes: int
    plan: str | None
    """In words; ``None`` where nothing fits."""
    predicted_bytes: int
    """Smallest capacity in which the plan survives, or the smallest plan that was found."""
    predicted_step_seconds: float | None
    """By assumed rates; ``None`` where nothing fits."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the tables here")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    anatomy, steps, plans = measure(SHAPE, TOTAL_BYTES, console)
    text = as_markdown(anatomy, steps, plans, machine)
    console.print(text, markup=False, highlight=False)
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(anatomy, steps, plans, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, text)
    return 0


def measure(shape: LlamaShape, total_bytes: int, console: Console) -> tuple[Anatomy, list[StepRow], list[PlanRow]]:
    """Find the length, and predict everything at it, under a progress bar."""
    with progress_bar(console) as progress:
        task = progress.add_task("sequence length", total=4)
        length = length_needing(total_bytes, functools.cache(lambda tokens: peak(data_of(shape, tokens)).least))
        data = data_of(shape, length)
        progress.update(task, advance=1, description="categories")
        anatomy = anatomy_of(data)
        progress.update(task, advance=1, description="optimizer step")
        steps = [step_of(data, states, implementation) for states, implementation in IMPLEMENTATIONS]
        progress.update(task, advance=1, description="plans")
        plans = plans_of(data, PLANNED_FOR)
        progress.advance(task)
    return anatomy, steps, plans


def data_of(shape: LlamaShape, length: int) -> Data:
    """The module and a batch of sequences of ``length`` tokens, on ``meta``."""
    with torch.device("meta"):
        return Data(Llama(replace(shape, length=length)), torch.zeros(BATCH, length + 1, dtype=torch.long))


class Peak(NamedTuple):
    """One forecast."""

    memory: MemoryBreakdown
    least: int
    """Peak of allocated bytes."""


def peak(data: Data, **levers: Any) -> Peak:
    """Forecast the step in mixed precision, or with other levers."""
    options = {"precision": "bf16-mixed", **levers}
    memory = forecast(
        data.module, data.ids, loss=next_token_loss, optimizer=torch.optim.AdamW, device=TRACED_FOR, **options
    )
    return Peak(memory, memory.peak_allocated_bytes)


def length_needing(total_bytes: int, bytes_at: Callable[[int], int], *, low: int = 1, high: int = 512) -> int:
    """The greatest sequence length that needs no more than a total; bytes never fall with the length.

    Interpolates between one that needs less and one that needs more, since above the optimizer's own step bytes grow on
    a straight line, then halves.

    Raises:
        ValueError: if ``low`` needs more already.
    """
    while bytes_at(high) <= total_bytes:
        low, high = high, 2 * high
    if bytes_at(low) > total_bytes:
        raise ValueError(f"{low} tokens need {bytes_at(low) / GB:.1f} GB, more than {total_bytes / GB:.1f} GB.")
    interpolate = True
    while high - low > 1:
        middle = (low + high) // 2
        if interpolate:
            share = (total_bytes - bytes_at(low)) / (bytes_at(high) - bytes_at(low))
            middle = min(max(low + int((high - low) * share), low + 1), high - 1)
        before = high - low
        low, high = (middle, high) if bytes_at(middle) <= total_bytes else (low, middle)
        interpolate = not interpolate or 2 * (high - low) <= before
    return low


def anatomy_of(data: Data) -> Anatomy:
    """Take the step in mixed precision apart."""
    memory = peak(data).memory
    timeline = trace_step(
        data.module, data.ids, loss=next_token_loss, optimizer=torch.optim.AdamW, precision="bf16-mixed"
    )
    return Anatomy(
        length=data.ids.shape[1] - 1,
        num_parameters=memory.num_parameters,
        predicted_bytes=memory.peak_allocated_bytes,
        by_category=dict(memory.by_category),
        by_phase=dict(memory.by_phase),
        cast_weights_bytes=cast_weights_bytes(timeline),
    )


def cast_weights_bytes(timeline: Timeline) -> int:
    """Bytes of 16-bit copies of parameters that the forward made and that outlive it."""
    parameters = {resident.storage for resident in timeline.residents if resident.category == "parameters"}
    freed = {event.storage for event in timeline.events if isinstance(event, Free) and event.phase == "forward"}
    return sum(
        output.allocated_bytes
        for event in timeline.events
        if isinstance(event, Operation) and event.phase == "forward" and event.op == "aten._to_copy.default"
        for output in event.outputs
        if output.storage not in freed and set(event.reads) <= parameters
    )


def step_of(data: Data, states: str, implementation: str) -> StepRow:
    """What the optimizer's step needs with fp32 gradients."""
    memory = peak(data, precision="32-true", optimizer_states=states, optimizer_implementation=implementation).memory
    size = memory.by_phase["optimizer_step"]
    return StepRow(
        optimizer_states=states,
        optimizer_implementation=implementation,
        predicted_bytes=size,
        bytes_per_parameter=size / memory.num_parameters,
    )


def plans_of(data: Data, devices: Sequence[str]) -> list[PlanRow]:
    """Plans for the devices; those on which nothing fits also with weights in 16 bits, which must be asked for."""
    rows = []
    for precision in ("auto", "bf16-true"):
        left = [device for device in devices if not any(row.gpu == device and row.plan for row in rows)]
        if not left:
            break
        found = make_plans(
            data.module,
            data.ids,
            devices=left,
            effective_batch_size=data.ids.shape[0],
            loss=next_token_loss,
            optimizer=torch.optim.AdamW,
            precision=precision,
            # Implementations of an optimizer over weights in 16 bits are not told before the step is traced.
            optimizer_implementation="auto" if precision == "auto" else "as-configured",
        )
        rows += [plan_row(device, precision, plan) for device, plan in found.items()]
    return sorted(rows, key=lambda row: list(devices).index(row.gpu))


def plan_row(device: str, precision: str, found: Plan | NoFeasiblePlanError) -> PlanRow:
    """One line of the table of plans."""
    if isinstance(found, Plan):
        return PlanRow(
            gpu=device,
            precision=precision,
            budget_bytes=found.budget.budget_bytes,
            plan=found.candidate.label,
            predicted_bytes=found.forecast.predicted_peak_bytes,
            predicted_step_seconds=found.forecast.predicted_step_seconds,
        )
    return PlanRow(
        gpu=device,
        precision=precision,
        budget_bytes=found.budget_bytes,
        plan=None,
        predicted_bytes=found.best_peak_bytes,
        predicted_step_seconds=None,
    )


def as_json(anatomy: Anatomy, steps: Sequence[StepRow], plans: Sequence[PlanRow], machine: Machine) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "decoder_4b",
        "statistic": "predicted; seconds by assumed rates",
        "machine": machine.to_dict(),
        "settings": {"shape": asdict(SHAPE), "batch": BATCH, "traced_for": TRACED_FOR, "total_bytes": TOTAL_BYTES},
        "anatomy": asdict(anatomy),
        "optimizer_step": [asdict(row) for row in steps],
        "plans": [asdict(row) for row in plans],
    }


def as_markdown(anatomy: Anatomy, steps: Sequence[StepRow], plans: Sequence[PlanRow], machine: Machine) -> str:
    """The tables of the documentation."""

    def line(name: str, size: int) -> str:
        return f"| {name} | {size / GB:.2f} | {anatomy.per_parameter(size):.2f} |"

    return "\n".join(
        [
            f"{anatomy.num_parameters:,} parameters, bf16-mixed, AdamW, batch {BATCH}, {anatomy.length} tokens, "
            f"{TRACED_FOR}: {anatomy.predicted_bytes / GB:.1f} GB allocated (predicted).",
            "",
            "| at the peak | GB | bytes per parameter |",
            "|---|--:|--:|",
            *(line(name.replace("_", " "), size) for name, size in anatomy.by_category.items()),
            line("of the activations at the forward's end: 16-bit copies of weights", anatomy.cast_weights_bytes),
            "",
            "| highest within | GB | bytes per parameter |",
            "|---|--:|--:|",
            *(line(name.replace("_", " "), size) for name, size in anatomy.by_phase.items()),
            "",
            "| AdamW in 32-true: states | implementation | GB at its step | bytes per parameter |",
            "|---|---|--:|--:|",
            *(
                f"| {row.optimizer_states} | {row.optimizer_implementation} | {row.predicted_bytes / GB:.2f} "
                f"| {row.bytes_per_parameter:.2f} |"
                for row in steps
            ),
            "",
            "| GPU | budget | precision asked for | plan | needs | seconds per step (assumed rates) |",
            "|---|--:|---|---|--:|--:|",
            *(f"| {' | '.join(_plan_cells(row))} |" for row in plans),
            "",
            f"{machine.caption}.",
            "",
        ]
    )


def _plan_cells(row: PlanRow) -> list[str]:
    return [
        row.gpu,
        format_bytes(row.budget_bytes),
        row.precision,
        row.plan or "nothing fits",
        format_bytes(row.predicted_bytes),
        "" if row.predicted_step_seconds is None else format_seconds(row.predicted_step_seconds),
    ]


if __name__ == "__main__":
    sys.exit(main())
