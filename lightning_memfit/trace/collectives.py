"""What exchanging between ranks allocates: inside a collective, and in the buffers that ``fully_shard`` fills.

Adapter for private operators of torch: namespaces ``fsdp``, ``c10d`` and ``_c10d_functional`` of ``torch.ops``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_memfit.trace.device_rules import DeviceType
from lightning_memfit.trace.tensors import tensors_in

if TYPE_CHECKING:
    from lightning_memfit.trace.tracer import StepTracer

_AVERAGE_SCALAR_BYTES = 12
"""gloo divides by the number of ranks: a number in float64 and in float32."""


class Collectives:
    """Tells a tracer of what collectives need beside their results.

    gloo, with which hosts exchange, takes a copy of the gathered (or not yet scattered) whole; NCCL's own buffers are
    not of torch's allocator.

    Source: measured with a counting allocator on torch 2.13, 2 ranks: ``all_gather_single`` and
    ``reduce_scatter_single`` of n bytes take n bytes inside, averaging 12 (float32) more, ``all_reduce`` none.
    """

    def __init__(self, device_type: DeviceType) -> None:
        from torch.distributed.tensor import DTensor  # here: importing it for one device would cost start-up time

        self._distributed = DTensor
        self._takes_copies = device_type == "cpu"

    def is_for_parts(self, types: Sequence[type]) -> bool:
        """Whether an operator is called on distributed tensors, whose parts it will be called on next."""
        return any(issubclass(kind, self._distributed) for kind in types)

    def note(self, tracer: StepTracer, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An operator ran."""
        if func.namespace == "fsdp":
            filled = args[1] if func.__name__.startswith("all_gather_copy_in") else kwargs["out"]
            tracer.categorise(tensors_in(filled), "communication")
            if func.__name__.startswith("chunk_cat"):
                tracer.categorise(tensors_in(args[0]), "gradients")
        elif self._takes_copies and func.namespace == "c10d":
            tracer.needed_inside(str(func), _copied_bytes(func, args))


def _copied_bytes(func: Any, args: Sequence[Any]) -> int:
    name = func.__name__
    if name.startswith("_allgather_base_"):
        whole = args[0]
    elif name.startswith("_reduce_scatter_base_"):
        whole = args[1]
    else:
        return 0
    inside = int(whole.numel() * whole.element_size())
    return inside + (_AVERAGE_SCALAR_BYTES if name.startswith("_reduce") else 0)
