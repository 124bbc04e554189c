"""From a Hydra config to the arguments of ``MemFit``: one structured schema, converted and checked.

Hydra and OmegaConf are imported where they are needed, so that the package works without them.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from lightning_memfit import plan
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.settings import check_no_fit_value, plan_request

if TYPE_CHECKING:
    from lightning_memfit.plugin import MemFit

SCHEMA_NAME = "memfit_schema"
"""Name of the schema in Hydra's config store; no YAML file has it, since Hydra would merge equal names unasked."""

HARDWARE_SCHEMA_NAME = "hardware_schema"
"""The same for the ``hardware`` group."""

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
    no_fit_value: float | None = None
    """The objective of a run that does not fit, under ``on_no_fit="value"``."""
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


@dataclass
class HardwareConfig:
    """The ``hardware`` config group: what forecasts are made for. A run trains where it is."""

    device: str = "local"
    """``"local"``, ``"cpu"``, ``"cuda:0"``, or a GPU of the catalogue such as ``"a100-40gb"``."""


def register_configs() -> None:
    """Put the schemas into Hydra's config store, so that wrong names and types fail while the config is composed.

    Use them with ``defaults: [memfit_schema, {memfit: auto}, _self_]``, and ``hardware_schema`` likewise; calling it
    twice is harmless.

    Raises:
        ConfigurationError: if Hydra is not installed.
    """
    try:
        from hydra.core.config_store import ConfigStore
    except ImportError as error:
        raise ConfigurationError(
            "register_configs() needs hydra-core, which is not installed. pip install 'lightning-memfit[cli]'"
        ) from error
    store, provider = ConfigStore.instance(), "lightning-memfit"
    store.store(name=SCHEMA_NAME, node=MemFitConfig, package="memfit", provider=provider)
    store.store(name=HARDWARE_SCHEMA_NAME, node=HardwareConfig, package="hardware", provider=provider)


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
            f"memfit.{unknown[0]}={given[unknown[0]]!r} is not a setting of MemFit. {setting_words(unknown[0])}"
        )
    arguments = {**defaults, **given}
    arguments["mode"] = _unquoted_off(arguments["mode"])
    for key in _FUNCTIONS:
        if arguments[key] is not None:
            arguments[key] = _import_function(key, arguments[key])
    if arguments["loss_weight"] not in _LOSS_WEIGHT_WORDS:
        arguments["loss_weight"] = _import_function("loss_weight", arguments["loss_weight"])
    for key in ("plan", "cache_dir"):
        _check(key, arguments[key], arguments[key] is None or isinstance(arguments[key], str), "null or a path")
    _check("verbose", arguments["verbose"], isinstance(arguments["verbose"], bool), "true, false")
    arguments["activation_checkpointing"] = request_of(arguments).activation_checkpointing
    return arguments


def setting_words(unknown: str) -> str:
    """Which settings there are, and which one was probably meant.

    >>> setting_words("budgit")[:22]
    "Did you mean 'budget'?"
    """
    names = [field.name for field in dataclasses.fields(MemFitConfig)]
    near = difflib.get_close_matches(unknown, names, n=1)
    return f"{f'Did you mean {near[0]!r}? ' if near else ''}Choose one of: {', '.join(names)}."


def request_of(arguments: Mapping[str, Any]) -> plan.PlanRequest:
    """The one place where the values of a config are converted and checked.

    Args:
        arguments: of ``MemFit``, as :func:`memfit_arguments` gives them.

    Raises:
        ConfigurationError: with the key as it stands in a config, the value and the choices.
    """
    named = inspect.signature(plan_request).parameters
    try:
        check_no_fit_value(arguments["on_no_fit"], arguments["no_fit_value"])
        return plan_request(**{name: arguments[name] for name in named})
    except ConfigurationError as error:
        raise ConfigurationError(f"memfit.{error}") from None


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


def _one_of(choices: tuple[str, ...]) -> str:
    return ", ".join(repr(choice) for choice in choices)


def _check(key: str, value: Any, is_right: bool, choices: str) -> None:
    if not is_right:
        raise ConfigurationError(f"memfit.{key}={value!r} is not known. Choose one of: {choices}.")
