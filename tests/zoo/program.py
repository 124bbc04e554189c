"""What a program of the zoo is: training code as people write it, and what MemFit may do with it.

A program is made anew for every run, so that runs share nothing. It is small: at most a second per run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

SGD_MOMENTUM: Mapping[str, float] = {"lr": 0.05, "momentum": 0.9}
"""The optimizer of programs whose final weights are compared: it neither hides a wrong gradient's size nor blows up a
rounding error, as Adam does both."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run's parts."""

    module: Any
    """A new LightningModule."""
    fit: Mapping[str, Any]
    """Keyword arguments of ``Trainer.fit`` beside the module: ``train_dataloaders``, or ``datamodule``, ..."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Training code that knows nothing of MemFit."""

    name: str
    """In the names of tests: what is particular about it."""
    make: Callable[[], Run]
    """Seeds itself: two calls give equal weights and equal data."""
    trainer: Callable[[], Mapping[str, Any]] = dict
    """Arguments of the Trainer beside the usual ones, new objects for every run; two epochs if nothing is said."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of ``MemFit`` that a user of this program would give, such as ``loss_weight``."""
    micro_batch_size: int = 2
    """Samples of a slice in the sliced run."""
    not_sliced: str | None = None
    """Why it may not be sliced: a part of the error that a pinned ``micro_batch_size`` raises; ``None`` if it may."""
    blocks: tuple[str, ...] = ("blocks.*",)
    """Patterns of the modules that the checkpointed run recomputes."""
    recomputed_anyway: bool = False
    """Whether the blocks recompute themselves, so that they are not recomputed a second time, and that is said."""
    not_quantised: str | None = None
    """Why 8-bit states cannot be had: a part of the error; ``None`` if they can."""
    sliced_within: float = 1e-5
    """Largest relative difference of final weights, sliced from plain; above 1e-5 the reason stands beside it."""
    traceable: bool = True
    """Whether the step can be traced; otherwise the peak is a line through two small real steps."""
    forecast_above: float = 0.005
    """Largest share of the measured peak by which the forecast may exceed it; above 0.005 the reason stands there."""
    runs_alone: str | None = None
    """Why MemFit leaves the run alone, a part of what it says; ``None`` if it does not."""
