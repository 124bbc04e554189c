"""MemFit: fits training into memory under a fixed effective batch, for PyTorch Lightning."""

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
from lightning_memfit.plan import Measurement, MemoryBreakdown, Plan
from lightning_memfit.plugin import MemFit
from lightning_memfit.trace.timeline import Timeline

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
    "Plan",
    "PlanFileError",
    "StalePlanError",
    "Timeline",
    "TraceError",
    "UnsupportedError",
    "__version__",
    "detect_device",
    "forecast",
    "make_plan",
    "trace_step",
]
