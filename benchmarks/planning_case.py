"""One trace, or one whole plan, of one Llama-shaped module in a process of its own.

    python -m benchmarks.planning_case 7B --precision bf16-mixed --tool memfit
    python -m benchmarks.planning_case 7B --tool plan --budget 175000000000 --cache-dir DIR

Started by ``benchmarks.planning_cost``. Prints one JSON object. Nothing of the module's size is allocated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import torch
from torch import Tensor, nn

from benchmarks.llama import SHAPES, Llama, next_token_loss
from lightning_memfit.applied_in_a_trace import autocast_context
from lightning_memfit.forecaster import Forecaster
from lightning_memfit.forecasting import make_plan
from lightning_memfit.plan import Precision
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.training_step import program_of, trace_window

Tool = Literal["memfit", "mem_tracker", "unconstrained", "plan"]
BATCH = 1
"""Samples of the batch of one trace."""
PLANNED_BATCH = 8
"""Samples of the batch that is planned for."""


@dataclass(frozen=True, kw_only=True)
class TraceCost:
    """What one trace took, imports and building the module left out."""

    seconds: float
    """Wall clock."""
    cpu_seconds: float
    """Of this process, over all threads."""
    peak_rss_bytes: int
    """Highest resident set size of the process, imports included."""
    imported_rss_bytes: int
    """The same before the trace: interpreter, torch and Lightning."""
    num_operations: int | None
    """Operators followed; ``None`` where the tool does not tell."""
    predicted_peak_bytes: int
    """Peak of one optimizer step in the steady state."""
    num_parameters: int
    """Of the module."""


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What one whole plan took, imports and building the module left out."""

    seconds: float
    """Wall clock."""
    cpu_seconds: float
    """Of this process, over all threads."""
    peak_rss_bytes: int
    """Highest resident set size of the process, imports included."""
    imported_rss_bytes: int
    """The same before the plan."""
    num_estimated: int
    """Candidates whose forecast was derived."""
    num_traced: int
    """Candidates that were traced themselves."""
    budget_bytes: int
    """What the plan may use."""
    predicted_peak_bytes: int
    """Of the chosen candidate, which was traced."""
    chosen: str
    """The chosen candidate in words."""
    num_parameters: int
    """Of the module."""


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="bf16-mixed")
    parser.add_argument("--tool", choices=get_args(Tool), default="memfit")
    parser.add_argument("--budget", type=int, help="bytes that the plan may use")
    parser.add_argument("--cache-dir", type=Path, help="keeps the measured rates of the device")
    chosen = parser.parse_args(arguments)
    cost: TraceCost | PlanCost
    if chosen.tool == "plan":
        if chosen.budget is None:
            parser.error("--tool plan needs --budget")
        cost = _whole_plan(chosen.size, chosen.budget, chosen.cache_dir)
    elif chosen.tool == "mem_tracker":
        cost = _with_mem_tracker(chosen.size, chosen.precision)
    else:
        samples = PLANNED_BATCH if chosen.tool == "unconstrained" else BATCH
        cost = _with_memfit(chosen.size, chosen.precision, samples)
    print(json.dumps(dataclasses.asdict(cost)))


def _with_memfit(size: str, precision: Precision, samples: int) -> TraceCost:
    """As the plugin traces one candidate, signatures for operator probes collected; then the replay."""
    module = _on_meta(size)
    program = program_of(
        module, loss=next_token_loss, optimizer=torch.optim.AdamW, step_context=autocast_context(precision)
    )
    ids = _ids(size, samples)
    before = _peak_rss()
    watch = _Watch()
    timeline = trace_window(program, ids)
    memory = predict_memory(timeline)
    seconds, cpu_seconds = watch.read()
    return TraceCost(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak_rss_bytes=_peak_rss(),
        imported_rss_bytes=before,
        num_operations=timeline.num_operations,
        predicted_peak_bytes=memory.peak_allocated_bytes,
        num_parameters=timeline.num_parameters,
    )


def _whole_plan(size: str, budget_bytes: int, cache_dir: Path | None) -> PlanCost:
    """The search over precision, recomputed blocks, slices of the batch, zeroing and the optimizer's implementation."""
    module, ids = _on_meta(size), _ids(size, PLANNED_BATCH)
    before = _peak_rss()
    with _counted_forecasts() as asked:
        watch = _Watch()
        plan = make_plan(
            module,
            ids,
            effective_batch_size=PLANNED_BATCH,
            loss=next_token_loss,
            optimizer=torch.optim.AdamW,
            budget=budget_bytes,
            probe_operators=False,
            cache_dir=cache_dir,
        )
        seconds, cpu_seconds = watch.read()
    return PlanCost(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        peak_rss_bytes=_peak_rss(),
        imported_rss_bytes=before,
        num_estimated=asked["derived"],
        num_traced=asked["traced"],
        budget_bytes=budget_bytes,
        predicted_peak_bytes=plan.forecast.predicted_peak_bytes,
        chosen=plan.candidate.label,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
    )


@contextmanager
def _counted_forecasts() -> Iterator[Counter[str]]:
    """Count how forecasts come about within this context."""
    asked: Counter[str] = Counter()
    derive, trace = Forecaster._derived, Forecaster._traced

    def counted_derive(self: Forecaster, candidate: Any) -> Any:
        found = derive(self, candidate)
        asked["derived"] += 1
        return found

    def counted_trace(self: Forecaster, candidate: Any) -> Any:
        asked["traced"] += 1
        return trace(self, candidate)

    with (
        mock.patch.object(Forecaster, "_derived", counted_derive),
        mock.patch.object(Forecaster, "_traced", counted_trace),
    ):
        yield asked


def _with_mem_tracker(size: str, precision: Precision) -> TraceCost:
    """Follow the same step with it: old gradients and optimizer states exist, Lightning's order."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with new_fake_mode():
        module = Llama(SHAPES[size])
        ids = _ids(size, BATCH)
        optimizer = torch.optim.AdamW(module.parameters())
        _create_states(module, optimizer)
        before = _peak_rss()
        watch = _Watch()
        tracker = MemTracker()
        old_gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        tracker.track_external(module, optimizer, ids, *old_gradients)
        del old_gradients
        with tracker:
            with autocast_context(precision)():
                loss = next_token_loss(module, ids)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        seconds, cpu_seconds = watch.read()
        return TraceCost(
            seconds=seconds,
            cpu_seconds=cpu_seconds,
            peak_rss_bytes=_peak_rss(),
            imported_rss_bytes=before,
            num_operations=None,
            predicted_peak_bytes=int(peak),
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        )


def _create_states(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()


def _on_meta(size: str) -> Llama:
    with torch.device("meta"):
        return Llama(SHAPES[size])


def _ids(size: str, samples: int) -> Tensor:
    return torch.zeros(samples, SHAPES[size].length + 1, dtype=torch.long)


class _Watch:
    """Started when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds since the start: of the wall's clock, and of this process on all its threads."""
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


def _peak_rss() -> int:
    # macOS counts in bytes, Linux in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
