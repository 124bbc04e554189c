"""DeepSpeed's configuration under Lightning: read as a sharding, and written before the engine is built.

Adapter for Lightning's ``DeepSpeedStrategy``: touches its public ``config``, ``loss_scale``, ``loss_scale_window``,
``min_loss_scale``, ``initial_scale_power`` and ``hysteresis``, and ``_format_precision_config`` of
``lightning/fabric/strategies/deepspeed.py``. The strategy formats its configuration, precision included, before
``convert_module`` runs, and builds the engine of it afterwards: what is written in between holds.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterable
from typing import Any, Literal

from torch import nn

from lightning_memfit.errors import ConfigurationError, UnsupportedError
from lightning_memfit.plan import Candidate, Offload, Precision
from lightning_memfit.sharding import Sharding, ZeroStage
from lightning_memfit.undo import Undo

_SECTION_OF = {"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16", "16-true": "fp16"}
_STAGES: tuple[ZeroStage, ...] = (1, 2, 3)
_NAMES = ("config", "loss_scale", "loss_scale_window", "min_loss_scale", "initial_scale_power", "hysteresis")


def is_deepspeed(strategy: Any) -> bool:
    """Whether a strategy of either of Lightning's packages is DeepSpeed; such a one is derived from DDP's."""
    return any(cls.__name__ == "DeepSpeedStrategy" for cls in type(strategy).__mro__)


def zero_sharding(strategy: Any, ranks: int) -> Sharding:
    """What a strategy's configuration says; settings that it leaves out are DeepSpeed's own defaults.

    Args:
        strategy: Lightning's for DeepSpeed.
        ranks: devices.

    Raises:
        UnsupportedError: if ZeRO is off, gradients are summed in another dtype, or the optimizer is not the module's.
    """
    zero = _config_of(strategy).get("zero_optimization") or {}
    stage = zero.get("stage", 0)
    if stage not in _STAGES:
        raise UnsupportedError(
            f"DeepSpeed's zero_optimization.stage is {stage}: nothing is divided. Use DeepSpeedStrategy(stage=1), 2 "
            "or 3, or strategy='ddp'."
        )
    if not zero.get("contiguous_gradients", True):
        raise UnsupportedError("DeepSpeed's contiguous_gradients=False is not forecast. Leave it out.")
    own = _config_of(strategy).get("optimizer")
    if own is not None:
        raise UnsupportedError(
            f"DeepSpeed's configuration makes the optimizer itself (optimizer.type={own.get('type')!r}), which is not "
            "forecast, and configure_optimizers is not asked. Take the section out, and return it there."
        )
    summed = (_config_of(strategy).get("data_types") or {}).get("grad_accum_dtype")
    if summed is not None:
        raise UnsupportedError(f"DeepSpeed's data_types.grad_accum_dtype={summed!r} is not forecast. Leave it out.")
    return Sharding(
        engine="deepspeed",
        ranks=ranks,
        synchronisation="step" if stage == 1 else "slice",
        zero_stage=stage,
        reduce_bucket_elements=_count(zero, "reduce_bucket_size"),
        allgather_bucket_elements=_count(zero, "allgather_bucket_size"),
        prefetch_bucket_elements=_count(zero, "stage3_prefetch_bucket_size", "prefetch_bucket_size"),
        persistence_threshold_elements=_count(
            zero, "stage3_param_persistence_threshold", "param_persistence_threshold"
        ),
        overlap_communication=zero.get("overlap_comm"),
    )


def offload_of(strategy: Any) -> Offload:
    """What a strategy's configuration keeps on the host.

    Raises:
        UnsupportedError: if it keeps something on a disk, parameters without the optimizer, or in stages 1 and 2.
    """
    zero = _config_of(strategy).get("zero_optimization") or {}
    optimizer, parameters = (_device_of(zero, name) for name in ("offload_optimizer", "offload_param"))
    for name, device in (("offload_optimizer", optimizer), ("offload_param", parameters)):
        if device not in (None, "cpu"):
            raise UnsupportedError(f"DeepSpeed's {name} to {device!r} is not forecast; to 'cpu' it is.")
    if parameters is None:
        return "never" if optimizer is None else "optimizer"
    if zero.get("stage") != 3:
        raise UnsupportedError(
            f"DeepSpeed keeps parameters on {parameters} (offload_param) in stage 3 alone, and "
            f"zero_optimization.stage is {zero.get('stage')}. Use DeepSpeedStrategy(stage=3), or leave "
            "offload_parameters out."
        )
    if optimizer is None:
        raise UnsupportedError(
            "DeepSpeed keeps parameters on the host and the optimizer on the device, which is not forecast. Give "
            "offload_optimizer=True with offload_parameters=True, or leave both out."
        )
    return "parameters"


def notes_on_precision(candidate: Candidate) -> tuple[str, ...]:
    """What the user should know of 16 bits under ZeRO, which are others than Lightning's; nothing elsewhere.

    Source: ``DeepSpeedEngine.get_data_types`` in ``deepspeed/runtime/engine.py`` 0.19.8: gradients are added up in the
    dtype of the module.

    Args:
        candidate: what a plan has chosen.
    """
    section, sharding = _SECTION_OF.get(candidate.precision), candidate.sharding
    if section is None or sharding is None or sharding.engine != "deepspeed":
        return ()
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[section]
    passes = candidate.split.num_slices * candidate.split.accumulate_grad_batches
    added = "" if passes == 1 else f", and adds up the gradients of {passes} slices in it, rounding each time"
    return (
        f"precision={candidate.precision!r} under DeepSpeed casts the whole module to {dtype}{added}; master weights "
        "and optimizer states are float32",
    )


def write_config(
    strategy: Any,
    *,
    precision: str,
    sharding: Sharding,
    offload: Offload = "never",
    micro_batch_size: int,
    module: nn.Module | None = None,
    formatted_for: str | None = None,
) -> Undo:
    """Write a plan into a strategy's configuration; the engine that is built next follows it.

    The norm to clip to is there already: Lightning writes ``gradient_clip_val``. The accumulation is written as 1: how
    a slice's loss counts is MemFit's, and DeepSpeed would divide it once more.
    ``zero_force_ds_cpu_optimizer`` is written as false where the optimizer is offloaded: whether the extension that it
    asks for can be built was found out when the plan was made.

    Args:
        strategy: Lightning's for DeepSpeed, formatted, and without an engine.
        precision: in Lightning's words.
        sharding: stage and sizes; those that are ``None`` stay as they are.
        offload: what is on the host.
        micro_batch_size: samples in one forward and backward on one device; DeepSpeed logs its speed by it.
        module: the module in training, to see whether its parameters are divided already.
        formatted_for: the precision for which Lightning formatted the configuration; ``None`` if that is not known.

    Raises:
        ConfigurationError: if the user's own configuration sets another precision, or the module's parameters were
            divided when it was made and the stage leaves them whole.
        UnsupportedError: if the sharding is none of DeepSpeed, or of a stage that keeps no parameters on the host, or
            this release of Lightning has other names.
    """
    config = _config_of(strategy)
    if sharding.zero_stage is None or (offload == "parameters" and sharding.zero_stage < 3):
        raise UnsupportedError(f"{sharding.label} with offload={offload!r} is not written for DeepSpeed.")
    if sharding.zero_stage < 3 and module is not None and is_divided(module):
        raise ConfigurationError(
            f"zero_stage={sharding.zero_stage}, but the module's parameters were divided when configure_model made it "
            "under DeepSpeedStrategy(stage=3). Give DeepSpeedStrategy the stage that is to be used, or leave it at 3."
        )
    before = copy.deepcopy(config)
    try:
        _write_precision(strategy, config, precision, formatted_for)
    except BaseException:
        _put_back(config, before)
        raise
    config["gradient_accumulation_steps"] = 1
    config["train_micro_batch_size_per_gpu"] = micro_batch_size
    config.pop("train_batch_size", None)  # DeepSpeed would check their product
    zero = config.setdefault("zero_optimization", {})
    zero["stage"] = sharding.zero_stage
    sizes = {
        "reduce_bucket_size": sharding.reduce_bucket_elements,
        "allgather_bucket_size": sharding.allgather_bucket_elements,
        "stage3_prefetch_bucket_size": sharding.prefetch_bucket_elements,
        "stage3_param_persistence_threshold": sharding.persistence_threshold_elements,
        "overlap_comm": sharding.overlap_communication,
    }
    zero.update({name: value for name, value in sizes.items() if value is not None})
    for name, places in (("offload_optimizer", ("optimizer", "parameters")), ("offload_param", ("parameters",))):
        if offload not in places:
            zero.pop(name, None)
        elif _device_of(zero, name) is None:  # also where it says "none"
            zero[name] = {**(zero.get(name) or {}), "device": "cpu"}
    if offload != "never":
        config["zero_force_ds_cpu_optimizer"] = False
    return lambda: _put_back(config, before)


def make_deepspeed_delegate(precision: str, *, namespace: str) -> Any:
    """Lightning's precision plugin for DeepSpeed, which leaves scaling and clipping to the engine.

    Args:
        precision: in Lightning's words.
        namespace: the package the user's Trainer comes from.
    """
    plugins = importlib.import_module(f"{namespace}.plugins.precision")
    return plugins.DeepSpeedPrecision(precision)


def own_precision(strategy: Any, formatted_for: str) -> Precision | None:
    """The precision that the user's own configuration of DeepSpeed sets; ``None`` if it sets none.

    Args:
        strategy: Lightning's for DeepSpeed.
        formatted_for: the precision for which Lightning formatted its configuration.
    """
    config = dict(_config_of(strategy))
    _take_out_lightnings(strategy, config, (formatted_for,))
    own = _enabled(config)
    return None if not own else "bf16-mixed" if own[0] == "bf16" else "16-mixed"


def _take_out_lightnings(strategy: Any, config: dict[str, Any], precisions: Iterable[str]) -> None:
    """Take out the section that Lightning writes for one of some precisions."""
    for other in precisions:
        section, written = _SECTION_OF.get(other), dict[str, Any]()
        if section is None:
            continue
        _format(strategy, written, other)
        if config.get(section) == written.get(section):
            config.pop(section, None)


def _enabled(config: dict[str, Any]) -> list[str]:
    return [section for section in ("bf16", "fp16") if (config.get(section) or {}).get("enabled")]


def _write_precision(strategy: Any, config: dict[str, Any], precision: str, formatted_for: str | None) -> None:
    """Take out what Lightning wrote for another precision, and let it write anew."""
    _take_out_lightnings(strategy, config, _SECTION_OF if formatted_for is None else (formatted_for,))
    own, wanted = _enabled(config), _SECTION_OF.get(precision)
    if own and own != [wanted]:
        raise ConfigurationError(
            f"precision={precision!r}, but your DeepSpeed configuration enables {own[0]!r}. Take that section out, or "
            f"give MemFit(precision={'bf16-mixed' if own[0] == 'bf16' else '16-mixed'!r})."
        )
    _format(strategy, config, precision)


def _format(strategy: Any, config: dict[str, Any], precision: str) -> None:
    package = next(cls for cls in type(strategy).__mro__ if cls.__name__ == "DeepSpeedStrategy").__module__
    formatter = getattr(sys.modules[package], "_format_precision_config", None)
    if formatter is None:
        raise UnsupportedError(
            f"{package} has no _format_precision_config, which writes DeepSpeed's precision: this release of Lightning "
            "changed it. Use Lightning 2.5 or 2.6, or set MEMFIT=off."
        )
    formatter(
        config=config,
        precision=precision,
        **{name: getattr(strategy, name) for name in _NAMES if name != "config"},
    )


def _config_of(strategy: Any) -> dict[str, Any]:
    missing = [name for name in _NAMES if not hasattr(strategy, name)]
    if missing or not isinstance(strategy.config, dict):
        raise UnsupportedError(
            f"{type(strategy).__name__} has no {', '.join(missing) or 'configuration in a dict'}: this release of "
            "Lightning changed it. Use Lightning 2.5 or 2.6, or set MEMFIT=off."
        )
    config: dict[str, Any] = strategy.config
    return config


def _put_back(config: dict[str, Any], before: dict[str, Any]) -> None:
    config.clear()
    config.update(copy.deepcopy(before))


def _count(zero: dict[str, Any], *names: str) -> int | None:
    value = next((zero[name] for name in names if name in zero), None)
    return None if value in (None, "auto") else int(value)


def _device_of(zero: dict[str, Any], name: str) -> Literal["cpu", "nvme"] | None:
    device = (zero.get(name) or {}).get("device")
    return None if device in (None, "none") else device


def frozen_on_the_device(strategy: Any, module: nn.Module) -> bool:
    """Whether frozen parameters would stay on the device if MemFit moved parameters to the host.

    They do where ``deepspeed.zero.Init`` divided them there when ``configure_model`` made the module: the engine moves
    those that are trained, ``_move_to_flat_buffer`` in ``deepspeed/runtime/zero/stage3.py`` 0.19.8.
    """
    frozen = any(not parameter.requires_grad for parameter in module.parameters())
    return frozen and is_divided(module) and offload_of(strategy) != "parameters"


def is_divided(module: nn.Module) -> bool:
    """Whether a module's parameters were divided when it was made, under ``deepspeed.zero.Init``."""
    return any(hasattr(parameter, "ds_id") for parameter in module.parameters())
