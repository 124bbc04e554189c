"""Lets ``trainer.estimated_stepping_batches`` be read while a step is traced, without Lightning loading any data.

Adapter for ``fit_loop.setup_data`` and ``fit_loop.max_batches``: ``configure_optimizers`` often reads the estimate for
a schedule, and Lightning then builds loaders and starts their workers, inside whatever mode is active.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning_memfit.undo import set_instance_attribute


@contextmanager
def answering_num_batches(trainer: Any, *, num_batches: int | None, accumulate_grad_batches: int) -> Iterator[None]:
    """Within this context the Trainer believes to have ``num_batches`` per epoch (``None``: unknown).

    Args:
        trainer: the Trainer, before its loaders exist.
        num_batches: Lightning batches per epoch.
        accumulate_grad_batches: Lightning batches per optimizer step that the estimate shall count with.
    """
    fit_loop = trainer.fit_loop
    before = fit_loop.max_batches

    def setup_data() -> None:
        fit_loop.max_batches = float("inf") if num_batches is None else num_batches

    setup_data()  # a step may read trainer.num_training_batches, too
    undo_setup = set_instance_attribute(fit_loop, "setup_data", setup_data)
    undo_accumulation = set_instance_attribute(trainer, "accumulate_grad_batches", accumulate_grad_batches)
    try:
        with _quiet("Loading `train_dataloader` to estimate"):
            yield
    finally:
        undo_accumulation()
        undo_setup()
        fit_loop.max_batches = before


@contextmanager
def _quiet(beginning: str) -> Iterator[None]:
    """Drop one announcement of Lightning: nothing is loaded, and it comes again when something is."""

    def wanted(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    loggers = [
        logging.getLogger(f"{package}.utilities.rank_zero") for package in ("lightning.pytorch", "pytorch_lightning")
    ]
    for logger in loggers:
        logger.addFilter(wanted)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(wanted)
