"""Shard a module on fakes as ``torch.distributed.fsdp.fully_shard`` would, for the duration of a trace.

torch's own engine runs: its hooks gather and free parameters on fakes as they do in training.

Adapter for private names of torch: ``UntypedStorage.resize_``, and of DTensor
``ShardingPropagator._propagate_tensor_meta_non_cached``.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_memfit.sharded_model import group_modules, policy_of, run_as_forward, run_steps_as_forward, shard_one
from lightning_memfit.sharding import Sharding
from lightning_memfit.trace.collectives import Collectives
from lightning_memfit.trace.fake_ranks import fake_ranks
from lightning_memfit.trace.tracer import StepTracer
from lightning_memfit.trace.whole_module import leave


@contextmanager
def fully_sharded(module: nn.Module, sharding: Sharding, tracer: StepTracer) -> Iterator[None]:
    """Within this context the module, whose parameters are whole fakes, is sharded over fake ranks.

    Enter it within :func:`~lightning_memfit.trace.faked_step.faked_step`, which puts back what the modules'
    ``__dict__`` held, and the parameters themselves.

    Args:
        module: the root of the names in ``sharding.shard_groups``.
        sharding: over how many ranks, in which groups, under which mixed-precision policy.
        tracer: is told of storages that are resized, and of what collectives take.

    Raises:
        ConfigurationError: if there is no module of a group's name, or no groups.
    """
    groups = group_modules(module, sharding.shard_groups)
    with ExitStack() as ending:
        mesh = ending.enter_context(fake_ranks(sharding.ranks))
        ending.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views; the real step says so
        ending.enter_context(_resizes_told(tracer))
        ending.enter_context(_shapes_found_unseen(tracer))
        tracer.collectives = Collectives(tracer.rules.device_type)
        ending.callback(setattr, tracer, "collectives", None)
        for group in groups:
            ending.callback(leave, group, type(group))
            shard_one(
                group,
                mesh,
                reshard_after_forward=sharding.reshard_after_forward,
                mixed_precision=policy_of(sharding),
            )
        if tracer.registered_methods is None:
            run_steps_as_forward(module)
        else:
            for part, names in tracer.registered_methods.items():
                for name in names:
                    run_as_forward(part, name)
        yield


@contextmanager
def _resizes_told(tracer: StepTracer) -> Iterator[None]:
    """Parameters are gathered into storages that are resized, which no operator tells of."""
    storages: Any = torch.UntypedStorage
    original = storages.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        done = original(storage, size)
        tracer.resized(storage, "communication")
        return done

    storages.resize_ = resize_
    try:
        yield
    finally:
        storages.resize_ = original


@contextmanager
def _shapes_found_unseen(tracer: StepTracer) -> Iterator[None]:
    """An operator on distributed tensors runs on whole fakes first, once for each kind, to find its result's shape."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    propagator: Any = ShardingPropagator
    original = propagator._propagate_tensor_meta_non_cached

    def unseen(self: Any, *args: Any, **kwargs: Any) -> Any:
        with tracer.not_recording():
            return original(self, *args, **kwargs)

    propagator._propagate_tensor_meta_non_cached = unseen
    try:
        yield
    finally:
        propagator._propagate_tensor_meta_non_cached = original
