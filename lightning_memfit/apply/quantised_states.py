"""Optimizer states in 8 bits through bitsandbytes: the same rule, groups and hyperparameters, a quarter of the bytes.

Each running average is kept as one byte per element and a scale of four bytes per block of 256 elements: 1.0156 bytes
per element and average, 2.03 for the two of Adam where 32 bits take 8. Embeddings and tensors below 4096 elements keep
32 bits. Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization (arXiv:2110.02861), sections 2 and 4.

Adapter for private names of bitsandbytes (0.50): ``Optimizer8bit.args``, ``mng``, ``name2qmap`` and ``is_paged``,
``Optimizer1State``, ``GlobalOptimManager.initialize`` and its ``pid2config``, ``index2config`` and
``module_weight_config_triple``, and the logger ``bitsandbytes.backends.cpu.ops``; of torch: an optimizer's
``_optimizer_*_hooks`` and ``_disable_current_modes``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from lightning_memfit.apply.optimizer_formats import is_bitsandbytes
from lightning_memfit.apply.update_rules import EightBitForm, eight_bit_form, public_name, rule_obstacle
from lightning_memfit.errors import ConfigurationError, MemFitError
from lightning_memfit.measurement import OptimizerStatesMeasurement
from lightning_memfit.units import format_bytes

SMALLEST_QUANTISED = 4096
"""Elements of the smallest tensor whose states are quantised. Source: ``min_8bit_size`` of bitsandbytes."""

_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
_COMPUTED_IN_32_BITS = (torch.float32, torch.bfloat16, torch.float16)
_OLDEST = (0, 50)  # earlier releases cannot step on a CPU
_INSTALL = "pip install 'lightning-memfit[bitsandbytes]'"


# What can be quantised


def quantisation_obstacle(optimizer: Optimizer, module: nn.Module) -> str | None:
    """Why the optimizer's states cannot be quantised, in words with its name; ``None`` if they can.

    Args:
        optimizer: any optimizer; it is not changed.
        module: the module that its parameters belong to, for its embeddings.
    """
    obstacle = rule_obstacle(optimizer)
    if obstacle is not None:
        return obstacle
    reason = _hooks_obstacle(optimizer) or _parameters_obstacle(optimizer, module) or _library_obstacle()
    return None if reason is None else f"{public_name(type(optimizer))} cannot be quantised: {reason}"


def sparse_gradients(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of ``module`` that get sparse gradients."""
    return [p for part in _embeddings(module) if getattr(part, "sparse", False) for p in part.parameters()]


def _embeddings(module: nn.Module) -> Iterator[nn.Module]:
    return (part for part in module.modules() if isinstance(part, (nn.Embedding, nn.EmbeddingBag)))


def _embedding_parameters(module: nn.Module) -> set[int]:
    """By ``id``: a head that is tied to an embedding counts, and so does what parametrises one."""
    return {id(parameter) for part in _embeddings(module) for parameter in part.parameters()}


def _hooks_obstacle(optimizer: Optimizer) -> str | None:
    if is_bitsandbytes(optimizer) or not any(getattr(optimizer, name) for name in _HOOKS if "load" in name):
        return None
    return "it has hooks on load_state_dict, which bitsandbytes does not run"


def _parameters_obstacle(optimizer: Optimizer, module: nn.Module) -> str | None:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not is_bitsandbytes(optimizer):
        for parameter in parameters:
            if parameter.dtype not in _COMPUTED_IN_32_BITS:
                return f"a parameter is {_name(parameter.dtype)}, and bitsandbytes computes in float32"
            if not parameter.is_contiguous():
                return (
                    f"a parameter of shape {tuple(parameter.shape)} is not contiguous (strides {parameter.stride()}), "
                    "and bitsandbytes would lay it out anew"
                )
    if any(hasattr(parameter, "device_mesh") for parameter in parameters):
        return "its parameters are sharded (DTensor), which bitsandbytes cannot step"
    sparse = {id(parameter) for parameter in sparse_gradients(module)}
    if any(id(p) in sparse or p.layout is not torch.strided for p in parameters):
        return "an embedding has sparse gradients, which bitsandbytes cannot step"
    embeddings = _embedding_parameters(module)
    if not any(p.numel() >= SMALLEST_QUANTISED and id(p) not in embeddings for p in parameters):
        return (
            f"none of its {len(parameters)} trainable tensors has {SMALLEST_QUANTISED} elements or more, embeddings "
            "left out"
        )
    return None


def _library_obstacle() -> str | None:
    if importlib.util.find_spec("bitsandbytes") is None:
        return f"bitsandbytes is not installed. Install it: {_INSTALL}"
    try:
        version = importlib.metadata.version("bitsandbytes")
    except importlib.metadata.PackageNotFoundError:  # built from source, under another name
        return None
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if numbers < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        return f"bitsandbytes {version} is too old, {oldest} or newer is needed. Install it: {_INSTALL}"
    return None


# Making the optimizer


def quantise(optimizer: Optimizer, module: nn.Module) -> Optimizer:
    """Make bitsandbytes' 8-bit form of an optimizer: the same parameters, groups and hyperparameters, no states yet.

    What groups hold beside is kept, and hooks are shared, so that their handles go on removing them. ``momentum`` of
    SGD becomes ``betas[0]``: groups keep the old name beside it, ``defaults`` do not, since schedules look there for
    the name under which it is moved. Works under fake tensors too.

    Raises:
        ConfigurationError: if :func:`quantisation_obstacle` has a reason against it, or bitsandbytes fails on import.
    """
    obstacle = quantisation_obstacle(optimizer, module)
    form = eight_bit_form(optimizer)
    if obstacle is not None or form is None:
        raise ConfigurationError(
            f"optimizer_states='8bit' cannot be had: {obstacle}. Use optimizer_states='as-configured'."
        )
    with _disable_current_modes():  # tables that codes are looked up in are real, under fakes too
        made: Optimizer = _construct(optimizer, form)
    _keep_in_32_bits(made, optimizer, _embedding_parameters(module))
    made.defaults = {**made.defaults, **_translated(optimizer.defaults, form)}
    made.defaults.pop("momentum", None)
    for name in _HOOKS:
        setattr(made, name, getattr(optimizer, name))
    return made


def _import_bitsandbytes() -> Any:
    """Import bitsandbytes without the line on standard error about a kernel that no optimizer uses.

    Called while no mode is active: tables made on import would otherwise be fakes for the rest of the process.
    """
    with _unlogged("bitsandbytes.backends.cpu.ops"):
        try:
            return importlib.import_module("bitsandbytes")
        except Exception as error:  # a broken native library fails in many ways, and each is the user's to see
            raise ConfigurationError(
                f"optimizer_states='8bit' needs bitsandbytes, whose import fails with {type(error).__name__}: {error}. "
                f"Install it again ({_INSTALL}), or use optimizer_states='as-configured'."
            ) from error


@contextmanager
def _unlogged(logger_name: str) -> Iterator[None]:
    logger = logging.getLogger(logger_name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _construct(optimizer: Optimizer, form: EightBitForm) -> Any:
    groups = [{**_translated(group, form), "params": list(group["params"])} for group in optimizer.param_groups]
    first, source = groups[0], getattr(optimizer, "args", None)
    options = {"lr": first["lr"], "min_8bit_size": max(SMALLEST_QUANTISED, getattr(source, "min_8bit_size", 0))}
    if form.class_name == "SGD8bit":
        options["momentum"] = first["betas"][0]  # it takes no zero, and every group has its own
    paged = "Paged" if getattr(optimizer, "is_paged", False) else ""
    library = _import_bitsandbytes().optim
    made = getattr(library, f"{paged}{form.class_name}")(groups, **options)
    made.args.skip_zeros = getattr(source, "skip_zeros", False)
    if isinstance(made, library.optimizer.Optimizer1State):
        made.name2qmap.pop("udynamic", None)  # a table for second moments, which its states never refer to
    return made


def _translated(group: Mapping[str, Any], form: EightBitForm) -> dict[str, Any]:
    """The values of a group, those that bitsandbytes names otherwise under its names too."""
    values = {"eps": 0.0, **group}
    if form.first_beta is not None:
        values["betas"] = (group[form.first_beta], 0.0)
    return values


def _keep_in_32_bits(made: Any, source: Any, parameters: set[int]) -> None:
    """Keep the states of some parameters in 32 bits, for this optimizer only.

    bitsandbytes looks such exceptions up in one object per process, by the ``id`` of a parameter and also by its
    position, so that they would go on to the next optimizer. This one gets an object of its own. Exceptions that were
    made for an optimizer of bitsandbytes' own are its configuration, and go along.
    """
    kind: Any = type(made.mng)
    exceptions = kind.__new__(kind)  # its constructor refuses; its own get_instance makes the shared one in this way
    exceptions.initialize()
    if is_bitsandbytes(source):
        exceptions.index2config = dict(source.mng.index2config)
        exceptions.pid2config = {key: dict(config) for key, config in source.mng.pid2config.items()}
        exceptions.module_weight_config_triple = list(source.mng.module_weight_config_triple)
    for parameter in parameters:
        exceptions.pid2config.setdefault(parameter, {})["optim_bits"] = 32
    made.mng = exceptions


# What became of it


def verify_quantised(optimizer: Optimizer, module: nn.Module) -> OptimizerStatesMeasurement:
    """Look at the real states after a step: which are quantised, and how many bytes they take.

    Ignores: the tables of codes, 1 KiB for each running average and shared by all parameters; step counts.

    Raises:
        MemFitError: if there are no states, or those of a parameter are in 32 bits that should be quantised.
    """
    name = public_name(type(optimizer))
    bytes_by_kind: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    in_32_bits = 0
    missed = []
    embeddings = _embedding_parameters(module)
    for parameter, position in _positions(optimizer).items():
        states = _running_averages(optimizer.state.get(parameter, {}))
        if not states:
            continue
        kind = "quantised" if any(state.dtype is torch.uint8 for state in states) else "kept"
        elements[kind] += parameter.numel()
        bytes_by_kind[kind] += sum(state.numel() * state.element_size() for state in states)
        in_32_bits += 4 * sum(state.numel() for state in states if state.dtype is torch.uint8)
        if kind == "kept":
            reason = _reason_to_keep(optimizer, parameter, position, embeddings)
            kept[reason or ""] += 1
            missed += [] if reason else [parameter]
    _check(name, elements, missed)
    return OptimizerStatesMeasurement(
        optimizer=name,
        quantised_parameters=elements["quantised"],
        quantised_bytes=bytes_by_kind["quantised"],
        kept_parameters=elements["kept"],
        kept_bytes=bytes_by_kind["kept"],
        saved_bytes=in_32_bits - bytes_by_kind["quantised"],
        kept_reason=", ".join(_counted(count, reason) for reason, count in sorted(kept.items())),
    )


def verify_all_quantised(optimizers: Sequence[Optimizer], module: nn.Module) -> OptimizerStatesMeasurement:
    """As :func:`verify_quantised` for all of a run's optimizers whose states are kept by bitsandbytes, in sum.

    Raises:
        MemFitError: as there; also if there is no such optimizer.
    """
    quantised = [optimizer for optimizer in optimizers if is_bitsandbytes(optimizer)] or list(optimizers)
    found = [verify_quantised(optimizer, module) for optimizer in quantised]
    return OptimizerStatesMeasurement(
        optimizer=", ".join(each.optimizer for each in found),
        quantised_parameters=sum(each.quantised_parameters for each in found),
        quantised_bytes=sum(each.quantised_bytes for each in found),
        kept_parameters=sum(each.kept_parameters for each in found),
        kept_bytes=sum(each.kept_bytes for each in found),
        saved_bytes=sum(each.saved_bytes for each in found),
        kept_reason=", ".join(dict.fromkeys(each.kept_reason for each in found if each.kept_reason)),
    )


def _positions(optimizer: Optimizer) -> dict[Tensor, tuple[int, int]]:
    return {
        parameter: (group_index, index)
        for group_index, group in enumerate(optimizer.param_groups)
        for index, parameter in enumerate(group["params"])
    }


def _running_averages(state: Mapping[str, Any]) -> list[Tensor]:
    """The averages of one parameter and their scales."""
    return [
        value
        for name, value in state.items()
        if isinstance(value, Tensor) and name != "step" and not name.startswith("qmap")
    ]


def _reason_to_keep(optimizer: Any, parameter: Tensor, position: tuple[int, int], embeddings: set[int]) -> str | None:
    if id(parameter) in embeddings:
        return "embedding"
    smallest = getattr(getattr(optimizer, "args", None), "min_8bit_size", SMALLEST_QUANTISED)
    if parameter.numel() < smallest:
        return f"tensor below {smallest} elements"
    manager = getattr(optimizer, "mng", None)
    if manager is not None:
        own = {**manager.index2config.get(position, {}), **manager.pid2config.get(id(parameter), {})}
        if own.get("optim_bits") == 32:
            return "tensor with a setting of its own"
    return None


def _counted(count: int, thing: str) -> str:
    noun, _, rest = thing.partition(" ")
    return " ".join(filter(None, (str(count), noun if count == 1 else f"{noun}s", rest)))


def _check(name: str, elements: Mapping[str, int], missed: list[Tensor]) -> None:
    if not elements:
        raise MemFitError(
            f"optimizer_states='8bit': {name} has no states for any parameter, so that nothing can be verified. Make a "
            "step with gradients first."
        )
    if missed:
        size = format_bytes(sum(parameter.numel() for parameter in missed) * 4)
        raise MemFitError(
            f"optimizer_states='8bit' has no effect on {len(missed)} tensors of {name}: each running average of theirs "
            f"takes {size} in 32 bits. Use optimizer_states='as-configured', and report this with the versions of "
            "torch and bitsandbytes."
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
