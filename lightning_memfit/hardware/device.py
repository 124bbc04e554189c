"""A device as the planner sees it: numbers only, no driver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device, its memory, and how that memory is counted."""

    name: str
    """The name the system reports, such as ``"AMD EPYC 7B13"``."""
    kind: DeviceKind
    """The torch device type."""
    capacity_bytes: int
    """The most that this process could hold: on a host, the available bytes and what the process holds already."""
    available_bytes: int
    """Free now: on a host, the smaller of the system's available memory and what the cgroup leaves."""
    process_bytes: int
    """What this process holds now: resident set size on a host."""
    limit_bytes: int | None = None
    """The cgroup limit, where one is set."""
    limit_source: str | None = None
    """The file that sets the limit, such as ``"memory.max"``."""
    cores: int
    """Cores this process may use."""
    supported_precisions: tuple[str, ...] = ("32-true", "bf16-mixed")
    """Precisions that run on this device, in Lightning's words."""
