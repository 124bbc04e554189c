"""From a Hydra config to the arguments of ``MemFit``: one structured schema, converted and checked.

Hydra and OmegaConf are imported where they are needed, so that the package works without them.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from lightning_memfit import plan
from lightning_memfit.errors import ConfigurationError

if TYPE_CHECKING:
    from lightning_memfit.plugin import MemFit

SCHEMA_NAME = "memfit_schema"
"""Name of the schema in Hydra's config store; no YAML file has it, since Hydra would merge equal names unasked."""

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": ("auto", *get_args(plan.Precision)),
    "optimizer_states": ("auto", *get_args(plan.OptimizerStates)),
    "offload": ("auto", *get_args(plan.Offload)),
    "optimizer_implementation": ("auto", *get_args(plan.OptimizerImplementation)),
    "mode": get_args(plan.Mode),
    "on_no_fit": get_args(plan.OnNoFit),
}
_CHECKPOINTING_WORDS = ("auto", "none", "blocks")
_FUNCTIONS = ("split_batch", "worst_batch")
_LOSS_WEIGHT_WORDS = get_args(plan.LossWeightWord)


@dataclass
class MemFitConfig:
    """The ``memfit`` config group. Every field is an argument of ``MemFit`` with the same default.

    Mutable and with ``Any`` where OmegaConf knows no exact type; :func:`memfit_arguments` does the checking.
    """

    effective_batch_size: int | None = None
    """Samples per optimizer step over all ranks; ``None`` keeps what the run does today."""
    budget: Any = "auto"
    """Bytes, text such as ``"700MiB"``, or ``"auto"``."""
    headroom: Any = "auto"
    """Bytes, text such as ``"256MiB"``, or ``"auto"``."""
    precision: str = "auto"
    """A precision in Lightning's words, or ``"auto"``."""
    activation_checkpointing: Any = "auto"
    """``"auto"``, ``"none"``, ``"blocks"``, or a list of patterns of module names."""
    optimizer_states: str = "auto"
    """Format of the optimizer's states."""
    offload: str = "never"
    """What may be kept on the host."""
    micro_batch_size: Any = "auto"
    """Samples in the largest slice, or ``"auto"``."""
    optimizer_implementation: str = "auto"
    """Implementation of the optimizer's step."""
    split_batch: str | None = None
    """Import path of a function that divides a batch."""
    loss_weight: str = "samples"
    """A :data:`~lightning_memfit.plan.LossWeightWord`, or the import path of a function."""
    worst_batch: str | None = None
    """Import path of a function that makes the largest batch."""
    max_length: int | None = None
    """Longest sequence in tokens."""
    allow_inexact_slicing: bool = False
    """Slice also where the result differs."""
    mode: str = "apply"
    """``"apply"``, ``"report"`` or ``"off"``."""
    on_no_fit: str = "raise"
    """``"raise"``, ``"skip"`` or ``"value"``."""
    num_profiled_steps: int = 2
    """Optimizer steps of the memory warm-up."""
    planning_seconds: float | None = None
    """Upper limit of planning time in seconds."""
    plan: str | None = None
    """Path of a ``plan.yaml`` to start from."""
    cache_dir: str | None = "auto"
    """Folder for what is worth keeping between runs; ``None`` for none."""
    verbose: bool = True
    """Print the report."""


def register_configs() -> None:
    """Put the schema into Hydra's config store, so that wrong names and types fail while the config is composed.

    Use it with ``defaults: [memfit_schema, {memfit: auto}, _self_]``; calling it twice is harmless.

    Raises:
        ConfigurationError: if Hydra is not installed.
    """
    try:
        from hydra.core.config_store import ConfigStore
    except ImportError as error:
        raise ConfigurationError(
            "register_configs() needs hydra-core, which is not installed. pip install 'lightning-memfit[cli]'"
        ) from error
    ConfigStore.instance().store(name=SCHEMA_NAME, node=MemFitConfig, package="memfit", provider="lightning-memfit")


def memfit_arguments(config: Mapping[str, Any] | Any) -> dict[str, Any]:
    """Convert and check a ``memfit`` config.

    Args:
        config: a mapping, an OmegaConf ``DictConfig`` or a :class:`MemFitConfig`; keys left out keep their defaults.

    Returns:
        Keyword arguments of ``MemFit``: plain values, functions imported.

    Raises:
        ConfigurationError: with the key, the value and the choices.
    """
    given = _plain_mapping(config)
    defaults = {field.name: field.default for field in dataclasses.fields(MemFitConfig)}
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise ConfigurationError(
            f"memfit.{unknown[0]}={given[unknown[0]]!r} is not a setting of MemFit. "
            f"Choose one of: {', '.join(defaults)}."
        )
    arguments = {**defaults, **given}
    arguments["mode"] = _unquoted_off(arguments["mode"])
    for key, choices in _CHOICES.items():
        _check(key, arguments[key], arguments[key] in choices, _one_of(choices))
    for key in ("effective_batch_size", "max_length"):
        _check(key, arguments[key], arguments[key] is None or _is_count(arguments[key]), "null or a whole number >= 1")
    _check_others(arguments)
    arguments["activation_checkpointing"] = _checkpointing(arguments["activation_checkpointing"])
    for key in _FUNCTIONS:
        if arguments[key] is not None:
            arguments[key] = _import_function(key, arguments[key])
    if arguments["loss_weight"] not in _LOSS_WEIGHT_WORDS:
        arguments["loss_weight"] = _import_function("loss_weight", arguments["loss_weight"])
    return arguments


def memfit_from_config(config: Mapping[str, Any] | Any) -> MemFit:
    """Make the plugin that a ``memfit`` config describes.

    Raises:
        ConfigurationError: as in :func:`memfit_arguments`.
    """
    from lightning_memfit.plugin import MemFit

    return MemFit(**memfit_arguments(config))


def _plain_mapping(config: Mapping[str, Any] | Any) -> dict[str, Any]:
    if type(config).__module__.partition(".")[0] == "omegaconf":
        config = _resolved(config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if isinstance(config, Mapping):
        return {str(key): value for key, value in config.items()}
    raise ConfigurationError(
        f"A memfit config of type {type(config).__name__} cannot be read. "
        "Give a mapping, a DictConfig or a MemFitConfig."
    )


def _resolved(config: Any) -> Any:
    # Whoever has a config of OmegaConf has OmegaConf.
    from omegaconf import OmegaConf, errors

    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except errors.OmegaConfBaseException as error:
        raise ConfigurationError(f"The memfit config cannot be resolved: {error}") from error


def _check_others(arguments: Mapping[str, Any]) -> None:
    for key in ("budget", "headroom"):
        value = arguments[key]
        text_or_bytes = isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))
        _check(key, value, text_or_bytes, "'auto', a number of bytes, or text such as '700MiB'")
    value = arguments["micro_batch_size"]
    _check("micro_batch_size", value, value == "auto" or _is_count(value), "'auto' or a whole number >= 1")
    for key in ("allow_inexact_slicing", "verbose"):
        _check(key, arguments[key], isinstance(arguments[key], bool), "true, false")
    steps = arguments["num_profiled_steps"]
    _check("num_profiled_steps", steps, _is_count(steps) and steps >= 2, "a whole number >= 2")
    seconds = arguments["planning_seconds"]
    is_time = isinstance(seconds, (int, float)) and not isinstance(seconds, bool) and seconds > 0
    _check("planning_seconds", seconds, seconds is None or is_time, "null or seconds > 0")
    for key in ("plan", "cache_dir"):
        _check(key, arguments[key], arguments[key] is None or isinstance(arguments[key], str), "null or a path")


def _checkpointing(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value in _CHECKPOINTING_WORDS:
        return value
    patterns = (value,) if isinstance(value, str) and set(value) & set(".*?[") else value
    is_patterns = isinstance(patterns, (list, tuple)) and all(isinstance(item, str) for item in patterns)
    _check(
        "activation_checkpointing",
        value,
        is_patterns and len(patterns) > 0,
        f"{_one_of(_CHECKPOINTING_WORDS)}, or a list of patterns of module names such as ['blocks.*']",
    )
    return tuple(patterns)


def _unquoted_off(value: Any) -> Any:
    """YAML 1.1 reads a bare ``off`` as false, and a field of text shows that as ``"False"``."""
    return "off" if value in (False, "False") else value


def _import_function(key: str, path: Any) -> Any:
    _check(key, path, isinstance(path, str), "an import path such as 'my_package.my_module.my_function'")
    module_name, _, name = path.rpartition(".")
    try:
        function = getattr(importlib.import_module(module_name), name) if module_name else None
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(
            f"memfit.{key}={path!r} cannot be imported: {error}. Write an import path such as "
            "'my_package.my_module.my_function', and run where that package can be imported."
        ) from error
    words = f"{_one_of(_LOSS_WEIGHT_WORDS)}, or " if key == "loss_weight" else ""
    _check(key, path, callable(function), f"{words}the import path of a function, 'my_package.my_module.my_function'")
    return function


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _one_of(choices: tuple[str, ...]) -> str:
    return ", ".join(repr(choice) for choice in choices)


def _check(key: str, value: Any, is_right: bool, choices: str) -> None:
    if not is_right:
        raise ConfigurationError(f"memfit.{key}={value!r} is not known. Choose: {choices}.")
