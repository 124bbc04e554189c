"""One trace of one Llama-shaped module in a process of its own.

    python -m benchmarks.planning_case 7B --precision bf16-mixed --tool memfit

Started by ``benchmarks.planning_cost``. Prints one JSON object. Nothing of the module's size is allocated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from benchmarks.llama import SHAPES, Llama, next_token_loss
from lightning_memfit.forecasting import autocast_context
from lightning_memfit.plan import Precision
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.training_step import program_of, trace_window

Tool = Literal["memfit", "mem_tracker"]
BATCH = 1


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


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="bf16-mixed")
    parser.add_argument("--tool", choices=get_args(Tool), default="memfit")
    chosen = parser.parse_args(arguments)
    trace = _with_memfit if chosen.tool == "memfit" else _with_mem_tracker
    print(json.dumps(dataclasses.asdict(trace(chosen.size, chosen.precision))))


def _with_memfit(size: str, precision: Precision) -> TraceCost:
    """As the plugin traces one candidate, signatures for operator probes collected; then the replay."""
    with torch.device("meta"):
        module = Llama(SHAPES[size])
    program = program_of(
        module, loss=next_token_loss, optimizer=torch.optim.AdamW, step_context=autocast_context(precision)
    )
    ids = _ids(size)
    before = _peak_rss()
    watch = _Watch()
    timeline = trace_window(program, ids)
    memory = predict_memory(timeline)
    return watch.cost(
        imported_rss_bytes=before,
        num_operations=timeline.num_operations,
        predicted_peak_bytes=memory.peak_allocated_bytes,
        num_parameters=timeline.num_parameters,
    )


def _with_mem_tracker(size: str, precision: Precision) -> TraceCost:
    """Follow the same step with it: old gradients and optimizer states exist, Lightning's order."""
    from torch.distributed._tools.mem_tracker import MemTracker

    with new_fake_mode():
        module = Llama(SHAPES[size])
        ids = _ids(size)
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
        return watch.cost(
            imported_rss_bytes=before,
            num_operations=None,
            predicted_peak_bytes=int(peak),
            num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        )


def _create_states(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in module.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()


def _ids(size: str) -> Tensor:
    return torch.zeros(BATCH, SHAPES[size].length + 1, dtype=torch.long)


class _Watch:
    """Started when it is made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def cost(self, **known: Any) -> TraceCost:
        """The time since the start, and the process's memory."""
        seconds, cpu_seconds = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return TraceCost(seconds=seconds, cpu_seconds=cpu_seconds, peak_rss_bytes=_peak_rss(), **known)


def _peak_rss() -> int:
    # macOS counts in bytes, Linux in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main()
