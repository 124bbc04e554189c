"""What torch's ``DistributedDataParallel`` (DDP) adds to a step: the buckets in which gradients are exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import Event, Free, ParameterLayout, Resident, Timeline
from lightning_memfit.units import MIB

FIRST_BUCKET_BYTES = MIB
"""The bucket that is filled first is small, so that the exchange begins early."""
BUCKET_BYTES = 25 * MIB
"""A bucket is closed with the parameter that reaches this: ``DistributedDataParallel(bucket_cap_mb=25)``."""


def ddp_timeline(timeline: Timeline, sharding: Sharding) -> Timeline:
    """The timeline of one rank under DDP.

    1. Buckets of as many bytes as the gradients of all trainable parameters are there from the wrapping on.
    2. With ``gradient_as_bucket_view`` gradients are views of them: what the backward makes of a single slice is
       copied into its bucket and gone at once. Where several slices accumulate, only the last one exchanges, so that
       the gradients of the others stay beside the buckets until the backward of the last one. In front of the second
       forward buckets are made anew while gradients still are views of the first ones.

    Source: pytorch/pytorch ``torch/csrc/distributed/c10d/reducer.cpp``, 2.13: ``initialize_buckets``,
    ``mark_variable_ready_dense``, ``compute_bucket_assignment_by_size``; ``reducer.hpp`` for the sizes of buckets.

    Args:
        timeline: one optimizer step on one device, with or without its optimizer's step.
        sharding: DDP's settings.

    Ignores: the broadcast of weights when the module is wrapped (at most 250 MiB at once, gone before the first step);
    unused parameters, of which a rank keeps one flag each; in which order buckets are filled after the first step.
    """
    first = 1 + max([*(each.storage for each in timeline.residents), *timeline.categories], default=0)
    sizes = bucket_sizes(timeline.parameters)
    buckets = tuple(Resident(first + number, size, "communication") for number, size in enumerate(sizes))
    if sharding.gradient_as_bucket_view:
        timeline = _with_views(timeline)
    return replace(timeline, residents=(*timeline.residents, *buckets))


def bucket_sizes(parameters: tuple[ParameterLayout, ...]) -> tuple[int, ...]:
    """Bytes of each bucket, in the order in which they are filled: from the last parameter to the first, by dtype.

    >>> layer = ParameterLayout("w", 1, "float32", (512, 1024), True)
    >>> [size // 2**20 for size in bucket_sizes((layer,) * 14)]
    [2, 26]
    """
    closed: list[int] = []
    filling: dict[str, int] = {}
    begun: set[str] = set()
    for parameter in reversed(parameters):
        if not parameter.trainable:
            continue
        filled = filling.pop(parameter.dtype, 0) + parameter_bytes(parameter)
        if filled >= (BUCKET_BYTES if parameter.dtype in begun else FIRST_BUCKET_BYTES):
            closed.append(filled)
            begun.add(parameter.dtype)
        else:
            filling[parameter.dtype] = filled
    return (*closed, *(size for size in filling.values() if size))


_ITEM_BYTES: Mapping[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def elements_of(parameter: ParameterLayout) -> int:
    """Elements of a parameter."""
    elements = 1
    for size in parameter.size:
        elements *= size
    return elements


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a dtype; one for those that parameters seldom have (``uint8``, ``int8``, ``bool``)."""
    return _ITEM_BYTES.get(dtype, 1)


def parameter_bytes(parameter: ParameterLayout) -> int:
    """Bytes of a parameter, and so of its gradient."""
    return elements_of(parameter) * item_bytes(parameter.dtype)


def _with_views(timeline: Timeline) -> Timeline:
    return replace(timeline, events=tuple(_events_with_views(timeline)))


def _events_with_views(timeline: Timeline) -> Iterator[Event]:
    """The events, in which new gradients end when they were copied."""
    old = {each.storage for each in timeline.residents if each.category == "gradients"}
    new = {storage for storage in timeline.gradient_of if storage not in old}
    yield from (Free(storage, "forward") for storage in sorted(old))
    lasting = new - {event.storage for event in timeline.events if isinstance(event, Free)}
    single, behind_backward = timeline.micro_steps == 1, False
    for event in timeline.events:
        if isinstance(event, Free):
            if event.storage not in old and not (single and event.storage in new):
                yield event
            continue
        if not single and not behind_backward and event.phase in ("gradient_clipping", "optimizer_step"):
            behind_backward = True
            yield from (Free(storage, "backward") for storage in sorted(lasting))
        yield event
        if single:
            yield from (Free(output.storage, "backward") for output in event.outputs if output.storage in new)
    if not single and not behind_backward:
        yield from (Free(storage, "backward") for storage in sorted(lasting))
