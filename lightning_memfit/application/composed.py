"""What is planned, of a composed config: made as a training script does, up to the first batch.

Touches ``HydraConfig.instance().cfg``, which ``${hydra:...}`` is read from, and ``attach_data`` of
``trainer._data_connector``, which makes the Trainer know module and data. Hydra and Lightning are imported where they
are needed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from lightning_memfit.application.import_paths import called
from lightning_memfit.application.quiet import lightning_quietened
from lightning_memfit.application.subject import Subject, first_of, made_on_meta
from lightning_memfit.apply.batch_transfer import hook_owners, transferred
from lightning_memfit.apply.stepping_batches import answering_num_batches
from lightning_memfit.batch_tree import batch_size_of, split_by_sizes
from lightning_memfit.cache_folder import cache_directory
from lightning_memfit.config import MemFitConfig, memfit_arguments
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.hardware.torch_driver import TorchDriver
from lightning_memfit.observe.random_state import random_state_kept
from lightning_memfit.search.batch_arithmetic import resolve_loader
from lightning_memfit.search.strategies import STRATEGIES
from lightning_memfit.validate.splittable import has_train_mode_batch_norm

_SETTINGS = (
    "budget", "headroom", "precision", "activation_checkpointing", "optimizer_states", "optimizer_implementation",
    "micro_batch_size",
)  # fmt: skip
_NOT_OF_A_FORECAST = (
    "mode", "on_no_fit", "no_fit_value", "num_profiled_steps", "planning_seconds", "cache_dir", "verbose", "plan",
)  # fmt: skip
_MAY_NEED_LESS = ("split_batch", "max_length", "allow_inexact_slicing", "offload")
# What a Trainer needs that trains nothing: no GPU, no folders, no other plugin.
_ON_THIS_MACHINE = {
    "accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": None, "plugins": None,
    "logger": False, "callbacks": None, "profiler": None, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False,
}  # fmt: skip
_ONE_DEVICE = "planned for one device; what several exchange is left out"
_EPOCHS = 1000  # Lightning's, where neither steps nor epochs are given
_PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed", "16": "16-mixed"}


@contextmanager
def subject_of_config(
    config: Any,
    *,
    words: str,
    source: str,
    otherwise: str,
    real: bool,
    effective_batch_size: int | None = None,
    num_devices: int | None = None,
) -> Iterator[Subject]:
    """Make what a composed config names: ``model``, ``data``, ``trainer`` and, where there is one, ``memfit``.

    Within the context the Trainer answers what the module asks it while its step is traced.

    Args:
        config: a config of OmegaConf without its ``hydra`` part; its ``trainer`` is changed.
        words: what it is, in words.
        source: where the config is from, for messages.
        otherwise: what else may be done where the config has another structure, for messages.
        real: make the module for real, not on ``meta``.
        effective_batch_size: outweighs the config: it decides how the loader's batches are cut.
        num_devices: devices that are planned for; ``None`` plans for one, whatever the Trainer is told.

    Raises:
        ConfigurationError: if it has another structure, or what it names cannot be made.
    """
    with random_state_kept():
        _require(config, source, otherwise)
        if "seed" in config and config.seed is not None:
            torch.manual_seed(config.seed)
        settings, notes = settings_of(config)
        if num_devices is not None:
            settings.update(_of_several(config, num_devices))
            notes = tuple(
                note
                for note in notes
                if note != _ONE_DEVICE and not ("offload" in settings and "memfit.offload=" in note)
            )
        if effective_batch_size is not None:
            settings["effective_batch_size"] = effective_batch_size
        instantiate = _instantiate()
        make = partial(instantiate, config.model)
        module, on_meta, made_notes = made_on_meta(make, what="model", real=real)
        data = called(lambda: instantiate(config.data), what="data")
        trainer = _trainer(config, instantiate)
        loader = _attached_loader(trainer, module, data)
        batch, accumulate = _planned_batch(trainer, module, loader, settings, num_devices or 1)
        with answering_num_batches(
            trainer, num_batches=_batches_per_epoch(trainer, loader), accumulate_grad_batches=accumulate
        ):
            yield Subject(
                words=words,
                module=module,
                batch=batch,
                on_meta=on_meta,
                settings=settings,
                notes=(*notes, *made_notes),
                may_need_less_by=may_need_less_by(config, counted=settings),
                optimizer_steps=_optimizer_steps(trainer),
                device=device_of(config),
            )


def device_of(config: Any) -> str | None:
    """What a config says to forecast for, by its ``hardware`` group; ``None`` where it says nothing.

    A Trainer on the CPU of a machine that has a GPU is forecast for the host.
    """
    from omegaconf import OmegaConf

    device = OmegaConf.select(config, "hardware.device")
    if device in (None, "local") and OmegaConf.select(config, "trainer.accelerator") == "cpu" and has_gpu():
        return "cpu"
    return None if device is None else str(device)


def devices_of(config: Any) -> int:
    """Devices that a config names: its own ``devices``, else those of its Trainer; 1 where neither is a number."""
    from omegaconf import OmegaConf

    for key in ("devices", "trainer.devices"):
        found = OmegaConf.select(config, key)
        if isinstance(found, int) and not isinstance(found, bool) and found >= 1:
            return found
    return 1


def _of_several(config: Any, num_devices: int) -> dict[str, Any]:
    """What ``make_plan`` takes of a config beside the devices: strategy and offloading, where they are named."""
    strategy, offload = (config.get("trainer") or {}).get("strategy"), (config.get("memfit") or {}).get("offload")
    found: dict[str, Any] = {"num_devices": num_devices}
    if strategy in STRATEGIES and (num_devices > 1 or strategy.endswith("_offload")):
        found["strategy"] = strategy
    if offload not in (None, "never"):
        found["offload"] = offload
    return found


def has_gpu() -> bool:
    """Whether this machine has a GPU that torch can use."""
    return TorchDriver().device_count() > 0


@contextmanager
def answering_hydra(config: Any) -> Iterator[Any]:
    """Within it ``${hydra:...}`` is read from a composed config, and the output folder is a temporary one.

    Yields:
        The config without its ``hydra`` part, a copy.
    """
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf, open_dict, read_write

    before = HydraConfig.instance().cfg
    with tempfile.TemporaryDirectory(prefix="memfit") as output:
        try:
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.runtime.output_dir = output
            HydraConfig.instance().set_config(config)
            yield OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        finally:
            HydraConfig.instance().cfg = before


def _require(config: Any, source: str, otherwise: str) -> None:
    from omegaconf import OmegaConf

    for key, what in (("model", "a LightningModule"), ("data", "a LightningDataModule"), ("trainer", "a Trainer")):
        if config.get(key) is None:
            raise ConfigurationError(
                f"The config of {source} has no {key!r}, from which {what} is made. Add it, or {otherwise}."
            )
    # The Trainer's loggers and callbacks are not made here.
    missing = sorted(key for key in OmegaConf.missing_keys(config) if not key.startswith("trainer."))
    if missing:
        raise ConfigurationError(f"{missing[0]} has no default. Add {missing[0]}=... to the command.")


def _instantiate() -> Any:
    from hydra.utils import instantiate

    return instantiate


def settings_of(config: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What the ``memfit`` and ``trainer`` groups ask for, as ``make_plan`` takes it, and what it does not take.

    Raises:
        ConfigurationError: if MemFit does not know a setting.
    """
    trainer = config.get("trainer") or {}
    arguments = memfit_arguments(config.get("memfit") or {})
    settings = {name: arguments[name] for name in _SETTINGS if arguments[name] != "auto"}
    if arguments["effective_batch_size"] is not None:
        settings["effective_batch_size"] = arguments["effective_batch_size"]
    if arguments["cache_dir"] != "auto":
        settings["cache_dir"] = cache_directory(arguments["cache_dir"])
    if "precision" not in settings and trainer.get("precision") is not None:
        precision = str(trainer.get("precision"))
        settings["precision"] = _PRECISIONS.get(precision, precision)
    notes = [f"memfit.{name}={arguments[name]!r} is left out of this forecast" for name in _left_out(arguments)]
    if trainer.get("gradient_clip_val"):
        notes.append("gradient clipping is left out of this forecast: it works in place")
    if str(trainer.get("devices", 1)) != "1" or str(trainer.get("num_nodes", 1)) != "1":
        notes.append(_ONE_DEVICE)
    return settings, tuple(notes)


def may_need_less_by(config: Any, *, counted: Container[str] = ()) -> tuple[str, ...]:
    """The settings of the ``memfit`` group that no forecast counts with, and under which training may need less.

    Args:
        config: a composed config.
        counted: those that this forecast counts with nevertheless.

    Raises:
        ConfigurationError: if MemFit does not know a setting.
    """
    arguments = memfit_arguments(config.get("memfit") or {})
    return tuple(f"memfit.{name}" for name in _left_out(arguments) if name in _MAY_NEED_LESS and name not in counted)


def _left_out(arguments: Mapping[str, Any]) -> Iterator[str]:
    defaults = vars(MemFitConfig())
    for name, value in arguments.items():
        is_used = name in (*_SETTINGS, *_NOT_OF_A_FORECAST, "effective_batch_size")
        if not is_used and value != defaults[name]:
            yield name


def _trainer(config: Any, instantiate: Any) -> Any:
    from omegaconf import open_dict

    with open_dict(config.trainer):
        for key, value in _ON_THIS_MACHINE.items():
            config.trainer[key] = value
    with lightning_quietened():
        trainer = called(lambda: instantiate(config.trainer), what="trainer")
    if trainer.max_epochs is None:  # as ``fit`` does before anything reads it (``_parse_loop_limits``)
        trainer.fit_loop.max_epochs = _EPOCHS if trainer.max_steps == -1 else -1
    return trainer


def _attached_loader(trainer: Any, module: Any, data: Any) -> Any:
    """The train loader, once the module and the data are set up as a Trainer does before training."""
    if not callable(getattr(data, "train_dataloader", None)):
        with lightning_quietened():
            trainer._data_connector.attach_data(module, train_dataloaders=data)
        trainer.strategy.connect(module)
        called(lambda: module.setup("fit"), what=f"setup of {type(module).__name__}")
        return data
    with lightning_quietened():
        trainer._data_connector.attach_data(module, datamodule=data)
    trainer.strategy.connect(module)
    called(data.prepare_data, what=f"prepare_data of {type(data).__name__}")
    called(lambda: data.setup("fit"), what=f"setup of {type(data).__name__}")
    called(lambda: module.setup("fit"), what=f"setup of {type(module).__name__}")
    return called(data.train_dataloader, what=f"train_dataloader of {type(data).__name__}")


def _planned_batch(trainer: Any, module: Any, loader: Any, settings: dict[str, Any], ranks: int) -> tuple[Any, int]:
    """The batch that is planned, as ``training_step`` gets it, and how many of them form the effective batch.

    Raises:
        ConfigurationError: if the effective batch cannot be formed.
    """
    batch = first_of(loader, what="the train dataloader")
    resolved = resolve_loader(
        effective_batch_size=settings.get("effective_batch_size"),
        ranks=ranks,
        loader_batch_size=batch_size_of(batch),
        accumulate_grad_batches=trainer.accumulate_grad_batches,
        can_rebuild=isinstance(loader, torch.utils.data.DataLoader),
        has_batch_norm=has_train_mode_batch_norm(module) is not None,
        allow_inexact_slicing=False,
    )
    settings["effective_batch_size"] = resolved.effective_batch_size
    if resolved.rebuilt:
        rest = batch_size_of(batch) - resolved.loader_batch_size
        batch = split_by_sizes(batch, (resolved.loader_batch_size, rest))[0]
    if hook_owners(trainer):
        batch = called(lambda: transferred(trainer, module, batch), what="a transfer hook")
    return batch, resolved.accumulate_grad_batches


def _batches_per_epoch(trainer: Any, loader: Any) -> int | None:
    """As ``trainer.num_training_batches`` will be; ``None`` where the loader does not tell its length."""
    if not hasattr(loader, "__len__"):
        return None
    limit, length = trainer.limit_train_batches, len(loader)
    return min(limit, length) if isinstance(limit, int) else int(limit * length)


def _optimizer_steps(trainer: Any) -> int | None:
    """Optimizer steps of the whole run; ``None`` where it has no end that is known."""
    steps = trainer.estimated_stepping_batches
    return int(steps) if 0 < steps < float("inf") else None
