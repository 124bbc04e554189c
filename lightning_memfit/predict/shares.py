"""What one rank holds at rest of a model that is spread over devices, and what it needs beside that to exchange it.

Sums by element, from the engines' own papers and sources: they rank strategies in milliseconds. What confirms a plan is
the timeline of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_memfit.plan import Offload
from lightning_memfit.predict.ddp import bucket_sizes, elements_of, item_bytes, parameter_bytes
from lightning_memfit.predict.shard_groups import computing_dtype, innermost, reducing_dtype
from lightning_memfit.predict.zero_layout import ZeroSettings, pinned_bytes, share_of
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import ParameterLayout

_MASTER_BYTES = 4
"""ZeRO steps ``float32`` copies of the parameters."""
_NORM_BYTES = 8
"""An element of which a norm is taken: ``get_norm_dtype`` in ``zero/utils.py``."""


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Bytes of one rank; optimizer states come with the optimizer's own step."""

    parameters_bytes: int
    """Parameters at rest."""
    gradients_bytes: int
    """Gradients when the backward is done; also those of the step before, until they are zeroed."""
    masters_bytes: int = 0
    """``float32`` copies that the optimizer steps; ZeRO only."""
    step_gradients_bytes: int = 0
    """``float32`` copies of the gradients that the optimizer steps with; ZeRO only."""
    forward_bytes: int = 0
    """What exchanging takes while a forward runs."""
    backward_bytes: int = 0
    """What exchanging takes while a backward runs, gradients that are not divided yet included."""
    always_bytes: int = 0
    """What exchanging holds all the time."""
    host_bytes: int = 0
    """What lies in the host's memory instead, optimizer states not counted."""


def shares_of(
    parameters: Sequence[ParameterLayout], sharding: Sharding, *, offload: Offload = "never", micro_steps: int = 1
) -> Shares:
    """What one rank holds.

    Args:
        parameters: of the module, in its dtype of the forward; under a policy of FSDP2, in their own.
        sharding: how it is spread.
        offload: what lies in the host's memory.
        micro_steps: slices per optimizer step on one rank.
    """
    if sharding.engine == "ddp":
        return _of_ddp(parameters, sharding, micro_steps)
    if sharding.engine == "fsdp2":
        return _of_fsdp2(parameters, sharding, micro_steps)
    return _of_zero(parameters, sharding, offload, micro_steps)


def _of_ddp(parameters: Sequence[ParameterLayout], sharding: Sharding, micro_steps: int) -> Shares:
    """Source: as :func:`~lightning_memfit.predict.ddp.ddp_timeline`."""
    buckets = sum(bucket_sizes(tuple(parameters)))
    views = sharding.gradient_as_bucket_view
    return Shares(
        parameters_bytes=sum(map(parameter_bytes, parameters)),
        gradients_bytes=0 if views else _gradients(parameters),
        always_bytes=buckets,
        backward_bytes=_gradients(parameters) if views and micro_steps > 1 else 0,
    )


def _of_fsdp2(parameters: Sequence[ParameterLayout], sharding: Sharding, micro_steps: int) -> Shares:
    """Shards along dimension 0, and gathered groups.

    1. In the forward a gathered group stands beside the buffer that it was gathered in; the root stays gathered.
    2. In the backward the group before it is gathered meanwhile, the group's gradients are whole, and those of the one
       before are being exchanged. The root's gradients come when activations are gone: they are not counted.
    3. Where gradients are exchanged once per step, the slices before the last keep whole ones, in the dtype in which
       they are added up; where that is another than the computing one, those of a group's slice are there beside them.
    4. Under a mixed-precision policy the rank's share of a group is cast while the group is gathered.

    Source: pytorch/pytorch ``torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py``, 2.13: ``wait_for_unshard``,
    ``post_backward``; ``_fsdp_state.py``: the root is not resharded after its forward.
    """
    ranks = sharding.ranks
    computing, reducing = computing_layouts(parameters, sharding), reducing_layouts(parameters, sharding)
    groups, sent = groups_of(computing, sharding.shard_groups), groups_of(reducing, sharding.shard_groups)
    root = sum(map(parameter_bytes, groups.get("", ())))
    members = [group for name, group in groups.items() if name]
    gathered, next_gathered = _two_largest(sum(map(parameter_bytes, group)) for group in members)
    cast = -(-max(root, gathered) // ranks) if computing != list(parameters) else 0
    unreduced = max((_gradients(group) for group in members), default=0)
    _, next_reduced = _two_largest(_gradients(group) for name, group in sent.items() if name)
    if not sharding.reshard_after_forward:
        root, gathered, next_gathered = sum(map(parameter_bytes, computing)), 0, 0
    waiting = micro_steps > 1 and sharding.synchronisation == "step"
    undivided = _gradients(reducing) if waiting else 0
    if undivided and reducing != computing:
        undivided += unreduced
    return Shares(
        parameters_bytes=sum(shard_bytes(parameter, ranks) for parameter in parameters),
        gradients_bytes=sum(shard_bytes(parameter, ranks) for parameter in parameters if parameter.trainable),
        forward_bytes=root + 2 * gathered + cast,
        backward_bytes=root + gathered + next_gathered + cast + max(unreduced + next_reduced, undivided),
    )


def computing_layouts(parameters: Iterable[ParameterLayout], sharding: Sharding) -> list[ParameterLayout]:
    """The same parameters in the dtypes in which forward and backward have them, and so whole gradients."""
    return _in_groups(parameters, sharding, computing_dtype)


def reducing_layouts(parameters: Iterable[ParameterLayout], sharding: Sharding) -> list[ParameterLayout]:
    """The same parameters in the dtypes in which their gradients are added up over ranks."""
    return _in_groups(parameters, sharding, reducing_dtype)


def _in_groups(
    parameters: Iterable[ParameterLayout], sharding: Sharding, dtype: Callable[[ParameterLayout, Sharding], str]
) -> list[ParameterLayout]:
    if not sharding.has_policy:
        return list(parameters)
    return [
        each if innermost(each.name, sharding.shard_groups) is None else each._replace(dtype=dtype(each, sharding))
        for each in parameters
    ]


def _of_zero(parameters: Sequence[ParameterLayout], sharding: Sharding, offload: Offload, micro_steps: int) -> Shares:
    """Source: Rajbhandari et al., ZeRO (arXiv 1910.02054), section 5; deepspeedai/DeepSpeed ``runtime/zero``, 0.19.

    1. Stage 1 divides states and ``float32`` copies, stage 2 gradients too, stage 3 parameters too.
    2. Gradients are reduced in a bucket, and a second one where reducing overlaps the backward; in stage 3 in a copy.
    3. In stage 3 gathered parameters are kept that are used again within 10^9 elements of parameters; one rank gathers
       none, unless its parameters are on the host.
    4. On the host lie ``float32`` copies of the parameters and of the gradients, and one in the dtype of the
       parameters: in stage 3 of gradients that arrive, else of new parameters that leave. In stages 1 and 2 there is a
       buffer of the largest gradient on either side; stage 2 adds up whole gradients of several slices on the host.
    5. Shares of parameters on the host are in one pinned buffer for each group; here they count as they are, and
       :func:`pinned_beyond_bytes` says what pinning adds. The device copies of them that are sent are not counted.
    """
    settings = ZeroSettings.of(sharding)
    stage, ranks = settings.stage, settings.ranks
    item = max((item_bytes(parameter.dtype) for parameter in parameters), default=4)
    trained = sum(elements_of(parameter) for parameter in parameters if parameter.trainable)
    whole, gradients = sum(map(parameter_bytes, parameters)), _gradients(parameters)
    bucket = (2 if stage == 3 else settings.buckets) * item * settings.bucket_elements
    masters = -(-trained // ranks) * _MASTER_BYTES
    largest = max(map(elements_of, parameters), default=0)
    largest_trained = max((elements_of(parameter) for parameter in parameters if parameter.trainable), default=0)
    kept = settings.reuse_elements + largest
    gathers = stage == 3 and (ranks > 1 or offload == "parameters")
    fetched = item * min(kept, sum(map(elements_of, parameters))) if gathers else 0
    off = offload != "never"
    # On its way to the host the norm of a gradient is taken of a float64 copy of the rank's share of it.
    norm = -(-largest_trained // ranks) * _NORM_BYTES if off else 0
    at_rest = whole if stage < 3 else -(-whole // ranks)
    host = 2 * masters + masters // _MASTER_BYTES * item
    if stage < 3:
        host += item * largest_trained
    if stage == 2 and micro_steps > 1:  # one that is cut is whole on both sides
        host += item * min(trained, -(-trained // ranks) + (largest_trained if ranks > 1 else 0))
    return Shares(
        parameters_bytes=0 if offload == "parameters" else at_rest,
        gradients_bytes=gradients if stage == 1 else 0 if off else -(-gradients // ranks),
        masters_bytes=0 if off else masters,
        step_gradients_bytes=0 if off else masters,
        forward_bytes=fetched,
        backward_bytes=fetched + bucket + max(item * largest, norm),
        always_bytes=item * largest_trained if off and stage < 3 else 0,
        host_bytes=(host if off else 0) + (at_rest if offload == "parameters" else 0),
    )


def pinned_beyond_bytes(
    parameters: Sequence[ParameterLayout], groups: Iterable[Sequence[int]], sharding: Sharding
) -> int:
    """Bytes that DeepSpeed's buffers of parameters take on a GPU's host beyond the shares that lie in them.

    Source: ``_create_param_groups_fp16_flat_cpu_memory`` in ``deepspeed/runtime/zero/stage3.py`` 0.19.8: one pinned
    tensor for each parameter group.

    Args:
        parameters: of the module, in its dtype of the forward.
        groups: by parameter group the indices of its parameters.
        sharding: how they are spread.
    """
    item = max((item_bytes(parameter.dtype) for parameter in parameters if parameter.trainable), default=4)
    sizes = [item * sum(share_of(elements_of(parameters[each]), sharding.ranks) for each in own) for own in groups]
    return sum(pinned_bytes(size) - size for size in sizes)


def _two_largest(sizes: Iterable[int]) -> tuple[int, int]:
    largest = sorted((0, 0, *sizes))
    return largest[-1], largest[-2]


def groups_of(parameters: Iterable[ParameterLayout], names: Sequence[str]) -> dict[str, list[ParameterLayout]]:
    """Parameters by the innermost named module that they belong to; ``""`` is the root.

    >>> weight = ParameterLayout("blocks.0.mlp.weight", 1, "float32", (2, 2), True)
    >>> list(groups_of([weight], ["", "blocks", "blocks.0", "blocks.01"]))
    ['blocks.0']
    """
    known = set(names)
    found: dict[str, list[ParameterLayout]] = {}
    for parameter in parameters:
        name = parameter.name.rpartition(".")[0]
        while name and name not in known:
            name = name.rpartition(".")[0]
        found.setdefault(name, []).append(parameter)
    return found


def shard_bytes(parameter: ParameterLayout, ranks: int) -> int:
    """Bytes of the first rank's shard, which is the largest: rows are not divided."""
    if not parameter.size:
        return item_bytes(parameter.dtype)
    rows = -(-parameter.size[0] // ranks)
    return rows * (parameter_bytes(parameter) // max(1, parameter.size[0]))


def exchanged_bytes(
    parameters: Sequence[ParameterLayout], sharding: Sharding | None, *, micro_steps: int
) -> int | None:
    """Bytes that one rank sends in one optimizer step; ``None`` on one device.

    An all-gather or a reduce-scatter of ``n`` bytes over ``R`` ranks sends ``n (R - 1) / R`` from each, an all-reduce
    is both.

    1. DDP: an all-reduce of the gradients. ZeRO-1: one of each optimizer step, as a reduce-scatter of gradients and an
       all-gather of parameters; ZeRO-2 reduces after every slice.
    2. ZeRO-3 and FSDP2: parameters are gathered in every forward and in every backward, gradients reduced after every
       slice, or after the last; under a policy of FSDP2 each in its dtype.

    Source: Patarasu and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations (JPDC 69/2, 2009);
    Rajbhandari et al., ZeRO (arXiv 1910.02054), section 7.

    Args:
        parameters: of the module, in its dtype of the forward; under a policy of FSDP2, in their own.
        sharding: how it is spread.
        micro_steps: slices per optimizer step on one rank.

    Ignores: that a block that is run again in the backward needs its parameters there anyway (nothing is added), and
    what small parameters of ZeRO-3 that stay whole save.
    """
    if sharding is None:
        return None
    whole = sum(map(parameter_bytes, computing_layouts(parameters, sharding)))
    gradients = _gradients(reducing_layouts(parameters, sharding))
    exchanges = micro_steps if sharding.synchronisation == "slice" or sharding.zero_stage in (2, 3) else 1
    if sharding.engine == "ddp":
        total = 2 * gradients * exchanges
    elif sharding.engine == "fsdp2" or sharding.zero_stage == 3:
        gathers = 2 if sharding.reshard_after_forward else 1
        total = gathers * whole * micro_steps + gradients * exchanges
    else:
        total = gradients * exchanges + whole
    return total * (sharding.ranks - 1) // sharding.ranks


def _gradients(parameters: Iterable[ParameterLayout]) -> int:
    return sum(parameter_bytes(parameter) for parameter in parameters if parameter.trainable)
