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
import logging
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback

from benchmarks.accuracy_case import fit_plainly
from benchmarks.allocator.budget_allocator import BudgetAllocator, build_allocator, why_unavailable
from benchmarks.zoo import ZooCase, build, select_cases
from lightning_memfit import forecast

MARGIN = 0.01
"""Share of the predicted peak by which the limit is above or below it."""


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
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    failed = False
    with tempfile.TemporaryDirectory() as cache_dir:  # operator probes are kept from case to case
        for case in select_cases(chosen.cases):
            outcome = decide(case, allocator, Path(cache_dir))
            failed = failed or not outcome.as_predicted
            print(json.dumps({**dataclasses.asdict(outcome), "as_predicted": outcome.as_predicted}), flush=True)
    return int(failed)


def decide(case: ZooCase, allocator: BudgetAllocator, cache_dir: Path) -> Outcome:
    """Predict the peak of a case, then run it under both limits."""
    predicted = predicted_peak_bytes(case, cache_dir)
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


def predicted_peak_bytes(case: ZooCase, cache_dir: Path) -> int:
    """The raw prediction for a case, operator probes included."""
    module, batch = build(case)
    return forecast(
        module,
        batch,
        precision=case.precision,
        activation_checkpointing=case.checkpointing,
        optimizer_states=case.optimizer_states,
        optimizer_implementation=case.implementation,
        cache_dir=cache_dir,
    ).peak_allocated_bytes


def _run_under(allocator: BudgetAllocator, limit_bytes: int, case: ZooCase) -> tuple[int, str | None]:
    """Optimizer steps finished with ``limit_bytes`` for the case's own tensors, and the name of the error."""
    gc.collect()
    allocator.set_limit(allocator.live_bytes + limit_bytes)
    steps = _StepCounter()
    try:
        fit_plainly(case, steps)
    except Exception as error:
        # Only the name is kept: the traceback would keep the step's tensors alive into the next run.
        real = isinstance(error, torch.OutOfMemoryError)
        return steps.finished, "OutOfMemoryError" if real else f"{type(error).__name__}: {error}"
    finally:
        allocator.set_limit(None)
    return steps.finished, None


class _StepCounter(Callback):
    """Counts what a fit finished, also one that is ended by an error."""

    def __init__(self) -> None:
        self.finished = 0

    def on_train_batch_end(self, *arguments: Any) -> None:
        self.finished += 1


if __name__ == "__main__":
    sys.exit(main())
