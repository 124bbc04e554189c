"""A process group of any number of ranks in one process: collectives answer at once and move nothing.

Adapter for private names of torch: ``torch.distributed.distributed_c10d._world``, ``FakeProcessGroup``,
``_register_process_group`` and ``_unregister_process_group`` of ``torch._C._distributed_c10d``,
``ProcessGroup._register_backend``, ``_set_default_backend`` and ``_set_group_name``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(kw_only=True)
class _World:
    """What torch knows of process groups, for as long as ours stands in for them. Fields as torch names them."""

    default_pg: Any = None
    pg_map: dict[Any, Any] = field(default_factory=dict)
    pg_names: dict[Any, str] = field(default_factory=dict)
    pg_group_ranks: dict[Any, dict[int, int]] = field(default_factory=dict)
    pg_backend_config: dict[Any, str] = field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict[str, list[Any]] = field(default_factory=dict)
    pg_to_tag: dict[Any, str] = field(default_factory=dict)
    pg_coalesce_state: dict[Any, list[Any]] = field(default_factory=dict)
    comms: list[Any] = field(default_factory=list)


@contextmanager
def fake_ranks(ranks: int) -> Iterator[DeviceMesh]:
    """Within this context this process is rank 0 of ``ranks``; real process groups are as they were at the end.

    Rank 0 is the one that holds most where a parameter cannot be divided evenly: the first rows of each.

    Raises:
        UnsupportedError: if this torch is built without ``torch.distributed``.
    """
    from torch import distributed as dist  # here: importing it for one device would cost start-up time

    if not dist.is_available():
        raise UnsupportedError(
            f"A forecast for {ranks} ranks needs torch.distributed, and this torch {torch.__version__} is built "
            "without it. Install another build of torch, or forecast for one device."
        )
    from torch.distributed import distributed_c10d
    from torch.distributed.device_mesh import DeviceMesh

    native: Any = torch._C._distributed_c10d  # names of groups are a type of their own there
    # torch keeps what it found out of distributed tensors by the ranks' names: never those of a real mesh, and the same
    # ones in the next trace.
    name = f"memfit_fake_ranks_of_{ranks}"
    before = distributed_c10d._world
    with ExitStack() as ending, _disable_current_modes():
        group = _fake_group(native, ranks, name)
        native._register_process_group(name, group)
        ending.callback(native._unregister_process_group, name)
        distributed_c10d._world = _world_of(group, ranks, name)  # type: ignore[assignment]  # the same fields
        ending.callback(setattr, distributed_c10d, "_world", before)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(name,))
        undo = ending.pop_all()
    with undo:
        yield mesh


def _fake_group(native: Any, ranks: int, name: str) -> Any:
    group = native.ProcessGroup(native.HashStore(), 0, ranks)
    custom = native.ProcessGroup.BackendType.CUSTOM
    group._set_default_backend(custom)
    backend = native.FakeProcessGroup._create_internal(0, ranks, native.FakeProcessGroup.Options())
    group._register_backend(torch.device("cpu"), custom, backend)
    group._set_group_name(name)
    group._set_group_desc("ranks that are forecast for")
    return group


def _world_of(group: Any, ranks: int, name: str) -> _World:
    return _World(
        default_pg=group,
        pg_map={group: ("fake", None)},
        pg_names={group: name},
        pg_group_ranks={group: {rank: rank for rank in range(ranks)}},
        pg_backend_config={group: "cpu:fake"},
        tags_to_pg={"": [group]},
        pg_to_tag={group: ""},
    )
