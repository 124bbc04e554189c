"""One step recorded so that its variants can be told: what the program holds apart from what autograd holds.

In a real step a tensor lives as long as the program or autograd holds it. Activation checkpointing takes autograd's
hold away and repeats operators instead; what the program holds stays. A record keeps the two apart. Plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lightning_memfit.trace.timeline import Event, GradientLayout, ParameterLayout, Resident, Signature

MarkKind = Literal["saved", "unpacked", "used", "released"]


class Mark(NamedTuple):
    """Something autograd did with a tensor that it saved."""

    kind: MarkKind
    """``"saved"`` for the backward, ``"unpacked"`` by the node that saved it, ``"used"`` when the node has returned,
    ``"released"`` when autograd is done with the node, its results checked and summed to their shapes."""
    saved: int
    """Which of the saved tensors: index into :attr:`StepRecord.saved`."""
    event: int
    """Number of events before it; marks with the same number are in their own order."""


class SavedTensor(NamedTuple):
    """A tensor that autograd saved for the backward."""

    storage: int
    """Its storage."""
    requires_grad: bool
    """Whether it requires a gradient: activation checkpointing detaches it then."""


class BufferCopy(NamedTuple):
    """A buffer of a block that checkpointing copies in front of the block."""

    storage: int
    """The buffer's storage."""
    allocated_bytes: int
    """Bytes of a copy."""
    changes: bool
    """Whether the block changes it, so that the copy is kept; others are copied in the first call alone."""


class BlockCall(NamedTuple):
    """One call of a module that could be recomputed."""

    module: str
    """Qualified name."""
    micro_step: int
    """Which of the followed slices it belongs to."""
    first_event: int
    """Index of its first event."""
    end_event: int
    """Index after its last event."""
    first_mark: int
    """Index of its first mark."""
    end_mark: int
    """Index after its last mark."""
    inputs: tuple[int, ...]
    """Storages of the tensors it was given."""
    buffers: tuple[BufferCopy, ...]
    """Buffers that checkpointing would copy."""
    has_cache: bool
    """Whether it was given a key/value cache, which a recomputed call is not given."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """The slices of one optimizer step, up to the moment at which the optimizer steps."""

    residents: tuple[Resident, ...]
    """Storages alive when the step begins: parameters, buffers, the old gradients, the batch. No optimizer states."""
    events: tuple[Event, ...]
    """Operators, and frees of what *the program* holds no longer, in order of execution."""
    marks: tuple[Mark, ...]
    """What autograd saves and gives back, in order."""
    saved: tuple[SavedTensor, ...]
    """Every tensor that autograd saved, in order."""
    blocks: tuple[BlockCall, ...]
    """Calls of the modules that were followed, in the order in which they began."""
    slice_starts: tuple[int, ...]
    """For each followed slice, index of its first event."""
    forward_ends: tuple[int, ...]
    """For each followed slice, number of events when its forward was done."""
    gradients: frozenset[int]
    """Storages, allocated by the step, that hold a parameter's gradient at the end of a backward."""
    layouts: tuple[GradientLayout | None, ...]
    """By parameter of the module: its gradient when the optimizer steps; ``None`` for those without."""
    parameters: tuple[ParameterLayout, ...] = ()
    """The module's parameters in its own order, tied ones once."""
    gradient_of: Mapping[int, int] = field(default_factory=dict)
    """By storage that holds a gradient, old or new: index of the parameter."""
    samples: tuple[int, ...]
    """Samples in each followed slice."""
    left_out: int | None = None
    """Storage that stands for what *one* slice that is not followed returned beside the loss; ``None`` if nothing."""
    kept_bytes: tuple[int, ...] = ()
    """For each followed slice, bytes of what it returned beside the loss."""
    rng_state_bytes: int
    """Bytes of a generator's state, kept per recomputed call."""
    signatures: tuple[Signature, ...]
    """The distinct operator calls, for probing; empty if not collected."""
    num_parameters: int
    """Distinct parameter elements of the module, tied ones counted once."""
    recomputed: frozenset[str] = frozenset()
    """Qualified names of the modules that the program itself calls a second time, in the backward."""
    calls_root: bool | None = None
    """Whether the program calls the module itself, and not only parts of it; ``None`` where that is not known."""
    notes: tuple[str, ...] = ()
    """Assumptions made while recording, in words."""
