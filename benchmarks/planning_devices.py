"""What planning for several absent GPUs takes, as somebody at a shell sees it: the whole command, imports included.

    python -m benchmarks.planning_devices [--runs N] [--json PATH] [--markdown PATH]

``memfit plan hardware=... devices=... model=...`` of Llama's shapes, each in a process of its own; of several runs the
fastest counts. Ends with code 1 if the plan of 70 billion parameters for eight GPUs took more than a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from benchmarks.machine import Machine, this_machine
from benchmarks.presentation import open_console, plain_table, progress_bar, write_text
from lightning_memfit.units import format_bytes, format_seconds

SECONDS_TARGET = 60
"""Wall-clock seconds of the largest command."""
CASES = (("a100-80gb", 8, "llama_70b"), ("a100-80gb", 2, "llama_8b"), ("rtx-4090", 4, "llama2_7b"))
"""GPU, how many of it, model."""


@dataclass(frozen=True, kw_only=True)
class DevicesPlan:
    """One command."""

    command: str
    """As it is typed."""
    verdict: str
    """Whether it fits."""
    plan: str
    """The plan, or the smallest that was found, in words."""
    predicted_bytes: int
    """What that needs on one GPU."""
    predicted_step_seconds: float | None
    """Seconds of an optimizer step, by assumed rates and links."""
    seconds: float
    """Wall clock of the command, the fastest run."""
    cpu_seconds: float
    """Of its process, over all threads, in that run."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2, help="processes per command; the fastest counts")
    parser.add_argument("--json", type=Path, help="write all numbers here")
    parser.add_argument("--markdown", type=Path, help="write the table here")
    chosen = parser.parse_args(arguments)
    console, machine = open_console(), this_machine()
    plans = []
    with progress_bar(console) as progress:
        task = progress.add_task("planning", total=len(CASES) * chosen.runs)
        for case in CASES:
            found = []
            for _ in range(chosen.runs):
                found.append(planned(*case))
                progress.advance(task)
            plans.append(min(found, key=lambda each: each.seconds))
    console.print(_table(plans))
    missed = plans[0].seconds > SECONDS_TARGET
    console.print(f"{'missed' if missed else 'met'}: {plans[0].seconds:.0f} s, target {SECONDS_TARGET} s")
    console.print(machine.caption, style="dim")
    if chosen.json is not None:
        write_text(chosen.json, json.dumps(as_json(plans, machine), indent=1))
    if chosen.markdown is not None:
        write_text(chosen.markdown, as_markdown(plans, machine))
    return int(missed)


def planned(gpu: str, devices: int, model: str) -> DevicesPlan:
    """Run one command in a folder without configs."""
    words = ["plan", f"hardware={gpu}", f"devices={devices}", f"model={model}"]
    with tempfile.TemporaryDirectory() as folder:
        paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "XDG_CACHE_HOME": folder, "PYTHONPATH": paths}
        before, begin = os.times(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "lightning_memfit.cli", *words, "--json"],
            cwd=folder, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        seconds, after = time.perf_counter() - begin, os.times()
    if not done.stdout:
        raise RuntimeError(f"memfit {' '.join(words)} ended with code {done.returncode}: {done.stderr[-500:]}")
    (device,) = json.loads(done.stdout)["devices"]
    return DevicesPlan(
        command=f"memfit {' '.join(words)}",
        verdict=device["verdict"],
        plan=device["predicted"]["candidate"],
        predicted_bytes=device["predicted"]["minimum_feasible_bytes"],
        predicted_step_seconds=device["predicted"]["step_seconds"],
        seconds=seconds,
        cpu_seconds=after.children_user + after.children_system - before.children_user - before.children_system,
    )


def as_json(plans: Sequence[DevicesPlan], machine: Machine) -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "benchmark": "planning_devices",
        "statistic": "seconds of a whole command",
        "machine": machine.to_dict(),
        "target_seconds": SECONDS_TARGET,
        "plans": [asdict(plan) for plan in plans],
    }


def as_markdown(plans: Sequence[DevicesPlan], machine: Machine) -> str:
    """The table for the documentation."""
    return "\n".join(
        [
            "| command | verdict | plan | a GPU needs | seconds per step (assumed) | the command took | CPU |",
            "|---|---|---|--:|--:|--:|--:|",
            *(f"| {' | '.join(_cells(plan))} |" for plan in plans),
            "",
            f"{machine.caption}.",
            "",
        ]
    )


def _cells(plan: DevicesPlan) -> list[str]:
    step = plan.predicted_step_seconds
    return [
        f"`{plan.command}`", plan.verdict, plan.plan, format_bytes(plan.predicted_bytes),
        "" if step is None else format_seconds(step), f"{plan.seconds:.0f} s", f"{plan.cpu_seconds:.0f} s",
    ]  # fmt: skip


def _table(plans: Sequence[DevicesPlan]) -> Table:
    table = plain_table("Plans for several GPUs (predicted), and what the command took")
    table.add_column("command")
    table.add_column("verdict")
    table.add_column("plan")
    for column in ("a GPU\nneeds", "per step\n(assumed)", "took", "CPU"):
        table.add_column(column, justify="right", no_wrap=True)
    for plan in plans:
        table.add_row(*_cells(plan))
    return table


if __name__ == "__main__":
    sys.exit(main())
