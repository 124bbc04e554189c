"""The exact sequence of allocations and frees of one optimizer step. Plain values: no tensors, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lightning_memfit.plan import Category, Phase


class TensorShape(NamedTuple):
    """A tensor argument of an operator, without its data."""

    dtype: str
    """torch's name of the dtype, such as ``"float32"``."""
    size: tuple[int, ...]
    """Size of each dimension."""
    stride: tuple[int, ...]
    """Stride of each dimension in elements."""
    origin: tuple[int, int] | None
    """The signature and output that made its storage, where an operator of this timeline did."""


class Signature(NamedTuple):
    """An operator with the shapes of its arguments: what decides its temporaries."""

    op: str
    """Qualified name with overload, such as ``"aten.addmm.default"``."""
    args: tuple[Any, ...]
    """Positional arguments, tensors replaced by :class:`TensorShape`."""
    kwargs: Mapping[str, Any]
    """Keyword arguments, likewise."""


class Output(NamedTuple):
    """A storage that an operator allocated for one of its outputs."""

    storage: int
    """Number of the storage, unique in the timeline."""
    position: int
    """Position among the operator's flattened outputs."""
    allocated_bytes: int
    """Size as the fake run says; a probe may know better."""


class Operation(NamedTuple):
    """One operator call that allocated something or may have needed temporaries."""

    op: str
    """Qualified operator name."""
    module: str
    """Qualified name of the module it belongs to; in the backward, of the forward that it differentiates."""
    phase: Phase
    """The phase of the step."""
    signature: int | None
    """Index into :attr:`Timeline.signatures`; ``None`` for operators that never have temporaries (views)."""
    outputs: tuple[Output, ...]
    """What it allocated."""
    accumulates_into: int | None = None
    """Storage of its first argument, if the autograd engine would have added in place on a real run."""
    reads: tuple[int, ...] = ()
    """Storages of its tensor arguments, each once."""
    flops: int = 0
    """Floating point operations of this call; 0 for operators whose work is moving memory."""
    moved_bytes: int = 0
    """Bytes of its tensor arguments and results: what it reads and writes at least."""
    dtype: str = ""
    """Dtype that it computes in: that of its first floating point argument, else of its first result."""
    micro_step: int = 0
    """Which of the followed slices it belongs to; the optimizer step belongs to the last one."""
    recomputed: bool = False
    """Whether activation checkpointing repeats it."""
    views: int = 0
    """Operators dispatched since the one before that only made views: they take time, though they compute nothing."""
    inner_calls: int = 1
    """Steps that the operator takes one after the other: time steps of a recurrent layer, tensors of a list."""
    outside: bool = False
    """Whether no module was being called, as for a loss beside the model; ``module`` is ``""`` then."""


class Free(NamedTuple):
    """A storage whose last reference went away."""

    storage: int
    """Number of the storage."""
    phase: Phase
    """The phase of the step."""


class Resident(NamedTuple):
    """A storage that was there before the step began."""

    storage: int
    """Number of the storage."""
    allocated_bytes: int
    """Its size."""
    category: Category
    """What it holds."""


Event = Operation | Free


class ModuleCall(NamedTuple):
    """One call of a module in a forward, also in one that is recomputed."""

    module: str
    """Qualified name of the module; ``""`` is the root."""
    micro_step: int
    """Which of the followed slices it belongs to."""
    first_event: int
    """Index of its first event in :attr:`Timeline.events`."""
    end_event: int
    """Index after its last event."""
    outputs: tuple[int, ...]
    """Storages of the tensors that it returned."""
    recomputed: bool
    """Whether activation checkpointing repeats it."""


class GradientLayout(NamedTuple):
    """How a parameter's gradient lies in memory when the optimizer steps."""

    dtype: str
    """torch's name of the dtype, such as ``"float32"``."""
    size: tuple[int, ...]
    """Size of each dimension."""
    stride: tuple[int, ...]
    """Stride of each dimension in elements."""


class ParameterLayout(NamedTuple):
    """A parameter of the module."""

    name: str
    """Qualified name; of a tied one the first."""
    storage: int
    """Number of its storage, one of :attr:`Timeline.residents`."""
    dtype: str
    """torch's name of the dtype that it is kept in, such as ``"float32"``; a policy of FSDP2 computes in another."""
    size: tuple[int, ...]
    """Size of each dimension."""
    trainable: bool
    """Whether it requires a gradient."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One optimizer step: what was there, what came and went, in order."""

    residents: tuple[Resident, ...]
    """Storages alive when the step begins: parameters, buffers, optimizer states, the old gradients, the batch."""
    events: tuple[Event, ...]
    """Operators and frees in the order of execution."""
    categories: Mapping[int, Category]
    """Category of every storage that the step allocated."""
    signatures: tuple[Signature, ...]
    """The distinct operator calls, for probing; empty if the trace was asked not to collect them."""
    num_parameters: int
    """Distinct parameter elements of the module, tied ones counted once."""
    num_operations: int
    """Operators dispatched, views included."""
    flops: int
    """Floating point operations of the whole optimizer step (matrix products, convolutions, attention)."""
    recomputed_flops: int
    """Those of them that activation checkpointing repeats."""
    micro_steps: int = 1
    """Slices of the whole accumulation window."""
    followed_micro_steps: int = 1
    """Those of them that were followed, 1 or 2: from the second on they repeat."""
    calls: tuple[ModuleCall, ...] = ()
    """Calls of modules in the order in which they ended."""
    gradients: tuple[GradientLayout | None, ...] = ()
    """By parameter of the module: its gradient when the optimizer steps; ``None`` for those without."""
    parameters: tuple[ParameterLayout, ...] = ()
    """The module's parameters in its own order, tied ones once; empty where a timeline is of something else."""
    gradient_of: Mapping[int, int] = field(default_factory=dict)
    """By storage that holds a gradient, old or new: index of the parameter."""
    calls_root: bool | None = None
    """Whether the step calls the module itself, and not only parts of it; ``None`` where that is not known."""
    notes: tuple[str, ...] = ()
    """Assumptions made while tracing, in words."""

    @property
    def resident_bytes(self) -> int:
        """Bytes alive when the step begins."""
        return sum(resident.allocated_bytes for resident in self.residents)


@dataclass(frozen=True, kw_only=True)
class FlatStep:
    """The optimizer's step of one parameter group over one flat ``float32`` tensor, as ZeRO runs it."""

    parameters: tuple[int, ...]
    """The group's parameters in its own order: indices into :attr:`Timeline.parameters`."""
    elements: int
    """Elements of the flat tensor: one rank's share of the group."""
    step: Timeline
    """The step alone; its residents are the flat tensor, its gradient and the states."""


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What one operator did on the real device, on arguments of the traced shapes."""

    peak_bytes: int
    """Most bytes alive within the call beyond those alive before it, outputs included; 0 where a formula tells more."""
    output_bytes: Mapping[int, int]
    """Bytes of each output that has a storage of its own, by its position."""
    hidden_bytes: int | None = None
    """Most bytes alive within the call beyond its outputs, where a formula tells it instead of a real call."""

    @property
    def temporary_bytes(self) -> int:
        """Bytes inside the call beyond its outputs."""
        if self.hidden_bytes is not None:
            return self.hidden_bytes
        return max(0, self.peak_bytes - sum(self.output_bytes.values()))

    def peak_with(self, outputs_bytes: int) -> int:
        """Most bytes alive within the call beyond those before it, if its outputs are as large as traced."""
        return self.peak_bytes if self.hidden_bytes is None else outputs_bytes + self.hidden_bytes
