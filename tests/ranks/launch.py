"""Runs functions on several real ranks: processes of their own that find each other over gloo, as torchrun starts them.

``python -m tests.ranks.launch MODULE FUNCTION FOLDER`` is what each of them runs: ``FUNCTION(rank)``, whose result is
written to ``FOLDER``.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import pickle
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one rank ended."""

    code: int
    """Its exit status."""
    output: str
    """What it printed, errors included."""
    result: Any
    """What the function returned; ``None`` if it raised."""


def run_on_ranks(
    function: Callable[[int], Any], *, count: int = 2, seconds: float = 300.0, environment: dict[str, str] | None = None
) -> list[Ended]:
    """Run a function of a module on every rank, and wait until all have ended.

    Args:
        function: importable by its module and name; is given the rank.
        count: how many ranks.
        seconds: after which all that still run are ended, and the test fails.
        environment: further variables.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        number = port.getsockname()[1]
        port.close()
        common = {
            **os.environ,
            **(environment or {}),
            "PYTHONPATH": str(ROOT),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(number),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "memfit-tests",
            "OMP_NUM_THREADS": "1",
            "SECONDS": str(seconds),
        }
        command = [sys.executable, "-m", "tests.ranks.launch", function.__module__, function.__name__, folder]
        outputs = [Path(folder) / f"{rank}.txt" for rank in range(count)]
        processes = []
        for rank, output in enumerate(outputs):
            with output.open("w") as file:
                own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, cwd=folder, env=own, stdout=file, stderr=subprocess.STDOUT))
        try:
            for process in processes:
                process.wait(timeout=seconds)
        except subprocess.TimeoutExpired as error:
            said = "\n".join(f"rank {rank}:\n{output.read_text()[-6000:]}" for rank, output in enumerate(outputs))
            raise AssertionError(f"ranks still ran after {seconds:.0f} s:\n{said}") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return [
            Ended(code=process.returncode, output=output.read_text(), result=_result(Path(folder) / f"{rank}.pickle"))
            for rank, (process, output) in enumerate(zip(processes, outputs, strict=True))
        ]


def results(ended: list[Ended]) -> list[Any]:
    """What the function returned on every rank; what a rank printed, if it failed."""
    for rank, each in enumerate(ended):
        assert each.code == 0, f"rank {rank} ended with {each.code}:\n{each.output[-6000:]}"
    return [each.result for each in ended]


def _result(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None


if __name__ == "__main__":
    module, name, folder = sys.argv[1:]
    faulthandler.dump_traceback_later(0.9 * float(os.environ["SECONDS"]))  # where it hangs, if it does
    rank = int(os.environ["RANK"])
    result = getattr(importlib.import_module(module), name)(rank)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(result))
    if dist.is_initialized():  # else its threads may still run while Python ends, which then aborts
        dist.destroy_process_group()
