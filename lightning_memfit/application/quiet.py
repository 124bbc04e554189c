"""Keeps Lightning from announcing what does not concern a plan."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_memfit.upstream import NAMESPACES


@contextmanager
def lightning_quietened() -> Iterator[None]:
    """Within it, Lightning neither logs what hardware it found nor warns of it: nothing is run on it."""
    loggers = [logging.getLogger(namespace) for namespace in NAMESPACES]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
