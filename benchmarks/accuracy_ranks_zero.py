"""Predicted against really measured peak of each rank under DeepSpeed's ZeRO 1 to 3, on gloo ranks and the CPU.

    python -m benchmarks.accuracy_ranks_zero [--cases PATTERN] [--json PATH] [--markdown PATH]

Every rank, of two or one alone, runs the real engine under an allocator that counts every byte; device and host are one
memory here, so that what is offloaded counts too. Predictions are made before, of one device's step that was traced on
fakes, without operator probes. Ends with code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import fnmatch
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy_cpu import percent
from benchmarks.accuracy_ranks_zero_case import ZeroCase, as_arguments, build, make_optimizer
from benchmarks.allocator.budget_allocator import build_allocator
from benchmarks.child_process import ROOT
from benchmarks.machine import this_machine
from lightning_memfit.plan import MemoryBreakdown
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.predict.zero import zero_timeline
from lightning_memfit.predict.zero_layout import ZeroSettings, group_share
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.flat_step import trace_flat_steps
from lightning_memfit.trace.training_step import program_of, trace_window
from lightning_memfit.units import format_bytes

CASE_TARGET = 0.03
"""Largest error of a case, as a share of the measured peak."""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank of one case. All peaks are bytes of the torch allocator above what was there before the model."""

    label: str
    """Of the case."""
    rank: int
    """Which of the case's."""
    measured_peak_bytes: int
    """Highest point of an optimizer step in the steady state."""
    predicted_peak_bytes: int
    """The same before anything ran."""
    measured_at_rest_bytes: int
    """Between two steps."""
    predicted_at_rest_bytes: int
    """The same before anything ran."""
    measured_by_phase: dict[str, int]
    """Highest point in the forwards, the backwards, and the optimizer's step."""
    predicted_by_phase: dict[str, int]
    """The same before anything ran."""

    @property
    def error(self) -> float:
        """Of the predicted peak, as a share of the measured one; negative where too little was predicted."""
        return self.predicted_peak_bytes / self.measured_peak_bytes - 1

    @property
    def at_rest_error(self) -> float:
        """The same between two steps."""
        return self.predicted_at_rest_bytes / self.measured_at_rest_bytes - 1


def all_cases() -> tuple[ZeroCase, ...]:
    """Every case."""
    return tuple(_cases())


def _cases() -> Iterator[ZeroCase]:
    for stage in (1, 2, 3):
        for model in ("mlp", "odd", "gpt"):
            for precision in ("32-true", "bf16-true"):
                for bucket in (100_000, 1_000_000, None):
                    yield ZeroCase(model=model, stage=stage, precision=precision, bucket=bucket)
        levers: tuple[dict[str, Any], ...] = (
            {"optimizer": "sgd"}, {"slices": 3}, {"slices": 3, "overlaps": True}, {"overlaps": True}, {"groups": 2},
            {"frozen": True}, {"offloads": True}, {"offloads": True, "slices": 2},
            {"offloads": True, "optimizer": "sgd"},
        )  # fmt: skip
        for lever in levers:
            yield ZeroCase(model="odd", stage=stage, bucket=100_000, **lever)
    for more in ({"persistence": 0}, {"persistence": 0, "prefetch": 0}, {"persistence": 1000, "prefetch": 200_000}):
        yield ZeroCase(model="gpt", stage=3, bucket=100_000, **more)
        yield ZeroCase(model="mlp", stage=3, bucket=100_000, precision="32-true", reuse=0, **more)
    yield ZeroCase(model="gpt", stage=3, bucket=100_000, slices=2, reuse=500_000, persistence=1000, prefetch=0)
    yield from _cases_of_one_rank()
    yield from _cases_with_parameters_on_the_host()


def _cases_with_parameters_on_the_host() -> Iterator[ZeroCase]:
    """Of a CPU only the sum of host and device is seen, as in all the others."""
    ways: tuple[dict[str, Any], ...] = (
        {"model": "odd", "slices": 3},
        {"model": "odd", "precision": "32-true", "groups": 2},
        {"model": "odd", "frozen": True},
        {"model": "mlp", "precision": "32-true", "slices": 3, "recomputes": True, "persistence": 1000, "reuse": 0},
        {"model": "mlp", "recomputes": True},
        {"model": "gpt"},
        {"model": "gpt", "slices": 3, "recomputes": True},
    )
    for ranks in (2, 1):
        for way in ways:
            bucket = 300_000 if way["model"] == "mlp" else 100_000
            yield ZeroCase(stage=3, ranks=ranks, bucket=bucket, offloads=True, parameters_too=True, **way)


def _cases_of_one_rank() -> Iterator[ZeroCase]:
    for stage in (1, 2, 3):
        for model, precision in (("odd", "bf16-true"), ("mlp", "32-true"), ("gpt", "bf16-true")):
            for offloads in (False, True):
                yield ZeroCase(
                    model=model, stage=stage, precision=precision, bucket=1_000_000, offloads=offloads, ranks=1
                )
        levers: tuple[dict[str, Any], ...] = (
            {"slices": 2}, {"slices": 2, "offloads": True}, {"overlaps": True}, {"overlaps": True, "offloads": True},
            {"groups": 2}, {"groups": 2, "offloads": True}, {"frozen": True, "offloads": True},
            {"optimizer": "sgd", "offloads": True}, {"slices": 2, "overlaps": True, "offloads": True},
        )  # fmt: skip
        for lever in levers:
            yield ZeroCase(model="odd", stage=stage, bucket=100_000, ranks=1, **lever)
    for reuse in (None, 0):
        yield ZeroCase(model="mlp", stage=3, bucket=100_000, persistence=1000, prefetch=0, reuse=reuse, ranks=1)


def predicted(case: ZeroCase, rank: int) -> tuple[MemoryBreakdown, int]:
    """The peak of one rank's step, and the bytes at rest."""
    module, slices = build(case)
    program = program_of(module, loss=lambda trained, batch: trained(batch), optimizer=partial(make_optimizer, case))
    sharding = Sharding(
        engine="deepspeed",
        ranks=case.ranks,
        zero_stage=case.stage,
        reduce_bucket_elements=case.bucket,
        overlap_communication=case.overlaps,
        prefetch_bucket_elements=case.prefetch,
        persistence_threshold_elements=case.persistence,
    )
    settings = ZeroSettings.of(sharding)
    if case.reuse is not None:
        settings = dataclasses.replace(settings, reuse_elements=case.reuse)
    timeline = zero_timeline(
        trace_window(
            program,
            {name: torch.cat([part[name] for part in slices]) for name in slices[0]},
            divide=partial(_divided, parts=case.slices),
            micro_steps=case.slices,
            floating=torch.bfloat16 if case.precision == "bf16-true" else None,
            steps=False,
        ),
        sharding,
        trace_flat_steps(program, partial(group_share, settings=settings)),
        offload="parameters" if case.parameters_too else "optimizer" if case.offloads else "never",
        rank=rank,
        memory="both",
        collectives="gloo",
        settings=settings,
    )
    return predict_memory(timeline), timeline.resident_bytes


def measured(cases: Sequence[ZeroCase], *, extensions: Path | None = None) -> list[tuple[dict[str, Any], ...]]:
    """What each rank's allocator counted, case by case.

    Args:
        cases: run one after the other by the same processes; of one number of ranks.
        extensions: folder in which DeepSpeed builds its extensions; its own by default.

    Raises:
        RuntimeError: if a rank fails, with its last words.
    """
    (ranks,) = {case.ranks for case in cases}
    library = build_allocator()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.accuracy_ranks_zero_case", "--library", str(library)]
    environment = {**os.environ, **_rendezvous(ranks), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    if extensions is not None:
        environment["TORCH_EXTENSIONS_DIR"] = str(extensions)
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as files:
        words = [Path(directory) / f"rank_{rank}.txt" for rank in range(ranks)]
        processes = [
            subprocess.Popen(
                [*command, as_arguments(cases)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=files.enter_context(path.with_suffix(".json").open("w")),
                stderr=files.enter_context(path.open("w")),
            )
            for rank, path in enumerate(words)
        ]
        found = []
        try:
            for process, path in zip(processes, words, strict=True):
                if process.wait():
                    raise RuntimeError(f"a rank ended with code {process.returncode}:\n{path.read_text()[-2000:]}")
                lines = path.with_suffix(".json").read_text().splitlines()
                found.append([json.loads(line) for line in lines if line.startswith("{")])
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return list(zip(*found, strict=True))


def compare(cases: Sequence[ZeroCase], *, extensions: Path | None = None) -> list[RankResult]:
    """Measure and predict; cases of as many ranks are run by the same processes."""
    results = []
    for ranks in dict.fromkeys(case.ranks for case in cases):
        results += _compare([case for case in cases if case.ranks == ranks], extensions)
    return results


def _compare(cases: Sequence[ZeroCase], extensions: Path | None) -> list[RankResult]:
    results = []
    for case, ranks in zip(cases, measured(cases, extensions=extensions), strict=True):
        for told in ranks:
            breakdown, at_rest = predicted(case, told["rank"])
            results.append(
                RankResult(
                    label=case.label,
                    rank=told["rank"],
                    measured_peak_bytes=max(told["by_phase"].values()),
                    predicted_peak_bytes=breakdown.peak_allocated_bytes,
                    measured_at_rest_bytes=told["at_rest_bytes"],
                    predicted_at_rest_bytes=at_rest,
                    measured_by_phase=told["by_phase"],
                    predicted_by_phase=dict(breakdown.by_phase),
                )
            )
    return results


def markdown(results: Sequence[RankResult]) -> str:
    """A table with the worse rank of each case."""
    lines = ["| case | measured peak | predicted | error | at rest |", "|---|---:|---:|---:|---:|"]
    for label in dict.fromkeys(result.label for result in results):
        worst = max((each for each in results if each.label == label), key=lambda each: abs(each.error))
        lines.append(
            f"| {label} | {format_bytes(worst.measured_peak_bytes)} | {format_bytes(worst.predicted_peak_bytes)} "
            f"| {percent(worst.error)} | {percent(worst.at_rest_error)} |"
        )
    return "\n".join(lines)


def _divided(batch: dict[str, torch.Tensor], parts: int) -> list[dict[str, torch.Tensor]]:
    return [{name: tensor.tensor_split(parts)[index] for name, tensor in batch.items()} for index in range(parts)]


def _rendezvous(ranks: int) -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default="*", help="pattern of labels, as in fnmatch")
    parser.add_argument("--json", type=Path, help="where results are written")
    parser.add_argument("--markdown", type=Path, help="where the table is written")
    chosen = parser.parse_args(arguments)
    machine = this_machine()
    cases = [case for case in all_cases() if fnmatch.fnmatchcase(case.label, chosen.cases)]
    results = compare(cases)
    table = f"{markdown(results)}\n\n{machine.caption}; DeepSpeed {metadata.version('deepspeed')}\n"
    print(table)
    if chosen.markdown:
        chosen.markdown.write_text(table)
    if chosen.json:
        rows = [{**asdict(each), "error": each.error} for each in results]
        versions = {**machine.to_dict(), "deepspeed": metadata.version("deepspeed")}
        chosen.json.write_text(json.dumps({"machine": versions, "results": rows}, indent=1) + "\n")
    worst = max(results, key=lambda each: abs(each.error))
    met = abs(worst.error) <= CASE_TARGET
    print(f"{'met' if met else 'missed'}: largest error {percent(worst.error)} ({worst.label}, rank {worst.rank})")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
