"""What a run returns to a sweep, also where it did not fit and was not trained."""

from __future__ import annotations

import math
from typing import Any

from lightning_memfit.errors import ConfigurationError


def objective(trainer: Any, metric: str) -> float:
    """The value of a logged metric after ``fit``, or what stands for it where the run did not fit.

    Args:
        trainer: the Trainer after ``fit``, with or without MemFit.
        metric: a name that was logged, such as ``"val_loss"``.

    Returns:
        The metric's last value; of a run that was not trained ``no_fit_value`` under ``on_no_fit="value"``, and NaN
        under ``on_no_fit="skip"``.

    Raises:
        ConfigurationError: if nothing of that name was logged; the message lists what was.
    """
    plugin = trainer.precision_plugin
    if getattr(plugin, "no_fit", None) is not None:
        return math.nan if plugin.no_fit_value is None else float(plugin.no_fit_value)
    logged = trainer.callback_metrics
    if metric not in logged:
        raise ConfigurationError(
            f"The objective {metric!r} was not logged. Choose one of: {', '.join(sorted(logged)) or 'none were logged'}"
            ", or log it with self.log."
        )
    return float(logged[metric])
