"""How torch's optimizers run their step: one tensor after the other, lists of tensors at once, or in one kernel.

All three follow the same rule and are equal up to rounding, so this is a lever without harm; they differ in speed and
in temporaries (of the size of the largest parameter, of all parameters, none).

Left out, because torch 2.13 does not give the same result there (measured on a CPU, over 24 steps, as the distance
between two results over the distance covered): ``foreach`` for ASGD (7e-6 in ``float32``, 2.5e-8 in ``float64``);
everything for parameters of 16 bits (1 to 6 %: rounding is that coarse, and ``fused`` SGD writes only the parameters
that are left over when 16 go at a time); ``fused`` for parameters that do not fill their memory without gaps (it writes
into the gaps).

Adapter for private names of torch: ``Optimizer._step_supports_amp_scaling`` and ``_need_device_dtype_check_for_fused``,
``SGD._init_group``, ``torch.optim.optimizer._default_to_fused_or_foreach`` and
``torch._C._dispatch_has_kernel_for_dispatch_key``.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.optim.optimizer import _default_to_fused_or_foreach

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import OptimizerImplementation
from lightning_memfit.undo import Undo, set_instance_attribute


class _Flags(NamedTuple):
    """The two switches of a parameter group; ``None`` lets torch choose."""

    foreach: bool | None
    fused: bool | None


_FLAGS: Mapping[OptimizerImplementation, _Flags] = {
    "single-tensor": _Flags(foreach=False, fused=False),
    "foreach": _Flags(foreach=True, fused=False),
    "fused": _Flags(foreach=False, fused=True),
}
_ATTRIBUTES = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
_NOT_EXACT_AS_FOREACH = ("ASGD",)
_KERNELS = {"Adam": "_fused_adam_", "AdamW": "_fused_adamw_", "SGD": "_fused_sgd_", "Adagrad": "_fused_adagrad_"}
_DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "mps": "MPS", "xpu": "XPU"}
_EXACT_DTYPES = (torch.float32, torch.float64)


def implementations_of(optimizer: Optimizer) -> tuple[OptimizerImplementation, ...]:
    """What the step can be run with, on the device of its parameters, beside what it is run with now.

    Empty for optimizers without that choice: those that are not torch's, those whose class overrides the step, and
    those that are ``differentiable``, ``capturable`` or have tensors for hyperparameters.
    """
    cls = _torch_class(optimizer)
    if cls is None or not _is_free_to_choose(optimizer):
        return ()
    present = _present(optimizer)
    return tuple(each for each in _possible(optimizer, cls) if each != present)


def set_implementation(optimizer: Optimizer, implementation: OptimizerImplementation) -> Undo:
    """Let the optimizer run its step with ``implementation`` from now on, with the states that it has.

    The choice outlasts ``load_state_dict``. A gradient scaler goes on unscaling gradients before the step, as it does
    for every other implementation, so that they can be clipped.

    Args:
        optimizer: one of torch's.
        implementation: one of :func:`implementations_of`, or what it is run with now.

    Raises:
        ConfigurationError: if the step cannot be run with it.
    """
    if implementation == "as-configured" or (_torch_class(optimizer) and _present(optimizer) == implementation):
        return lambda: None
    choices = implementations_of(optimizer)
    if implementation not in choices:
        raise ConfigurationError(_no_choice(optimizer, implementation, choices))
    switch = _Switch(optimizer, _FLAGS[implementation])
    with ExitStack() as undos:
        undos.callback(switch.undo)
        switch.apply()
        if implementation == "fused" and isinstance(optimizer, SGD):
            undos.callback(set_instance_attribute(optimizer, "_init_group", _CompletedMomenta(optimizer)))
        undos.callback(optimizer.register_load_state_dict_post_hook(switch.apply).remove)
        return undos.pop_all().close
    raise AssertionError("unreachable")


def runs_step_of(optimizer: Optimizer, cls: type[Optimizer]) -> bool:
    """Whether the optimizer's step is that of ``cls``, neither overridden nor exchanged on the instance.

    Torch wraps the step in profiling when the first instance is made, and schedules wrap it in a counter.
    """
    own = vars(optimizer).get("step")
    if own is not None and not hasattr(own, "_wrapped_by_lr_sched"):
        return False
    return inspect.unwrap(type(optimizer).step) is inspect.unwrap(cls.step)


def _torch_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of ``torch.optim`` whose step it runs, if that has several implementations."""
    for cls in type(optimizer).__mro__:
        if cls is not Optimizer and getattr(torch.optim, cls.__name__, None) is cls:
            has_choice = "foreach" in inspect.signature(cls).parameters
            return cls if has_choice and runs_step_of(optimizer, cls) else None
    return None


def _is_free_to_choose(optimizer: Optimizer) -> bool:
    for group in optimizer.param_groups:
        if group.get("differentiable") or group.get("capturable"):
            return False
        values = [value for name, value in group.items() if name != "params"]
        if any(isinstance(value, Tensor) for value in (*values, *group.get("betas", ()))):
            return False
    parameters = list(_parameters(optimizer))
    return (
        len({parameter.device for parameter in parameters}) == 1
        and all(parameter.dtype in _EXACT_DTYPES for parameter in parameters)
        and all(parameter.layout is torch.strided for parameter in parameters)
    )


def _possible(optimizer: Optimizer, cls: type[Optimizer]) -> Iterator[OptimizerImplementation]:
    yield "single-tensor"
    if cls.__name__ not in _NOT_EXACT_AS_FOREACH:
        yield "foreach"
    if _has_fused_kernel(optimizer, cls) and all(_can_be_fused(group) for group in optimizer.param_groups):
        yield "fused"


def _has_fused_kernel(optimizer: Optimizer, cls: type[Optimizer]) -> bool:
    if "fused" not in inspect.signature(cls).parameters or cls.__name__ not in _KERNELS:
        return False
    key = _DISPATCH_KEYS.get(next(_parameters(optimizer)).device.type)
    return key is not None and torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{_KERNELS[cls.__name__]}", key)


def _can_be_fused(group: Mapping[str, Any]) -> bool:
    # Dampening leaves out the first gradient of a parameter, which the kernel cannot know where it comes late.
    if group.get("momentum") and group.get("dampening"):
        return False
    return all(_fills_its_memory(p) and not (p.grad is not None and p.grad.is_sparse) for p in group["params"])


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in any order of dimensions, as the kernels take for granted."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def _present(optimizer: Optimizer) -> OptimizerImplementation | None:
    """What the step is run with now; ``None`` if groups differ."""
    found = {_present_in(group) for group in optimizer.param_groups}
    return found.pop() if len(found) == 1 else None


def _present_in(group: Mapping[str, Any]) -> OptimizerImplementation:
    foreach, fused = group.get("foreach"), group.get("fused")
    if fused:
        return "fused"
    if foreach is None and fused is None:
        foreach = _default_to_fused_or_foreach(group["params"], differentiable=False, use_fused=False)[1]
    return "foreach" if foreach else "single-tensor"


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


class _Switch:
    """Puts flags into every group, whatever was loaded meanwhile, and puts the former ones back."""

    def __init__(self, optimizer: Optimizer, flags: _Flags) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._flags = flags
        self._defaults = _read(optimizer.defaults)
        self._groups = [_read(group) for group in optimizer.param_groups]
        self._attributes = {name: vars(optimizer)[name] for name in _ATTRIBUTES if name in vars(optimizer)}

    def apply(self, *ignored: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        for holder in (optimizer.defaults, *optimizer.param_groups):
            _write(holder, self._flags)
        # Without the first mark a gradient scaler unscales before the step, which every implementation can live with.
        self._set_attributes(optimizer, {})
        _fit_step_counters(optimizer, fused=bool(self._flags.fused))

    def undo(self) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        _write(optimizer.defaults, self._defaults)
        for index, group in enumerate(optimizer.param_groups):
            _write(group, self._groups[index] if index < len(self._groups) else self._defaults)
        self._set_attributes(optimizer, self._attributes)
        _fit_step_counters(optimizer, fused=any(group.get("fused") for group in optimizer.param_groups))

    @staticmethod
    def _set_attributes(optimizer: Optimizer, values: Mapping[str, Any]) -> None:
        for name in _ATTRIBUTES:
            vars(optimizer).pop(name, None)
        vars(optimizer).update(values)


def _read(holder: Mapping[str, Any]) -> _Flags:
    return _Flags(foreach=holder.get("foreach"), fused=holder.get("fused"))


def _write(holder: dict[str, Any], flags: _Flags) -> None:
    for name, value in flags._asdict().items():
        if name in holder:
            holder[name] = value


def _fit_step_counters(optimizer: Optimizer, *, fused: bool) -> None:
    """Fused kernels count in ``float32`` on the device of the parameter, the others in the default dtype on the host.

    Source: ``_get_scalar_dtype`` and ``Adam._init_group``, torch 2.13.
    """
    dtype = torch.float64 if torch.get_default_dtype() == torch.float64 and not fused else torch.float32
    for parameter, state in optimizer.state.items():
        step = state.get("step") if isinstance(state, dict) else None
        if isinstance(step, Tensor):
            state["step"] = step.to(device=parameter.device if fused else "cpu", dtype=dtype)


class _CompletedMomenta:
    """Stands before ``SGD._init_group``: the fused kernel refuses lists in which only some momenta exist.

    A parameter whose first gradient comes late starts from zero: momentum x 0 + gradient is what the others do.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        # A reference back to the optimizer would keep its states alive until the garbage is collected.
        self._init_group = weakref.WeakMethod(optimizer._init_group)  # type: ignore[attr-defined]

    def __call__(
        self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], momenta: list[Tensor | None]
    ) -> Any:
        init_group = self._init_group()
        assert init_group is not None, "called by the optimizer itself"
        result = init_group(group, params, grads, momenta)
        if any(momentum is not None for momentum in momenta):
            for index, momentum in enumerate(momenta):
                if momentum is None:
                    momenta[index] = torch.zeros_like(params[index])
        return result


def _no_choice(
    optimizer: Optimizer, implementation: OptimizerImplementation, choices: tuple[OptimizerImplementation, ...]
) -> str:
    name = type(optimizer).__qualname__
    offered = ", ".join(repr(choice) for choice in ("as-configured", *choices))
    return (
        f"optimizer_implementation={implementation!r} cannot be had for {name} with these parameters and options. "
        f"Choose one of: {offered}."
    )
