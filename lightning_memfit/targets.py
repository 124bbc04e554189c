"""What steps are forecast for: how the device computes, what its operators hide, and how its memory is counted."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.plan import MemoryBreakdown, Phase
from lightning_memfit.predict.allocator_settings import AllocatorSettings
from lightning_memfit.predict.cuda_memory import predict_cuda_memory
from lightning_memfit.predict.cuda_temporaries import CudaArchitecture, hidden_bytes, library_workspaces
from lightning_memfit.predict.memory import predict_memory
from lightning_memfit.trace.cpu_rules import CpuRules
from lightning_memfit.trace.cuda_attention import alike_in_attention
from lightning_memfit.trace.cuda_rules import CudaRules
from lightning_memfit.trace.device_rules import DeviceRules
from lightning_memfit.trace.op_probe import Probes
from lightning_memfit.trace.timeline import Operation, ProbeResult, Signature, Timeline
from lightning_memfit.units import MIB

_PRODUCTS: tuple[tuple[str, Phase], ...] = (("aten.mm.default", "forward"), ("aten.mm.default", "backward"))
_PRODUCTS_WITH_BIAS: tuple[tuple[str, Phase], ...] = (
    ("aten.addmm.default", "forward"),
    ("aten.addmm.default", "backward"),
)


class Prober(Protocol):
    """Finds what operators need inside."""

    def probe(self, signatures: Sequence[Signature]) -> Probes:
        """Results for the signatures that something is known of."""


class Target(Protocol):
    """A device, as forecasts see it."""

    @property
    def rules(self) -> DeviceRules:
        """How it computes."""

    @property
    def kept_bytes(self) -> int:
        """Bytes of the allocator that libraries keep beside the step."""

    @property
    def counts_like(self) -> Hashable:
        """Equal for targets that count the memory of one timeline alike, the same hidden in its operators."""

    @property
    def link_bytes_per_second(self) -> int | None:
        """What one device sends to the others of its node at most; ``None`` where that is not known."""

    def memory(
        self, timeline: Timeline, probes: Mapping[int, ProbeResult], *, zero_gradients_early: bool = False
    ) -> MemoryBreakdown:
        """The peak of one optimizer step in the steady state."""


@dataclass(frozen=True, kw_only=True)
class HostTarget:
    """The CPU: what is allocated is what is taken."""

    rules: DeviceRules = field(default_factory=CpuRules)
    kept_bytes: int = 0
    counts_like: Hashable = "host"
    link_bytes_per_second: int | None = None

    def memory(
        self, timeline: Timeline, probes: Mapping[int, ProbeResult], *, zero_gradients_early: bool = False
    ) -> MemoryBreakdown:
        """See :func:`~lightning_memfit.predict.memory.predict_memory`."""
        return predict_memory(timeline, probes, zero_gradients_early=zero_gradients_early)


@dataclass(frozen=True, kw_only=True)
class CudaTarget:
    """A GPU with torch's caching allocator, present or not."""

    architecture: CudaArchitecture
    """What decides how it computes."""
    settings: AllocatorSettings = field(default_factory=AllocatorSettings)
    """How the allocator is set up."""
    allowed_bytes: int | None = None
    """What torch allows itself, where a memory fraction is set."""
    link_bytes_per_second: int | None = None
    """What it sends to the other GPUs of its node at most; ``None`` where that is not known."""

    @property
    def rules(self) -> DeviceRules:
        """CUDA's, on fakes of the CPU; equal for GPUs whose attention is computed alike."""
        return CudaRules(compute_capability=alike_in_attention(self.architecture.compute_capability))

    @property
    def kept_bytes(self) -> int:
        """Workspaces of a step that multiplies matrices in its forward and in its backward."""
        return sum(
            self.settings.rounded_bytes(each.high_bytes) for each in library_workspaces(_PRODUCTS, self.architecture)
        )

    @property
    def counts_like(self) -> Hashable:
        """The allocator, and the workspaces of libraries; a timeline decides which of them it needs."""
        return (
            self.settings,
            self.allowed_bytes,
            library_workspaces((*_PRODUCTS, *_PRODUCTS_WITH_BIAS), self.architecture),
        )

    def memory(
        self, timeline: Timeline, probes: Mapping[int, ProbeResult], *, zero_gradients_early: bool = False
    ) -> MemoryBreakdown:
        """See :func:`~lightning_memfit.predict.cuda_memory.predict_cuda_memory`."""
        return predict_cuda_memory(
            timeline,
            probes,
            zero_gradients_early=zero_gradients_early,
            workspaces=library_workspaces(_operators(timeline), self.architecture),
            settings=self.settings,
            allowed_bytes=self.allowed_bytes,
        )


class FormulaProber:
    """Tells what operators take inside by formulas, for a GPU that is not there.

    Args:
        architecture: the GPU and torch's version.
        remarks: what is to be said with every answer.
    """

    def __init__(self, architecture: CudaArchitecture, *, remarks: tuple[str, ...] = ()) -> None:
        self._architecture, self._remarks = architecture, remarks

    def probe(self, signatures: Sequence[Signature]) -> Probes:
        """Results for the signatures that a formula covers; of an interval its lower end.

        Where that is nothing, and more than a mebibyte may be taken, the operator is named as one that is left out.
        """
        results, left_out = {}, {}
        for number, signature in enumerate(signatures):
            hidden = hidden_bytes(signature, self._architecture)
            if hidden is not None and hidden.low_bytes:
                results[number] = ProbeResult(peak_bytes=0, output_bytes={}, hidden_bytes=hidden.low_bytes)
            elif hidden is not None and hidden.high_bytes > MIB:
                left_out[signature.op] = f"its library decides: {hidden.reason}"
        return Probes(results=results, failures=left_out, remarks=self._remarks)


def _operators(timeline: Timeline) -> Iterator[tuple[str, Phase]]:
    return ((event.op, event.phase) for event in timeline.events if isinstance(event, Operation))


def _allowed_bytes(device: DeviceSpec) -> int | None:
    if device.memory_fraction is None or device.total_bytes is None:
        return None
    return int(device.memory_fraction * device.total_bytes)


def _torch_minor() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def target_of(device: DeviceSpec) -> Target:
    """How steps are forecast for a device.

    AMD's GPUs count as NVIDIA's of compute capability 8.0: torch calls the same operators for them.

    Raises:
        ConfigurationError: if the settings of the allocator are not known.
        UnsupportedError: if it is another allocator.
    """
    if device.kind == "cpu":
        return HostTarget()
    capability = device.compute_capability
    major, minor = (8, 0) if capability is None else capability[:2]
    return CudaTarget(
        architecture=CudaArchitecture(
            compute_capability=(major, minor),
            multiprocessors=device.multiprocessors,
            torch_minor=_torch_minor(),
            deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
            cublas_workspace_config=os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
        ),
        settings=AllocatorSettings.from_text(device.allocator_settings or ""),
        allowed_bytes=_allowed_bytes(device),
        link_bytes_per_second=device.link_bytes_per_second,
    )
