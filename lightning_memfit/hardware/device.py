"""A device as the planner sees it: numbers only, no driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]
AttentionBackend = Literal["flash", "efficient", "cudnn", "math"]


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """Another process on the same GPU."""

    pid: int
    """Its process id, as the driver counts: in a container it may be one of the host's."""
    held_bytes: int | None
    """What it holds on the GPU; ``None`` where the driver does not say."""


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """A device, its memory, and how that memory is counted."""

    name: str
    """The name the system reports, such as ``"AMD EPYC 7B13"``."""
    kind: DeviceKind
    """The torch device type."""
    capacity_bytes: int
    """The most that this process could hold: the available bytes and what the process holds already."""
    available_bytes: int
    """Free now: on a host, the smaller of the system's available memory and what the cgroup leaves; on a GPU, what
    the driver calls free."""
    process_bytes: int
    """What this process holds now: resident set size on a host; on a GPU, torch's reserved bytes and the context."""
    limit_bytes: int | None = None
    """The cgroup limit, where one is set."""
    limit_source: str | None = None
    """The file that sets the limit, such as ``"memory.max"``."""
    cores: int = 1
    """Cores of the host that this process may use; 1 for a GPU that is not in this machine."""
    supported_precisions: tuple[str, ...] = ("32-true", "bf16-mixed")
    """Precisions that run on this device, in Lightning's words."""

    # Of GPUs only.
    key: str | None = None
    """The catalogue's key, such as ``"a100-40gb"``; ``None`` for a host and for a GPU that the catalogue lacks."""
    is_present: bool = True
    """False for a GPU of the catalogue that is not in this machine."""
    uuid: str | None = None
    """The driver's identifier of the GPU or of the MIG instance."""
    compute_capability: tuple[int, ...] | None = None
    """Major and minor; ``None`` on a host and on AMD's GPUs."""
    multiprocessors: int | None = None
    """Streaming multiprocessors, or AMD's compute units; ``None`` where not known."""
    total_bytes: int | None = None
    """All memory as torch reports it (``total_memory``), whoever holds it."""
    context_low_bytes: int | None = None
    """Least bytes that a process holds outside torch's allocator once CUDA and cuBLAS are loaded."""
    context_high_bytes: int | None = None
    """Most of them; the same number where they were measured in this process."""
    neighbours: tuple[Neighbour, ...] | None = None
    """The other processes on the GPU; ``None`` where that is not known."""
    mig_profile: str | None = None
    """The slice of the GPU that this is, such as ``"1g.10gb"``; ``None`` for a whole one."""
    memory_fraction: float | None = None
    """The share of ``total_bytes`` that torch may reserve, where the process has set one."""
    allocator_settings: str | None = None
    """What the environment tells torch's allocator, such as ``"expandable_segments:True"``."""
    spills: bool = False
    """Whether the driver moves what does not fit to the host instead of failing (Windows, WSL)."""
    unified_memory: bool = False
    """Whether the GPU and the host share one memory, so that other processes' host memory takes from it."""
    bandwidth_bytes_per_second: int | None = None
    """Peak of the device's memory, by the vendor's document."""
    peak_flops: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Dense FLOP per second by ``fp32``, ``tf32``, ``fp16``, ``bf16``, ``fp8``, by the vendor's document."""
    link_bytes_per_second: int | None = None
    """What it sends to the other GPUs of its node at most, by the vendor's document; ``None`` where not known."""
    attention_backends: tuple[AttentionBackend, ...] = ()
    """Backends of ``scaled_dot_product_attention`` that the device can run."""
    unknowns: tuple[str, ...] = ()
    """What is not known of the device and is therefore assumed or left out, such as ``"rates"``."""


def shared_by(host: DeviceSpec, processes: int) -> DeviceSpec:
    """A host as one of several processes of a run may use it: each takes an equal share of what is free.

    Args:
        host: as this process alone would use it.
        processes: how many of the run are on it.
    """
    available = host.available_bytes // processes
    taken = host.available_bytes - available
    return replace(host, available_bytes=available, capacity_bytes=max(0, host.capacity_bytes - taken))
