"""Gives the plan to the Trainer's loggers as hyperparameters, so that runs can be compared by it.

Adapter for Lightning's loggers: ``log_hyperparams``, and of ``TensorBoardLogger`` ``hparams``, ``log_dir`` and
``NAME_HPARAMS_FILE``.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

from fsspec.core import url_to_fs

from lightning_memfit.plan import Measurement, Plan
from lightning_memfit.upstream import upstream_module


def hyperparameters_of(plan: Plan, measurement: Measurement) -> dict[str, int | str]:
    """What was chosen, and the bytes that it needs, flat and in plain types; every key begins with ``memfit/``.

    Args:
        plan: the plan in force.
        measurement: what its warm-up measured.
    """
    candidate, split = plan.candidate, plan.split
    values: dict[str, int | str] = {
        "precision": candidate.precision,
        "effective_batch_size": split.effective_batch_size,
        "accumulate_grad_batches": split.accumulate_grad_batches,
        "micro_batch_size": split.micro_batch_size,
        "num_slices": split.num_slices,
        "activation_checkpointing": ", ".join(candidate.checkpointed_modules) or "none",
        "optimizer_states": candidate.optimizer_states,
        "optimizer_implementation": candidate.optimizer_implementation,
        "budget_bytes": plan.budget.budget_bytes,
        "predicted_peak_bytes": plan.forecast.predicted_peak_bytes,
        "measured_peak_bytes": measurement.measured_peak_bytes,
    }
    return {f"memfit/{name}": value for name, value in values.items()}


def log_hyperparameters(trainer: Any, values: Mapping[str, int | str]) -> dict[str, Exception]:
    """Log ``values`` with every logger of the Trainer, beside the user's own.

    Nothing is logged under ``fast_dev_run``, which has no loggers.

    Returns:
        The errors of loggers that raised, by the name of the logger's class; the others have got the values.
    """
    failed: dict[str, Exception] = {}
    for logger in () if trainer.fast_dev_run else trainer.loggers:
        try:
            _log(logger, dict(values))
            _write_again(trainer, logger)
        except Exception as error:  # services raise errors of their own; training needs none of them
            failed[type(logger).__name__] = error
    return failed


def _log(logger: Any, values: dict[str, int | str]) -> None:
    """Log, and no metrics beside it.

    TensorBoard shows those hyperparameters of a run that are written first, with a metric. ``metrics={}`` writes none
    there, so that it goes on to show the user's own, also those that are logged later.
    Source: ``EventAccumulator.summary_metadata`` of tensorboard 2.21, ``TensorBoardLogger`` of Lightning 2.6.
    """
    if "metrics" in inspect.signature(logger.log_hyperparams).parameters:
        logger.log_hyperparams(values, metrics={})
    else:
        logger.log_hyperparams(values)


def _write_again(trainer: Any, logger: Any) -> None:
    """``TensorBoardLogger`` writes ``hparams.yaml`` once, as the fit begins, when there is no plan yet."""
    kept, name = getattr(logger, "hparams", None), getattr(logger, "NAME_HPARAMS_FILE", None)
    if not isinstance(kept, Mapping) or name is None:
        return
    path = f"{str(logger.log_dir).rstrip('/')}/{name}"
    file_system, path_there = url_to_fs(path)
    if not file_system.exists(path_there):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of values that YAML cannot hold, Lightning has warned when it wrote the file
        upstream_module(trainer, "core.saving").save_hparams_to_yaml(path, kept)
