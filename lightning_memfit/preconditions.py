"""What this release does not drive, said before anything is changed.

Adapter for Lightning's public Trainer attributes only: ``strategy``, ``num_devices``, ``num_nodes``, ``callbacks``.
"""

from __future__ import annotations

import reprlib
from typing import Any

from lightning_memfit.apply.deepspeed_config import (
    frozen_on_the_device,
    is_deepspeed,
    offload_of,
    zero_sharding,
)
from lightning_memfit.apply.fsdp2 import is_fully_sharded
from lightning_memfit.apply.sharding import has_static_graph, is_ddp, is_model_parallel
from lightning_memfit.apply.slicing import check_loss_weight
from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.plan import PlanRequest

_WAY_OUT = "Set MEMFIT=off in the environment, or MemFit(mode='off'), to train as if MemFit were not there."


def check_batch_functions(*, split_batch: object, loss_weight: object) -> None:
    """Refuse what cannot be called, when it is given and not when the first batch comes.

    Raises:
        ConfigurationError: naming the setting, its value and what works.
    """
    if split_batch is not None and not callable(split_batch):
        raise ConfigurationError(
            f"split_batch={reprlib.repr(split_batch)} cannot be called. Pass a function (batch, micro_batch_size) -> "
            "pairs of (slice, number of samples), or leave it out."
        )
    check_loss_weight(loss_weight)


def check_trainer(trainer: Any, request: PlanRequest) -> None:
    """Refuse strategies, accelerators and numbers of devices that this release does not drive, or not as asked.

    Raises:
        UnsupportedError: naming what the run uses and what works.
        ConfigurationError: if a callback changes the accumulation while training, or the strategy cannot offload.
    """
    strategy, device = trainer.strategy, trainer.strategy.root_device
    found = (
        f"{type(strategy).__name__} on {device.type} with {trainer.num_devices} device(s) x {trainer.num_nodes} node(s)"
    )
    single = type(strategy).__name__ == "SingleDeviceStrategy" and trainer.num_devices * trainer.num_nodes == 1
    driven = single or is_ddp(strategy) or is_model_parallel(strategy) or is_deepspeed(strategy)
    if not driven or device.type not in ("cpu", "cuda"):
        raise UnsupportedError(
            f"MemFit does not drive {found} in this release; it drives SingleDeviceStrategy, DDPStrategy, "
            "DeepSpeedStrategy and ModelParallelStrategy (FSDP2) on cpu or cuda, such as Trainer(accelerator='cpu', "
            f"devices=2, strategy='ddp'). {_WAY_OUT}"
        )
    if has_static_graph(strategy):
        raise UnsupportedError(
            "DDPStrategy(static_graph=True) with MemFit: torch then learns the graph in the first backward, which must "
            "exchange gradients, and those of slices and of the proof do not (expect_autograd_hooks_ INTERNAL ASSERT "
            f"FAILED). Leave static_graph out; find_unused_parameters=True is driven. {_WAY_OUT}"
        )
    if is_model_parallel(strategy) and not is_fully_sharded(trainer.lightning_module):
        raise UnsupportedError(
            "ModelParallelStrategy, and fully_shard was called on nothing in the module: each rank would hold and "
            "train a whole model of its own. Call lightning_memfit.fully_shard(self) in configure_model."
        )
    _check_offload(trainer, request, found)
    asked = request.optimizer_implementation
    if is_deepspeed(strategy) and asked not in ("auto", "as-configured"):
        raise ConfigurationError(
            f"optimizer_implementation={asked!r} cannot be had under DeepSpeed, which steps flat tensors of its own "
            "with the optimizer as configure_optimizers makes it. Give that the option, such as "
            "torch.optim.AdamW(..., fused=True), and leave optimizer_implementation out."
        )
    for callback in trainer.callbacks:
        if type(callback).__name__ == "GradientAccumulationScheduler":
            raise ConfigurationError(
                f"GradientAccumulationScheduler({callback.scheduling}) changes accumulate_grad_batches while training, "
                "so that the effective batch is not one number. Remove the callback: MemFit sets the accumulation."
            )


def _check_offload(trainer: Any, request: PlanRequest, found: str) -> None:
    """Refuse to keep on the host what the strategy does not keep there, or less than it does by itself."""
    strategy, asked = trainer.strategy, request.offload
    if asked not in ("optimizer", "parameters"):
        return
    what, stage = ("the optimizer", 2) if asked == "optimizer" else ("optimizer and parameters", 3)
    if not is_deepspeed(strategy):
        raise ConfigurationError(
            f"MemFit(offload={asked!r}) keeps {what} on the host under DeepSpeed, and this run is that of {found}. Use "
            f"Trainer(strategy='deepspeed_stage_{stage}'), which runs on one GPU too, or offload='never'."
        )
    zero_stage = zero_sharding(strategy, 1).zero_stage
    if asked == "parameters" and zero_stage != 3:
        raise ConfigurationError(
            f"MemFit(offload='parameters') under stage {zero_stage} of DeepSpeed: parameters are divided, and kept on "
            "the host, in stage 3 alone. Use DeepSpeedStrategy(stage=3), or offload='optimizer'."
        )
    if asked == "parameters" and frozen_on_the_device(strategy, trainer.lightning_module):
        raise ConfigurationError(
            "MemFit(offload='parameters'), and configure_model divided frozen parameters on the device, where "
            "DeepSpeed would leave them. Use DeepSpeedStrategy(stage=3, offload_optimizer=True, "
            "offload_parameters=True), which divides them on the host."
        )
    if asked == "optimizer" and offload_of(strategy) == "parameters":
        raise ConfigurationError(
            "MemFit(offload='optimizer'), and the strategy keeps the parameters on the host too (offload_parameters). "
            "Use DeepSpeedStrategy(stage=3, offload_optimizer=True), or leave offload out."
        )


def check_job_of_a_sweep(trainer: Any) -> None:
    """Refuse ranks that Lightning would start by running the whole sweep again, before it starts them.

    Source: ``_hydra_subprocess_cmd`` of ``lightning/fabric/strategies/launchers/subprocess_script.py``, 2.6: the
    command of a rank is that of the process, ``-m`` and all of its values included.

    Raises:
        UnsupportedError: with the number of devices, and ways to train on them.
    """
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if trainer.world_size == 1 or environment is None or environment.creates_processes_externally:
        return
    raise UnsupportedError(
        f"This job of a sweep is to train on {trainer.world_size} devices, whose ranks Lightning starts by running the "
        "command again, the whole sweep with it. Let something else start the ranks of a job, such as SLURM "
        "(hydra/launcher=submitit_slurm with tasks_per_node), or run the job by itself, without -m."
    )


def notes_on_offload(trainer: Any, request: PlanRequest) -> tuple[str, ...]:
    """What the user should know who let MemFit offload under a strategy that cannot."""
    if request.offload != "auto" or is_deepspeed(trainer.strategy):
        return ()
    name = type(trainer.strategy).__name__
    return (
        f"offload='auto' without effect: {name} keeps everything on the device. Under strategy='deepspeed_stage_2' the "
        "optimizer can be kept on the host, also of one GPU; under strategy='deepspeed_stage_3' the parameters too",
    )


def idle_reason(trainer: Any) -> str | None:
    """Why a run that is supported has nothing to plan; ``None`` if it has."""
    if trainer.limit_train_batches == 0:
        return "limit_train_batches=0: there is nothing to train"
    return None
