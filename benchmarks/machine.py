"""Where and with what a benchmark ran: every result carries it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from lightning_memfit import __version__
from lightning_memfit.units import format_bytes


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine, its load and the versions."""

    processor: str
    """Name of the processor, or its architecture where the system does not tell."""
    cores: int
    """Logical cores that this process may use."""
    threads: int
    """Threads that torch uses within an operator."""
    memory_bytes: int
    """Physical memory."""
    system: str
    """Operating system and its release."""
    python: str
    torch: str
    lightning: str
    lightning_memfit: str
    date: str
    """When the benchmark began, in UTC, to the minute."""
    load_average: float | None
    """Processes that wanted to run during the last minute before the benchmark; ``None`` where it is not known.

    Well above the benchmark's own one: others were running, and times are longer than on a quiet machine.
    """

    @property
    def caption(self) -> str:
        """One line for below a table."""
        load = "" if self.load_average is None else f", load average at the start {self.load_average:.1f}"
        return (
            f"{self.processor}, {self.cores} cores, {self.threads} threads, {format_bytes(self.memory_bytes)}{load}; "
            f"Python {self.python}, torch {self.torch}, Lightning {self.lightning}, "
            f"lightning-memfit {self.lightning_memfit}; {self.date}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def this_machine() -> Machine:
    """Look at the machine now."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        lightning=metadata.version("lightning"),
        lightning_memfit=__version__,
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
