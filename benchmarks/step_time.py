"""Predicted against measured step time: six models, each at twenty settings of the levers, on this machine's CPU.

    python -m benchmarks.step_time [--models gpt vit] [--rounds 6] [--json PATH] [--markdown PATH]

The device's rates are measured once; every candidate is predicted from its trace before anything of it ran. Then all
candidates of a model run real optimizer steps in turns, in a process of its own per model. MemFit ranks candidates
within a tier by predicted time and times the first few for real. So does the benchmark: of those within 25 % of the
fastest by prediction, three at most, it takes the one that is fastest in every other round (by 2 %, or else the one
predicted to be), and the rounds between say how much slower that one is than the best of all. (That MemFit also asks a
lever to pay for its departure from the run as it is, is left out.) Ends with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.child_process import run_child
from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from benchmarks.step_time_case import CLOCKS, CandidateTimes, ModelTimes
from benchmarks.zoo_models import MODELS
from lightning_memfit.contest import FASTER_SHARE
from lightning_memfit.search.planner import CONTENDER_SHARE, MOST_CONTENDERS

RANK_TARGET = 0.9
"""Spearman's rank correlation of predicted and measured times over the candidates of a model."""
REGRET_TARGET = 0.05
"""By how much the plan taken may be slower than the best of its tier."""
DEFAULT_MODELS = ("mlp", "gpt", "vit", "bert", "resnet", "lstm")


@dataclass(frozen=True, kw_only=True)
class TierResult:
    """The choice within one tier of harm."""

    harm_tier: int
    candidates: int
    best: str
    """Label of the candidate that was fastest in the rounds that judge."""
    best_seconds: float
    predicted_best: str
    """Label of the candidate predicted to be the fastest."""
    regret_unchecked: float
    """How much slower than the best the predicted best is, as a share."""
    taken: str
    """Label of the contender that was fastest in the rounds that choose."""
    regret: float
    """How much slower than the best the one taken is in the other rounds, as a share."""


@dataclass(frozen=True, kw_only=True)
class ModelResult:
    """One model over all its candidates."""

    model: str
    fastest_seconds: float
    slowest_seconds: float
    rank_correlation: float
    """Spearman's, over all candidates."""
    median_error: float
    """Median of the sizes of predicted over measured less one."""
    largest_error: float
    """The error of the largest size, with its sign."""
    noise: float
    """Largest difference between two runs of the same candidate that were timed as if they were two, as a share."""
    tiers: tuple[TierResult, ...]

    @property
    def missed(self) -> list[str]:
        """The targets that this model missed, in words."""
        missed = []
        if self.rank_correlation < RANK_TARGET:
            missed.append(f"missed: {self.model} rank correlation {self.rank_correlation:.3f}, target {RANK_TARGET}")
        missed += [
            f"missed: {self.model} tier {tier.harm_tier} takes {tier.taken!r}, {100 * tier.regret:.1f} % slower than "
            f"{tier.best!r}, target {100 * REGRET_TARGET:.0f} % (noise floor {100 * self.noise:.1f} %)"
            for tier in self.tiers
            if tier.regret > REGRET_TARGET
        ]
        return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(DEFAULT_MODELS))
    parser.add_argument(
        "--rounds", type=int, default=6, help="turns of all candidates, each of one untimed and two timed steps"
    )
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: for one thread on a busy machine")
    parser.add_argument("--json", type=Path, help="write every time here")
    parser.add_argument("--markdown", type=Path, help="write the table of models here")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    times = run_models(chosen.models, chosen.rounds, chosen.clock, console)
    results = [summarise(each) for each in times]
    for each in times:
        console.print(_candidate_table(each))
    console.print(_summary_table(results))
    console.print(machine.caption, style="dim")
    missed = [line for result in results for line in result.missed]
    console.print("\n".join(missed) if missed else _targets_met(results), style="red" if missed else "green")
    settings = {"rounds": chosen.rounds, "clock": chosen.clock, "contenders": MOST_CONTENDERS}
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(times, results, settings, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(results, settings, machine))
    return int(bool(missed))


def run_models(models: Sequence[str], rounds: int, clock: str, console: Console) -> list[ModelTimes]:
    """Run every model in a child process, one after the other, under a progress bar."""
    # The first child measures the device, the others read what it found.
    with tempfile.TemporaryDirectory() as cache_dir, progress_bar(console) as progress:
        task = progress.add_task("", total=len(models))
        found = []
        for model in models:
            progress.update(task, description=f"{model:10}")
            options = ["--rounds", str(rounds), "--clock", clock, "--cache-dir", cache_dir]
            found.append(read_times(run_child("benchmarks.step_time_case", [model, *options])))
            progress.advance(task)
    return found


def read_times(data: dict[str, Any]) -> ModelTimes:
    """Rebuild what a child printed."""

    def candidate(plain: dict[str, Any]) -> CandidateTimes:
        return CandidateTimes(**{**plain, "measured_seconds": tuple(plain["measured_seconds"])})

    return ModelTimes(
        model=data["model"],
        candidates=tuple(candidate(each) for each in data["candidates"]),
        twins=tuple((candidate(one), candidate(other)) for one, other in data["twins"]),
    )


def summarise(times: ModelTimes) -> ModelResult:
    """One model's numbers."""
    candidates = times.candidates
    seconds = [each.seconds for each in candidates]
    tiers = sorted({each.harm_tier for each in candidates})
    return ModelResult(
        model=times.model,
        fastest_seconds=min(seconds),
        slowest_seconds=max(seconds),
        rank_correlation=rank_correlation([each.predicted_seconds for each in candidates], seconds),
        median_error=statistics.median(abs(each.error) for each in candidates),
        largest_error=max((each.error for each in candidates), key=abs),
        noise=max((abs(one.seconds / other.seconds - 1) for one, other in times.twins), default=0.0),
        tiers=tuple(_choose([each for each in candidates if each.harm_tier == tier]) for tier in tiers),
    )


def _choose(candidates: Sequence[CandidateTimes]) -> TierResult:
    best = min(candidates, key=_judged_seconds)
    by_prediction = sorted(candidates, key=lambda each: each.predicted_seconds)
    limit = CONTENDER_SHARE * by_prediction[0].predicted_seconds
    contenders = [each for each in by_prediction[:MOST_CONTENDERS] if each.predicted_seconds <= limit]
    taken = contenders[0]
    for rival in contenders[1:]:
        if min(rival.measured_seconds[::2]) < (1 - FASTER_SHARE) * min(taken.measured_seconds[::2]):
            taken = rival
    return TierResult(
        harm_tier=best.harm_tier,
        candidates=len(candidates),
        best=best.label,
        best_seconds=_judged_seconds(best),
        predicted_best=by_prediction[0].label,
        regret_unchecked=_judged_seconds(by_prediction[0]) / _judged_seconds(best) - 1,
        taken=taken.label,
        regret=_judged_seconds(taken) / _judged_seconds(best) - 1,
    )


def _judged_seconds(candidate: CandidateTimes) -> float:
    """The fastest step of the rounds that did not choose; of the one there is, where there is no other."""
    return min(candidate.measured_seconds[1::2] or candidate.measured_seconds)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's: Pearson's correlation of the ranks; equal values share the mean of theirs.

    >>> round(rank_correlation([1, 2, 3, 4], [10, 20, 40, 30]), 3)
    0.8
    """
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    order = sorted(values)
    return [order.index(value) + (order.count(value) - 1) / 2 for value in values]


def as_json(
    times: Sequence[ModelTimes], results: Sequence[ModelResult], settings: dict[str, Any], machine: Machine
) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "step_time",
        "machine": machine.to_dict(),
        "settings": settings,
        "targets": {
            "rank_correlation": RANK_TARGET,
            "regret": REGRET_TARGET,
            "missed": [line for result in results for line in result.missed],
        },
        "models": [asdict(result) for result in results],
        "times": [asdict(each) for each in times],
    }


def as_markdown(results: Sequence[ModelResult], settings: dict[str, Any], machine: Machine) -> str:
    """The table for the README."""
    lines = [
        "| model | candidates | measured | rank correlation | error, median (largest) | predicted best slower than the "
        f"best by | taken of {MOST_CONTENDERS} at most slower by | noise floor |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [f"| {' | '.join(_cells(result))} |" for result in results]
    about = (
        f"One optimizer step, AdamW; {settings['rounds']} rounds of all candidates in turns, the fastest step counts "
        f"({settings['clock']} clock). Of two numbers, the second is for tier 1 (states in 8 bits)."
    )
    return "\n".join([*lines, "", f"{about} {machine.caption}.", ""])


def _cells(result: ModelResult) -> list[str]:
    return [
        result.model,
        " + ".join(str(tier.candidates) for tier in result.tiers),
        f"{1000 * result.fastest_seconds:.0f} to {1000 * result.slowest_seconds:.0f} ms",
        f"{result.rank_correlation:.3f}",
        f"{100 * result.median_error:.0f} % ({100 * result.largest_error:+.0f} %)",
        ", ".join(f"{100 * tier.regret_unchecked:.1f} %" for tier in result.tiers),
        ", ".join(f"{100 * tier.regret:.1f} %" for tier in result.tiers),
        f"{100 * result.noise:.1f} %",
    ]


def _summary_table(results: Sequence[ModelResult]) -> Table:
    table = plain_table("Predicted against measured step time: choices within a tier")
    table.add_column("model")
    for column in (
        "candi-\ndates",
        "measured",
        "rank corre-\nlation",
        "error: median\n(largest)",
        "predicted best\nslower by",
        f"taken of {MOST_CONTENDERS}\nslower by",
        "noise\nfloor",
    ):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(*_cells(result))
    return table


def _candidate_table(times: ModelTimes) -> Table:
    table = plain_table(f"{times.model}: one optimizer step, fastest first")
    table.add_column("candidate")
    for column in ("tier", "measured", "predicted", "error"):
        table.add_column(column, justify="right")
    for each in sorted(times.candidates, key=lambda each: each.seconds):
        table.add_row(
            each.label,
            str(each.harm_tier),
            f"{1000 * each.seconds:.1f} ms",
            f"{1000 * each.predicted_seconds:.1f} ms",
            f"{100 * each.error:+.0f} %",
        )
    return table


def _targets_met(results: Sequence[ModelResult]) -> str:
    lowest = min(result.rank_correlation for result in results)
    regret = max(tier.regret for result in results for tier in result.tiers)
    return (
        f"met: rank correlation {lowest:.3f} >= {RANK_TARGET}, plan taken at most {100 * regret:.1f} % slower than the "
        f"best of its tier <= {100 * REGRET_TARGET:.0f} %"
    )


if __name__ == "__main__":
    sys.exit(main())
