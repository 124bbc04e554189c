"""A strategy for a Trainer of several devices, or of one GPU that offloads: Lightning's own object, plan and reason."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.forecasting import make_plan
from lightning_memfit.plan import Candidate, Plan
from lightning_memfit.upstream import NAMESPACES


@dataclass(frozen=True, kw_only=True)
class StrategyChoice:
    """A strategy, and why."""

    strategy: Any
    """For ``Trainer(strategy=...)``: one of Lightning's strategies."""
    name: str
    """Its class, such as ``"DeepSpeedStrategy"``."""
    arguments: Mapping[str, Any]
    """What it was made with."""
    reason: str
    """Why it was chosen, and what it costs."""
    plan: Plan
    """The plan behind it; every number in it is predicted."""


def choose_strategy(
    module: nn.Module,
    batch: Any,
    devices: int,
    *,
    effective_batch_size: int,
    namespace: str | None = None,
    **settings: Any,
) -> StrategyChoice:
    """Choose a strategy that fits, and make it.

    Args:
        module: as in :func:`~lightning_memfit.forecasting.make_plan`.
        batch: one collated batch as the loader of one rank gives it.
        devices: devices of one kind in one node; for one GPU with ``offload="auto"`` it may be DeepSpeed's.
        effective_batch_size: samples per optimizer step over all of them.
        namespace: ``"lightning.pytorch"`` or ``"pytorch_lightning"``; by default that of the module, else the one that
            is installed.
        settings: further arguments of :func:`~lightning_memfit.forecasting.make_plan`, such as ``device``.

    Raises:
        NoFeasiblePlanError: if nothing fits.
        ConfigurationError: if a setting cannot be used, or Lightning is not installed.
    """
    plan = make_plan(module, batch, effective_batch_size=effective_batch_size, num_devices=devices, **settings)
    name, arguments = strategy_arguments(plan.candidate)
    reason = next((each.reason for each in plan.choices if each.lever == "strategy"), "one device")
    found = importlib.import_module(f"{namespace or namespace_of(module)}.strategies")
    strategy = getattr(found, name)(**arguments)
    return StrategyChoice(strategy=strategy, name=name, arguments=arguments, reason=reason, plan=plan)


def strategy_arguments(candidate: Candidate) -> tuple[str, dict[str, Any]]:
    """The class of Lightning's strategy for a candidate, and what it is made with.

    Source: ``lightning/pytorch/strategies``, 2.6: ``ddp.py``, ``deepspeed.py``, ``model_parallel.py``.
    """
    sharding = candidate.sharding
    if sharding is None:
        return "SingleDeviceStrategy", {}
    if sharding.engine == "ddp":
        return "DDPStrategy", {"gradient_as_bucket_view": sharding.gradient_as_bucket_view}
    if sharding.engine == "fsdp2":
        return "ModelParallelStrategy", {"data_parallel_size": sharding.ranks, "tensor_parallel_size": 1}
    arguments: dict[str, Any] = {
        "stage": sharding.zero_stage,
        "reduce_bucket_size": sharding.reduce_bucket_elements,
        "allgather_bucket_size": sharding.allgather_bucket_elements,
        "offload_optimizer": candidate.offload != "never",
        "offload_parameters": True if candidate.offload == "parameters" else None,
    }
    return "DeepSpeedStrategy", {name: value for name, value in arguments.items() if value is not None}


def namespace_of(module: nn.Module) -> str:
    """The Lightning package that a module comes from, else the one that is installed.

    Raises:
        ConfigurationError: if none is.
    """
    for cls in type(module).__mro__:
        for namespace in NAMESPACES:
            if cls.__module__.startswith(f"{namespace}."):
                return namespace
    for namespace in NAMESPACES:
        if importlib.util.find_spec(namespace.partition(".")[0]) is not None:
            return namespace
    raise ConfigurationError("a strategy needs Lightning, which is not installed. Run: pip install lightning.")
