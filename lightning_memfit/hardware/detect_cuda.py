"""Finds out what a GPU of this machine leaves to this process, through what the driver says."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.hardware.catalog import (
    ByteRange,
    GpuModel,
    any_context_bytes,
    attention_backends_of,
    cublas_bytes,
    find_gpu,
    precisions_of,
    supports_bf16,
)
from lightning_memfit.hardware.device import DeviceSpec, Neighbour

_MIG_IN_NAME = re.compile(r"\s+MIG\s+(\S+)\s*$")


@dataclass(frozen=True, kw_only=True)
class GpuFacts:
    """What does not change while a GPU is in use."""

    name: str
    """What the driver calls it; a MIG instance's ends in its profile."""
    total_bytes: int
    """All its memory as torch reports it."""
    uuid: str | None
    """The driver's identifier; the only one that torch and NVML share, since they may count devices differently."""
    multiprocessors: int | None = None
    """Streaming multiprocessors, or AMD's compute units; ``None`` where the driver does not say."""
    compute_capability: tuple[int, int] | None
    """Major and minor; ``None`` on AMD's."""
    gfx: str | None
    """AMD's name of the instruction set; ``None`` on NVIDIA's."""
    is_integrated: bool
    """Whether its memory is the host's (Jetson, GB10, APUs); a GH200 has memory of its own."""


class Driver(Protocol):
    """What is asked of torch and of the driver; indices are torch's, after ``CUDA_VISIBLE_DEVICES``."""

    def device_count(self) -> int:
        """GPUs that this process can use; 0 without CUDA."""

    def current_index(self) -> int:
        """The one that torch uses where none is named."""

    def facts(self, index: int) -> GpuFacts:
        """What does not change."""

    def free_bytes(self, index: int) -> int:
        """What the driver calls free now."""

    def reserved_bytes(self, index: int) -> int:
        """What torch's allocator of this process has reserved."""

    def memory_fraction(self, index: int) -> float | None:
        """The share of the total that torch may reserve; ``None`` where it does not say."""

    def processes(self, uuid: str) -> tuple[Neighbour, ...] | None:
        """All processes on the GPU, this one too; ``None`` where the driver's library is missing or refuses."""

    def spills(self, uuid: str | None) -> bool:
        """Whether the driver moves what does not fit to the host."""

    def allocator_settings(self) -> str | None:
        """What the environment tells torch's allocator."""

    def pid(self) -> int:
        """This process."""


def detect_gpu(index: int | None, *, driver: Driver, host: DeviceSpec) -> DeviceSpec:
    """Describe a GPU of this machine as it is now.

    1. The context is what this process holds beside torch's reserved bytes, where the driver tells; cuBLAS, which may
       not be loaded yet, can add to it. Where the driver does not tell, it is the catalogue's range.
    2. ``process_bytes`` is the reserved bytes and the context; of a range, the low end, since what the context takes
       already is no longer free.
    3. ``capacity_bytes`` is free now and what this process holds, and at most what torch may reserve and the context
       beside it. Never the total: neighbours hold some of that.

    Args:
        index: torch's index of the GPU; the current one if ``None``.
        driver: whom to ask.
        host: the machine that the GPU is in: its cores, and its memory where that is also the GPU's.

    Raises:
        ConfigurationError: if there is no GPU with this index.

    Ignores: neighbours that grow later.
    """
    index = _checked(index, driver)
    facts = driver.facts(index)
    profile = _mig_profile(facts.name)
    model = _model_of(facts, profile)
    reserved = driver.reserved_bytes(index)
    # A shared memory's free can exceed its total: unslothai/unsloth#7960.
    free = min(driver.free_bytes(index), facts.total_bytes)
    if facts.is_integrated:
        free = min(free, host.available_bytes)
    processes = None if facts.uuid is None else driver.processes(facts.uuid)
    own = next((each.held_bytes for each in processes or () if each.pid == driver.pid()), None)
    context_now, context = _context(facts, model, own=own, reserved=reserved, used=facts.total_bytes - free)
    neighbours = _neighbours(processes, driver.pid())
    fraction = driver.memory_fraction(index)
    capacity = free + reserved + context_now
    if fraction is not None:
        capacity = min(capacity, int(fraction * facts.total_bytes) + context_now)  # of torch's own bytes
    has_rates = model is not None and profile is None
    return DeviceSpec(
        name=facts.name,
        kind="cuda",
        capacity_bytes=capacity,
        available_bytes=free,
        process_bytes=reserved + context_now,
        cores=host.cores,
        supported_precisions=precisions_of(has_bf16=supports_bf16(facts.compute_capability, gfx=facts.gfx)),
        key=None if model is None else model.key,
        uuid=facts.uuid,
        compute_capability=facts.compute_capability,
        multiprocessors=facts.multiprocessors,
        total_bytes=facts.total_bytes,
        context_low_bytes=None if context is None else context.low,
        context_high_bytes=None if context is None else context.high,
        neighbours=neighbours,
        mig_profile=profile,
        memory_fraction=None if fraction == 1.0 else fraction,
        allocator_settings=driver.allocator_settings(),
        spills=driver.spills(facts.uuid),
        unified_memory=facts.is_integrated,
        bandwidth_bytes_per_second=model.bandwidth_bytes_per_second if model is not None and has_rates else None,
        link_bytes_per_second=model.link_bytes_per_second if model is not None and has_rates else None,
        peak_flops=model.peak_flops if model is not None and has_rates else {},
        attention_backends=attention_backends_of(facts.compute_capability, gfx=facts.gfx),
        unknowns=_unknowns(model if has_rates else None, own, context, neighbours),
    )


def index_of(uuid: str, *, driver: Driver) -> int:
    """Torch's index of the GPU with this identifier.

    Raises:
        ConfigurationError: if this process cannot use it (any more).
    """
    for index in range(driver.device_count()):
        if driver.facts(index).uuid == uuid:
            return index
    raise ConfigurationError(
        f"The GPU {uuid} is not among the {driver.device_count()} that this process can use. "
        "Look at CUDA_VISIBLE_DEVICES and at nvidia-smi -L."
    )


def _checked(index: int | None, driver: Driver) -> int:
    count = driver.device_count()
    if index is None:
        return driver.current_index()
    if not 0 <= index < count:
        usable = "'cuda:0'" if count == 1 else f"'cuda:0' to 'cuda:{count - 1}'"
        raise ConfigurationError(
            f"device='cuda:{index}' does not exist: this process can use {count} GPU(s). Use {usable}, "
            "or change CUDA_VISIBLE_DEVICES."
        )
    return index


def _mig_profile(name: str) -> str | None:
    found = _MIG_IN_NAME.search(name)
    return None if found is None else found.group(1)


def _model_of(facts: GpuFacts, profile: str | None) -> GpuModel | None:
    """The catalogue's entry, unless the memory says that another board carries the same name (RTX 3060 with 6 GB)."""
    try:
        model = find_gpu(_MIG_IN_NAME.sub("", facts.name))
    except ConfigurationError:
        return None
    total = model.torch_total_bytes
    # Drivers, ECC and virtual machines take a few per cent; the next size of memory is further away than a tenth.
    if profile is None and not 0.9 * total.low <= facts.total_bytes <= 1.1 * total.high:
        return None
    return model


def _context(
    facts: GpuFacts, model: GpuModel | None, *, own: int | None, reserved: int, used: int
) -> tuple[int, ByteRange | None]:
    """What the context takes now, and what it may take in the end."""
    if own is not None:
        now = max(0, own - reserved)
        return now, ByteRange(low=now, high=now + cublas_bytes().high)
    if facts.gfx is not None:
        return 0, None
    known = (None if model is None else model.context_bytes) or any_context_bytes()
    return max(0, min(known.low, used - reserved)), known


def _neighbours(processes: tuple[Neighbour, ...] | None, pid: int) -> tuple[Neighbour, ...] | None:
    # In a container the driver may count processes as the host does; then one of them is this one, unknown which.
    if processes is None or all(each.pid != pid for each in processes):
        return None
    return tuple(each for each in processes if each.pid != pid)


def _unknowns(
    model: GpuModel | None, own: int | None, context: ByteRange | None, neighbours: tuple[Neighbour, ...] | None
) -> tuple[str, ...]:
    unknown = {
        "rates": model is None,
        "context": context is None or (own is None and (model is None or model.context_bytes is None)),
        "neighbours": neighbours is None or any(each.held_bytes is None for each in neighbours),
    }
    return tuple(word for word, is_unknown in unknown.items() if is_unknown)
