"""From the settings as users write them, in code, a config or on a command line, to a checked ``PlanRequest``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from lightning_memfit.errors import ConfigurationError
from lightning_memfit.plan import PlanRequest
from lightning_memfit.units import parse_bytes


def plan_request(
    *,
    effective_batch_size: int | None = None,
    budget: int | str = "auto",
    headroom: int | str = "auto",
    precision: str = "auto",
    activation_checkpointing: str | Sequence[str] = "auto",
    optimizer_states: str = "auto",
    offload: str = "never",
    micro_batch_size: int | Literal["auto"] = "auto",
    optimizer_implementation: str = "auto",
    loss_weight: Any = "samples",
    max_length: int | None = None,
    allow_inexact_slicing: bool = False,
    mode: str = "apply",
    on_no_fit: str = "raise",
    num_profiled_steps: int = 2,
    planning_seconds: float | None = None,
) -> PlanRequest:
    """Convert and check the settings of ``MemFit`` of the same names.

    Raises:
        ConfigurationError: with the setting, its value and the choices.
    """
    return PlanRequest(
        effective_batch_size=effective_batch_size,
        budget=None if budget == "auto" else parse_bytes(budget, setting="budget"),
        headroom=_headroom(headroom),
        precision=None if precision == "auto" else precision,  # type: ignore[arg-type]  # checked by PlanRequest
        activation_checkpointing=_names_or_word(activation_checkpointing),
        optimizer_states=optimizer_states,  # type: ignore[arg-type]
        offload=offload,  # type: ignore[arg-type]
        micro_batch_size=None if micro_batch_size == "auto" else micro_batch_size,
        optimizer_implementation=optimizer_implementation,  # type: ignore[arg-type]
        loss_weight=loss_weight if isinstance(loss_weight, str) else getattr(loss_weight, "__name__", "function"),
        max_length=max_length,
        allow_inexact_slicing=allow_inexact_slicing,
        mode=mode,  # type: ignore[arg-type]
        on_no_fit=on_no_fit,  # type: ignore[arg-type]
        num_profiled_steps=num_profiled_steps,
        planning_seconds=planning_seconds,
    )


def check_no_fit_value(on_no_fit: str, value: float | None) -> None:
    """Refuse a value for the objective that is no number, that is missing, or that nothing would use.

    Raises:
        ConfigurationError: naming both settings.
    """
    if value is None:
        if on_no_fit == "value":
            raise ConfigurationError(
                "on_no_fit='value' needs no_fit_value=: the objective of a run that does not fit, such as "
                "no_fit_value=1e9 where it is minimised. Or use on_no_fit='skip'."
            )
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        raise ConfigurationError(f"no_fit_value={value!r} must be a number, or be left out.")
    if on_no_fit != "value":
        raise ConfigurationError(
            f"no_fit_value={value!r} is the objective of a run that does not fit under on_no_fit='value', and "
            f"on_no_fit is {on_no_fit!r}. Set on_no_fit='value', or leave no_fit_value out."
        )


def _headroom(value: int | str) -> int | None:
    if value == "auto":
        return None
    is_nothing = value in (0, "0") and not isinstance(value, bool)
    return 0 if is_nothing else parse_bytes(value, setting="headroom")


def _names_or_word(value: str | Sequence[str]) -> Any:
    if isinstance(value, str):
        # One pattern may be written without a list around it.
        return (value,) if set(value) & set(".*?[") else value
    names = tuple(value) if isinstance(value, Iterable) else ()
    if not names or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(
            f"activation_checkpointing={value!r} must be 'auto', 'none', 'blocks', or patterns of module names such as "
            "['encoder.layers.*']."
        )
    return names
