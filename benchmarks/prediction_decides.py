"""Every case finishes with 1 % more memory than predicted, and dies with 1 % less.

    python -m benchmarks.prediction_decides [--cases PATTERN]

The process's CPU allocator throws the real ``torch.OutOfMemoryError`` above a byte limit, which is moved from case to
case. Prints one JSON object per case, and ends with code 1 if one did not do as predicted.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.allocator.budget_allocator import BudgetAllocator, build_allocator, why_unavailable
from benchmarks.zoo import ZooCase, build, select_cases
from lightning_memfit.forecasting import Forecaster, autocast_context, checkpointed
from lightning_memfit.observe.unlogged import unlogged
from lightning_memfit.plan import BatchSplit, Candidate
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.trace.op_probe import OperatorProber
from lightning_memfit.trace.training_step import Unobserved, program_of, run_window

MARGIN = 0.01
"""Share of the predicted peak by which the limit is above or below it."""
OPTIMIZER_STEPS = 3
"""The first creates the optimizer's states; from the second on the step is in the steady state."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one case did under both limits."""

    label: str
    """Of the case."""
    predicted_peak_bytes: int
    """Raw, operator probes included, before anything ran."""
    steps_above: int
    """Optimizer steps finished at the predicted peak plus the margin."""
    steps_below: int
    """Optimizer steps finished at the predicted peak less the margin."""
    error_above: str | None
    """What ended the run above; ``None`` if it finished."""
    error_below: str | None
    """What ended the run below."""

    @property
    def as_predicted(self) -> bool:
        """Finished above, out of memory below."""
        return self.error_above is None and self.error_below == "OutOfMemoryError"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="*", help="pattern of labels such as 'gpt *' or '* bf16-mixed *'")
    parser.add_argument("--library", type=Path, default=None, help="the built allocator; left out, it is built")
    chosen = parser.parse_args(arguments)
    reason = why_unavailable()
    if reason is not None and chosen.library is None:
        print(reason, file=sys.stderr)
        return 2
    allocator = BudgetAllocator(chosen.library or build_allocator())
    allocator.install()
    failed = False
    with OperatorProber() as prober:
        prober.start()
        for case in select_cases(chosen.cases):
            outcome = decide(case, allocator, prober)
            failed = failed or not outcome.as_predicted
            print(json.dumps({**dataclasses.asdict(outcome), "as_predicted": outcome.as_predicted}), flush=True)
    return int(failed)


def decide(case: ZooCase, allocator: BudgetAllocator, prober: OperatorProber) -> Outcome:
    """Predict the peak of a case, then run it under both limits."""
    predicted = predicted_peak_bytes(case, prober)
    above = _run_under(allocator, round(predicted * (1 + MARGIN)), case)
    below = _run_under(allocator, round(predicted * (1 - MARGIN)), case)
    return Outcome(
        label=case.label,
        predicted_peak_bytes=predicted,
        steps_above=above[0],
        error_above=above[1],
        steps_below=below[0],
        error_below=below[1],
    )


def predicted_peak_bytes(case: ZooCase, prober: OperatorProber | None) -> int:
    """The raw prediction for a case, as the search makes it."""
    module, batch = build(case)
    program = program_of(module, step_context=autocast_context(case.precision))
    samples = len(batch["targets"])
    candidate = Candidate(
        precision=case.precision,
        activation_checkpointing=case.checkpointing,
        checkpointed_modules=_recomputed(case, module),
        split=BatchSplit(effective_batch_size=samples, loader_batch_size=samples, slice_sizes=(samples,)),
    )
    return Forecaster(program, batch, prober=prober)(candidate).memory.peak_allocated_bytes


def _run_under(allocator: BudgetAllocator, limit_bytes: int, case: ZooCase) -> tuple[int, str | None]:
    """Optimizer steps finished with ``limit_bytes`` for the case's own tensors, and the name of the error."""
    gc.collect()
    allocator.set_limit(allocator.live_bytes + limit_bytes)
    finished = 0

    def step_finished() -> None:
        nonlocal finished
        finished += 1

    try:
        _train(case, step_finished)
    except Exception as error:
        # Only the name is kept: the traceback would keep the step's tensors alive into the next run.
        real = isinstance(error, torch.OutOfMemoryError)
        return finished, "OutOfMemoryError" if real else f"{type(error).__name__}: {error}"
    finally:
        allocator.set_limit(None)
    return finished, None


def _train(case: ZooCase, step_finished: Callable[[], None]) -> None:
    module, batch = build(case)
    program = program_of(module, step_context=autocast_context(case.precision))
    with checkpointed(module, _recomputed(case, module)), unlogged(module):
        optimizer = program.make_optimizer()
        for _ in range(OPTIMIZER_STEPS):
            run_window(program, optimizer, [batch], Unobserved())
            step_finished()


def _recomputed(case: ZooCase, module: torch.nn.Module) -> tuple[str, ...]:
    return find_repeated_blocks(module) if case.checkpointing == "blocks" else ()


if __name__ == "__main__":
    sys.exit(main())
