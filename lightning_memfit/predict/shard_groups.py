"""What the groups of ``fully_shard`` hold: whose parameters, how large whole and as one rank's share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lightning_memfit.errors import UnsupportedError
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.timeline import ParameterLayout, Timeline

_ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}


@dataclass(frozen=True, kw_only=True)
class ShardedParameter:
    """One parameter, divided by its rows; every rank's share is as large as the largest."""

    index: int
    """In :attr:`Timeline.parameters`."""
    share_bytes: int
    """Of one rank at rest, filled up to a whole number of rows."""
    whole_bytes: int
    """Of all ranks' shares in the dtype that they are gathered in."""
    cast_bytes: int
    """Of one rank's share in that dtype, where it is not the one at rest; else 0."""
    sent_bytes: int
    """Of all ranks' shares in the dtype that gradients are added up in."""
    sum_bytes: int
    """Of the whole gradient in that dtype, not filled up."""
    is_filled_up: bool
    """Whether its rows cannot be divided evenly."""
    trainable: bool
    """Whether it gets a gradient."""


@dataclass(frozen=True, kw_only=True)
class ShardGroup:
    """Parameters that are gathered together."""

    name: str
    """Qualified name of the module that ``fully_shard`` is called on; ``""`` is the root."""
    parameters: tuple[ShardedParameter, ...]
    """In the module's order, without those of groups inside it."""

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gathered parameters, and of the buffer they are gathered in."""
        return sum(parameter.whole_bytes for parameter in self.parameters)

    @property
    def cast_bytes(self) -> int:
        """Bytes of the rank's shares in the dtype in which they are gathered, where that is another."""
        return sum(parameter.cast_bytes for parameter in self.parameters)

    def holds(self, module: str) -> bool:
        """Whether a module is the group's own or lies inside it."""
        return not self.name or module == self.name or module.startswith(f"{self.name}.")


def shard_groups(timeline: Timeline, sharding: Sharding) -> tuple[ShardGroup, ...]:
    """The groups with their parameters, in the order of their names; those outside of every group are in none.

    Raises:
        UnsupportedError: if a parameter has no rows to divide, as torch refuses it too.
    """
    names = sharding.shard_groups
    owned: dict[str, list[ShardedParameter]] = {name: [] for name in names}
    for index, layout in enumerate(timeline.parameters):
        name = innermost(layout.name, names)
        if name is not None:
            owned[name].append(_divided(index, layout, sharding))
    return tuple(ShardGroup(name=name, parameters=tuple(parameters)) for name, parameters in owned.items())


def innermost(module: str, names: Sequence[str]) -> str | None:
    """The group that a module or parameter of a qualified name belongs to; ``None`` if none is around it.

    >>> innermost("blocks.1.mlp.weight", ("blocks.1", ""))
    'blocks.1'
    """
    around = [name for name in names if not name or module == name or module.startswith(f"{name}.")]
    return max(around, key=len, default=None)


def _divided(index: int, layout: ParameterLayout, sharding: Sharding) -> ShardedParameter:
    if not layout.size:
        raise UnsupportedError(
            f"fully_shard divides parameters by their rows, and {layout.name} is a single number. Give it one "
            "dimension: torch.zeros(1)."
        )
    ranks, computed, added_up = sharding.ranks, computing_dtype(layout, sharding), reducing_dtype(layout, sharding)
    rows, row = layout.size[0], math.prod(layout.size[1:])
    share = -(-rows // ranks) * row
    return ShardedParameter(
        index=index,
        share_bytes=share * item_bytes(layout.dtype),
        whole_bytes=share * ranks * item_bytes(computed),
        cast_bytes=share * item_bytes(computed) if computed != layout.dtype else 0,
        sent_bytes=share * ranks * item_bytes(added_up),
        sum_bytes=rows * row * item_bytes(added_up),
        is_filled_up=rows % ranks != 0,
        trainable=layout.trainable,
    )


def computing_dtype(layout: ParameterLayout, sharding: Sharding) -> str:
    """The dtype that a parameter of a group is gathered in, which is that of its whole gradient.

    Source: pytorch/pytorch ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``, 2.13: ``init_dtype_attrs``.
    """
    return sharding.param_dtype or layout.dtype


def reducing_dtype(layout: ParameterLayout, sharding: Sharding) -> str:
    """The dtype that the gradients of a parameter of a group are added up in, over ranks and between slices."""
    return sharding.reduce_dtype or computing_dtype(layout, sharding)


def item_bytes(dtype: str) -> int:
    """Bytes of one element of a floating dtype.

    Raises:
        UnsupportedError: for a dtype that is not known.
    """
    size = _ITEM_BYTES.get(dtype)
    if size is None:
        known = ", ".join(_ITEM_BYTES)
        raise UnsupportedError(f"Parameters of dtype {dtype} are not forecast under fully_shard. Known: {known}.")
    return size


def shares_by_storage(timeline: Timeline, groups: Sequence[ShardGroup]) -> Mapping[int, int]:
    """By storage of a parameter or of a gradient: bytes of a rank's share."""
    by_index = {parameter.index: parameter.share_bytes for group in groups for parameter in group.parameters}
    found = {layout.storage: by_index[index] for index, layout in enumerate(timeline.parameters) if index in by_index}
    found.update((storage, by_index[index]) for storage, index in timeline.gradient_of.items() if index in by_index)
    return found
