"""How a live Trainer spreads a run over several devices.

Adapter for ``DDPStrategy._ddp_kwargs``, ``DDPStrategy._timeout`` and ``find_unused_parameters`` among the former.
"""

from __future__ import annotations

import datetime
from typing import Any

from lightning_memfit.apply import fsdp2
from lightning_memfit.apply.deepspeed_config import is_deepspeed, zero_sharding
from lightning_memfit.ranks import DEFAULT_TIMEOUT, OneRank, Ranks, SeveralRanks
from lightning_memfit.sharding import Sharding
from lightning_memfit.undo import Undo


def sharding_of(trainer: Any) -> Sharding | None:
    """How the run is spread over devices; ``None`` on one device without an engine."""
    strategy = trainer.strategy
    if is_deepspeed(strategy):
        return zero_sharding(strategy, trainer.world_size)
    if is_model_parallel(strategy):
        return fsdp2.sharding_of(trainer.lightning_module)
    if is_ddp(strategy):
        view = bool(getattr(strategy, "_ddp_kwargs", {}).get("gradient_as_bucket_view", False))
        return Sharding(engine="ddp", ranks=trainer.world_size, gradient_as_bucket_view=view)
    return None


def ranks_of(trainer: Any) -> Ranks:
    """The processes of a run, once the strategy has connected them; every one of them asks at the same point."""
    if trainer.world_size == 1:
        return OneRank()
    return SeveralRanks(timeout=timeout_of(trainer.strategy))


def is_ddp(strategy: Any) -> bool:
    """Whether a strategy of either of Lightning's packages is DDP, and not DeepSpeed, which is derived from it."""
    return any(cls.__name__ == "DDPStrategy" for cls in type(strategy).__mro__) and not is_deepspeed(strategy)


def has_static_graph(strategy: Any) -> bool:
    """Whether DDP is told that every step uses the same parameters, equally often."""
    return is_ddp(strategy) and bool(getattr(strategy, "_ddp_kwargs", {}).get("static_graph", False))


def set_bucket_view(strategy: Any, gradient_as_bucket_view: bool) -> Undo:
    """Let DDP's wrapper, which is made next, keep gradients as views of its buckets, or not."""
    settings: dict[str, Any] = strategy._ddp_kwargs
    before = dict(settings)
    if gradient_as_bucket_view != bool(settings.get("gradient_as_bucket_view", False)):
        settings["gradient_as_bucket_view"] = gradient_as_bucket_view

    def undo() -> None:
        settings.clear()
        settings.update(before)

    return undo


def is_model_parallel(strategy: Any) -> bool:
    """Whether a strategy of either of Lightning's packages is the one under which ``configure_model`` shards."""
    return any(cls.__name__ == "ModelParallelStrategy" for cls in type(strategy).__mro__)


def timeout_of(strategy: Any) -> datetime.timedelta:
    """How long a strategy's ranks wait for each other."""
    timeout = getattr(strategy, "_timeout", None)
    return timeout if isinstance(timeout, datetime.timedelta) else DEFAULT_TIMEOUT
