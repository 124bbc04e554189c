"""Every error MemFit raises on purpose, and the one place that recognises an out-of-memory error.

Each message has three parts: what (setting and value), how much (both numbers with units), what to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from lightning_memfit.plan import Forecast


class MemFitError(Exception):
    """Base class of everything MemFit raises on purpose."""


class ConfigurationError(MemFitError, ValueError):
    """A value given by the user cannot be used; the message names the value, the choices and a way out."""


class UnsupportedError(MemFitError, NotImplementedError):
    """A strategy, accelerator, loop or class that MemFit does not drive; raised before anything is changed."""


class BatchArithmeticError(ConfigurationError):
    """The effective batch cannot be formed exactly, or not be sliced as asked; the message names values that can."""


class BatchStructureError(ConfigurationError):
    """A batch cannot be divided along its batch dimension; ``split_batch=`` is the way out."""


class PlanFileError(ConfigurationError):
    """A plan in a file, a mapping or a checkpoint cannot be used; the message names where it is, the field and why."""


class CheckpointFormatError(ConfigurationError):
    """A checkpoint cannot go on in this run, for its layout or the format of its states; nothing was changed."""


class StalePlanError(ConfigurationError):
    """A plan was made for something else than this run; the message names what differs, as planned and as it is now.

    Attributes:
        reasons: one line for every difference.
    """

    def __init__(self, message: str, *, reasons: tuple[str, ...]) -> None:
        super().__init__(message)
        self.reasons = reasons

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its attributes: launchers of sweeps send errors between processes."""
        return partial(type(self), reasons=self.reasons), (str(self),)


class TraceError(MemFitError, RuntimeError):
    """One training step could not be traced without running it; the message carries the reason."""


class NoFeasiblePlanError(MemFitError, RuntimeError):
    """No plan fits the budget.

    Attributes:
        budget_bytes: what a plan might have used.
        best_peak_bytes: the smallest peak found, predicted or measured as the message says.
        missing_bytes: how much the best plan is above the budget.
        smallest: the forecast of the smallest plan found; ``None`` where none was made.
    """

    def __init__(
        self, message: str, *, budget_bytes: int, best_peak_bytes: int, smallest: Forecast | None = None
    ) -> None:
        super().__init__(message)
        self.smallest = smallest
        self.budget_bytes = budget_bytes
        self.best_peak_bytes = best_peak_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its attributes: launchers of sweeps send errors between processes."""
        attributes = {name: getattr(self, name) for name in ("budget_bytes", "best_peak_bytes", "smallest")}
        return partial(type(self), **attributes), (str(self),)

    @property
    def missing_bytes(self) -> int:
        """Bytes by which the best plan misses the budget (at least 0)."""
        return max(0, self.best_peak_bytes - self.budget_bytes)


class RankFailedError(MemFitError, RuntimeError):
    """Another process of the same run failed, or did not answer in time; this one ends because of it.

    Attributes:
        rank: which one; ``None`` where that is not known.
    """

    def __init__(self, message: str, *, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled with its attributes: launchers of sweeps send errors between processes."""
        return partial(type(self), rank=self.rank), (str(self),)


class RanksDisagreeError(ConfigurationError):
    """The processes of one run are not about to do the same; the message names the ranks and what each has."""


class SweepError(MemFitError, RuntimeError):
    """Jobs of a sweep failed; the message names them. Everything else of the sweep was done and written before."""


@contextmanager
def users_errors_as(kind: type[MemFitError], what: str = "") -> Iterator[None]:
    """What the user's code raises within this context becomes an error of MemFit, with the original as its cause.

    MemFit's own errors and those of memory pass through.

    Args:
        kind: the class of the error.
        what: what was called, such as ``"split_batch= raised "``; begins the message.
    """
    try:
        yield
    except MemFitError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise kind(f"{what}{type(error).__name__}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The beginning of what an error says, for a message about it."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else "no message"


_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "defaultcpuallocator: can't allocate memory",
    "defaultcpuallocator: not enough memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "cufft_alloc_failed",
    "curand_status_allocation_failed",
    "result_error_out_of_device_memory",
    "result_error_out_of_host_memory",
    "out_of_resources",
    "invalid buffer size",
    "could not create a primitive",
    "could not create a memory",
    "std::bad_alloc",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on a device or on the host.

    Texts as raised by torch's CPU allocator (``c10/core/impl/alloc_cpu.cpp``), by CUDA's libraries, by the runtimes of
    XPUs (``UR_``, ``ZE_`` and ``PI_`` codes), and by oneDNN where it finds no memory for the code or the scratch of an
    operator. oneDNN says the same of an operator that it does not
    have, which torch does not ask it for.

    Another rank's memory is not this one's: an error that quotes what happened there is none.
    """
    if isinstance(error, RankFailedError):
        return False
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error).lower() for text in _OUT_OF_MEMORY_TEXTS)
