"""MemFit: fits training into memory under a fixed effective batch, for PyTorch Lightning.

The plugin is imported when it is first asked for: forecasts need neither Lightning nor what reports are drawn with.
"""

from typing import TYPE_CHECKING, Any

from lightning_memfit._version import __version__
from lightning_memfit.errors import (
    BatchArithmeticError,
    BatchStructureError,
    CheckpointFormatError,
    ConfigurationError,
    MemFitError,
    NoFeasiblePlanError,
    PlanFileError,
    StalePlanError,
    TraceError,
    UnsupportedError,
)
from lightning_memfit.forecasting import forecast, make_plan, trace_step
from lightning_memfit.hardware.detect import detect_device
from lightning_memfit.hardware.device import DeviceSpec
from lightning_memfit.no_fit import NoFit
from lightning_memfit.plan import Measurement, MemoryBreakdown, Plan, Sharding
from lightning_memfit.sharded_model import fully_shard
from lightning_memfit.strategy_choice import choose_strategy
from lightning_memfit.sweep_objective import objective
from lightning_memfit.trace.timeline import Timeline

if TYPE_CHECKING:
    from lightning_memfit.plugin import MemFit

__all__ = [
    "BatchArithmeticError",
    "BatchStructureError",
    "CheckpointFormatError",
    "ConfigurationError",
    "DeviceSpec",
    "Measurement",
    "MemFit",
    "MemFitError",
    "MemoryBreakdown",
    "NoFeasiblePlanError",
    "NoFit",
    "Plan",
    "PlanFileError",
    "Sharding",
    "StalePlanError",
    "Timeline",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "choose_strategy",
    "detect_device",
    "forecast",
    "fully_shard",
    "make_plan",
    "objective",
    "trace_step",
]


def __getattr__(name: str) -> Any:
    if name != "MemFit":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from lightning_memfit.plugin import MemFit

    return MemFit


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
