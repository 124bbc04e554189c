"""DeepSpeed's Adam in the place of torch's, where DeepSpeed keeps the optimizer on the host.

Both follow the same rule. DeepSpeed's runs vectorised over one flat tensor, without temporaries.

Adapter for Lightning's ``DeepSpeedStrategy._init_optimizers``, which asks the module for its optimizer, and for
``deepspeed.ops.adam.DeepSpeedCPUAdam``.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from lightning_memfit.apply.optimizer_implementation import runs_step_of
from lightning_memfit.apply.scheduler_binding import Exchange, count_steps, is_wrapper, rebind
from lightning_memfit.errors import UnsupportedError
from lightning_memfit.undo import Undo, set_instance_attribute

_NOT_THERE = ("amsgrad", "maximize", "differentiable", "capturable")
_CARRIED = ("lr", "betas", "eps", "weight_decay")
_OF_TORCH = frozenset(("decoupled_weight_decay", "foreach", "fused", *_NOT_THERE))
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def why_not_cpu_adam(optimizer: Optimizer) -> str | None:
    """Why an optimizer cannot be exchanged for DeepSpeed's Adam, in words; ``None`` if it can.

    Args:
        optimizer: as ``configure_optimizers`` made it.
    """
    kind = type(optimizer)
    if kind not in (Adam, AdamW):
        return f"DeepSpeedCPUAdam has the rule of torch's Adam and AdamW, and this is {kind.__qualname__}"
    if not runs_step_of(optimizer, kind):
        return f"the step of this {kind.__qualname__} was replaced on the object"
    for group in optimizer.param_groups:
        options = [name for name in _NOT_THERE if group.get(name)]
        if options:
            return f"DeepSpeedCPUAdam has no {options[0]}"
        if any(isinstance(value, Tensor) for value in (group["lr"], *group["betas"], group["weight_decay"])):
            return f"a hyperparameter of {kind.__qualname__} is a tensor"
    if len({bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups}) > 1:
        return "DeepSpeedCPUAdam decouples the weight decay of all groups or of none"
    return None


def cpu_adam_like(optimizer: Optimizer) -> Optimizer:
    """DeepSpeed's Adam over the same groups, with the same hyperparameters and hooks; it has no states yet.

    Source: ``deepspeed/ops/adam/cpu_adam.py`` 0.19.8.

    Args:
        optimizer: torch's Adam or AdamW, for which :func:`why_not_cpu_adam` finds nothing.

    Raises:
        UnsupportedError: if it is not one of these.
    """
    obstacle = why_not_cpu_adam(optimizer)
    if obstacle is not None:
        raise UnsupportedError(f"{obstacle}. Use optimizer_implementation='as-configured'.")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    groups = [
        {name: value for name, value in group.items() if name not in _OF_TORCH} for group in optimizer.param_groups
    ]
    decouples = any(group.get("decoupled_weight_decay") for group in optimizer.param_groups)
    defaults = {name: optimizer.defaults[name] for name in _CARRIED}
    new: Optimizer = DeepSpeedCPUAdam(groups, adamw_mode=decouples, **defaults)
    for name in _STEP_HOOKS:  # the same dictionaries, so that the user's handles still remove them
        setattr(new, name, getattr(optimizer, name))
    new.register_load_state_dict_post_hook(_completed)
    return new


def _completed(optimizer: Optimizer) -> None:
    """Give what torch's Adam saved, without the host, the form of DeepSpeed's: its options, and steps as numbers."""
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = int(state["step"])


def step_on_host_with_cpu_adam(strategy: Any) -> Undo:
    """Let a strategy hand DeepSpeed's Adam to the engine that it builds, in the place of the user's.

    The user's schedule, and what the module and its callbacks hold, refer to the new one afterwards.

    Args:
        strategy: Lightning's for DeepSpeed, without an engine.

    Raises:
        UnsupportedError: if this release of Lightning asks for optimizers elsewhere.
    """
    ask = getattr(strategy, "_init_optimizers", None)
    if ask is None:
        raise UnsupportedError(
            f"{type(strategy).__module__}.{type(strategy).__qualname__} has no _init_optimizers, which asks for the "
            "optimizer: this release of Lightning changed it. Use Lightning 2.5 or 2.6, or "
            "optimizer_implementation='as-configured'."
        )

    def exchanged() -> tuple[Optimizer, Any]:
        optimizer, schedule = ask()
        old = optimizer._optimizer if is_wrapper(optimizer) else optimizer
        new = cpu_adam_like(old)
        exchange, seen = Exchange([(old, new)], {}), set[int]()
        for holder in (*_schedules(schedule), *strategy.lightning_module.modules(), *_callbacks(strategy)):
            rebind(holder, exchange, seen)
        count_steps(old, new)
        return new, schedule

    return set_instance_attribute(strategy, "_init_optimizers", exchanged)


def _schedules(schedule: Any) -> tuple[Any, ...]:
    return () if schedule is None else (schedule.scheduler,)


def _callbacks(strategy: Any) -> tuple[Any, ...]:
    return tuple(strategy.lightning_module.trainer.callbacks)
