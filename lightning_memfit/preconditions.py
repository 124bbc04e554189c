"""What this release does not drive, said before anything is changed.

Adapter for Lightning's public Trainer attributes only: ``strategy``, ``num_devices``, ``num_nodes``, ``callbacks``.
"""

from __future__ import annotations

from typing import Any

from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.plan import PlanRequest

_WAY_OUT = "Set MEMFIT=off in the environment, or MemFit(mode='off'), to train as if MemFit were not there."


def check_settings(request: PlanRequest, **reserved: Any) -> None:
    """Refuse settings whose levers this release does not have, instead of ignoring them.

    Args:
        request: what the user asked for.
        **reserved: constructor arguments that are reserved, by name; ``None`` means not given.

    Raises:
        UnsupportedError: naming the setting, its value and what works.
    """
    given = {name: value for name, value in reserved.items() if value is not None}
    for name, value in (
        *given.items(),
        *_not_in(request, "optimizer_states", ("auto", "as-configured")),
        *_not_in(request, "optimizer_implementation", ("auto", "as-configured")),
        *_not_in(request, "offload", ("never",)),
        *_not_in(request, "on_no_fit", ("raise",)),
        *_not_in(request, "precision", (None, "32-true", "bf16-mixed")),
    ):
        raise UnsupportedError(
            f"MemFit({name}={value!r}) is not supported in this release. Its levers are slicing, zeroing gradients "
            "early, and activation_checkpointing, with precision '32-true' or 'bf16-mixed', and on_no_fit='raise'. "
            f"Leave {name} out."
        )


def _not_in(request: PlanRequest, name: str, works: tuple[Any, ...]) -> list[tuple[str, Any]]:
    value = getattr(request, name)
    return [] if value in works else [(name, value)]


def check_trainer(trainer: Any) -> None:
    """Refuse strategies, accelerators and numbers of devices that this release does not drive.

    Raises:
        UnsupportedError: naming what the run uses and what works.
        ConfigurationError: if a callback changes the accumulation while training.
    """
    strategy, device = trainer.strategy, trainer.strategy.root_device
    found = (
        f"{type(strategy).__name__} on {device.type} with {trainer.num_devices} device(s) x {trainer.num_nodes} node(s)"
    )
    single = type(strategy).__name__ == "SingleDeviceStrategy" and trainer.num_devices * trainer.num_nodes == 1
    if not single or device.type != "cpu":
        raise UnsupportedError(
            f"MemFit does not drive {found} in this release; it drives SingleDeviceStrategy on cpu with 1 device: "
            f"Trainer(accelerator='cpu', devices=1). {_WAY_OUT}"
        )
    for callback in trainer.callbacks:
        if type(callback).__name__ == "GradientAccumulationScheduler":
            raise ConfigurationError(
                f"GradientAccumulationScheduler({callback.scheduling}) changes accumulate_grad_batches while training, "
                "so that the effective batch is not one number. Remove the callback: MemFit sets the accumulation."
            )


def idle_reason(trainer: Any, module: Any) -> str | None:
    """Why a run that is supported has nothing to plan; ``None`` if it has."""
    if not module.automatic_optimization:
        return (
            "manual optimization: training_step runs backward and steps by itself, and this release plans automatic "
            "optimization only. Nothing is planned, proven or changed"
        )
    if trainer.limit_train_batches == 0:
        return "limit_train_batches=0: there is nothing to train"
    return None
