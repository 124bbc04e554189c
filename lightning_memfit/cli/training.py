"""The training job of ``memfit fit`` and ``scripts/train.py``: makes what a Hydra config names, and trains it.

Hydra is imported where it is needed.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import seed_everything

from lightning_memfit.cli.run_summary import ValidationCurve, print_summary
from lightning_memfit.config import memfit_from_config
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.preconditions import check_job_of_a_sweep, check_trainer
from lightning_memfit.sweep_objective import objective


def train(config: Any) -> float | None:
    """Make everything the config names, train, and say what happened.

    Args:
        config: with ``model``, ``data``, ``trainer`` and ``memfit``; ``seed``, and ``objective``, the name of a logged
            metric, may be left out.

    Returns:
        In a sweep the objective, ``None`` if the config names none.

    Raises:
        MemFitError: if MemFit refuses.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    with _quiet():
        return _train(config, in_sweep=HydraConfig.get().mode == RunMode.MULTIRUN)


def require_every_value(config: Any) -> None:
    """Refuse a config that lacks a value that only the user can give, such as the path of his own data.

    Raises:
        ConfigurationError: naming the value.
    """
    from omegaconf import OmegaConf

    missing = sorted(OmegaConf.missing_keys(config))
    if missing:
        raise ConfigurationError(
            f"{missing[0]} has no default. Add {missing[0]}=... to the command; conf/ says beside it what it means."
        )


def _require_parts(config: Any) -> None:
    for part, what in (("model", "a LightningModule"), ("data", "a LightningDataModule"), ("trainer", "a Trainer")):
        if config.get(part) is None:
            raise ConfigurationError(f"The config has no {part!r}, from which {what} is made. Add it.")


def _train(config: Any, *, in_sweep: bool) -> float | None:
    from hydra.core.hydra_config import HydraConfig
    from hydra.utils import instantiate

    _require_parts(config)
    require_every_value(config)
    if config.get("seed") is not None:
        seed_everything(config.seed, workers=True, verbose=False)
    curve = ValidationCurve()
    memfit = memfit_from_config(config.get("memfit") or {})
    model = instantiate(config.model)
    data = instantiate(config.data)
    callbacks = [*instantiate(config.trainer.get("callbacks") or []), curve]
    plugins = [*instantiate(config.trainer.get("plugins") or []), memfit]
    trainer = instantiate(config.trainer, callbacks=callbacks, plugins=plugins)
    if not memfit.is_off:
        # ``fit`` asks a plugin late: by then Lightning has started the other ranks, which run the command again.
        check_trainer(trainer, memfit.request)
        if in_sweep:
            check_job_of_a_sweep(trainer)
    trainer.fit(model, datamodule=data)
    if trainer.is_global_zero:
        print_summary(trainer, curve, Path(HydraConfig.get().runtime.output_dir))
    # A single run has nobody to return it to, and need not validate.
    wanted = config.get("objective") if in_sweep else None
    return None if wanted is None else objective(trainer, wanted)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what does not concern this run, so that what does can be seen; what comes after it is as before."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.WARNING)  # hardware that was not found, and products to try
    try:
        with warnings.catch_warnings():
            # The text is in memory already; worker processes would only copy it.
            warnings.filterwarnings("ignore", message="The '.*_dataloader' does not have many workers")
            # Hydra made the folder a moment ago, and put its own files there.
            warnings.filterwarnings("ignore", message="Experiment logs directory .* exists and is not empty")
            # Lightning 2.6 asks torch in a way that torch 2.13 will drop.
            warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")
            yield
    finally:
        logger.setLevel(before)
