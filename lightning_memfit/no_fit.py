"""What a run leaves that does not fit where that is a result and not an error: ``on_no_fit="skip"`` and ``"value"``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lightning_memfit.errors import NoFeasiblePlanError, PlanFileError
from lightning_memfit.plan_file import plain_data, read_plain

NO_FIT_FILE = "no_fit.yaml"
"""What a run that does not fit writes where others write their plan."""
SCHEMA_VERSION = 1
_LISTENER: ContextVar[list[NoFit] | None] = ContextVar("no_fits_heard", default=None)


@dataclass(frozen=True, kw_only=True)
class NoFit:
    """Why a run was not trained, and by how many bytes it missed."""

    reason: str
    """What was tried, what is missing and what would help; several lines."""
    budget_bytes: int
    """What a plan might have used."""
    best_peak_bytes: int
    """The smallest peak found, predicted or measured as the reason says."""
    missing_bytes: int
    """By how much that one is above the budget."""
    smallest: str | None = None
    """The setting of the levers that needs least, in words; ``None`` where none was found."""


@contextmanager
def no_fits_heard() -> Iterator[list[NoFit]]:
    """Within it, every run that ends without a plan is added to the list, wherever it leaves its record."""
    heard: list[NoFit] = []
    token = _LISTENER.set(heard)
    try:
        yield heard
    finally:
        _LISTENER.reset(token)


def tell_no_fit(no_fit: NoFit) -> None:
    """Say that a run ends without a plan, and that this is a result."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.append(no_fit)


def tell_fits() -> None:
    """Say that a run has a plan and trains; of several runs in one job the last one counts."""
    listener = _LISTENER.get()
    if listener is not None:
        listener.clear()


def no_fit_of(error: NoFeasiblePlanError) -> NoFit:
    """What an error says, as plain values: nothing of the run is kept alive by it."""
    return NoFit(
        reason=str(error),
        budget_bytes=error.budget_bytes,
        best_peak_bytes=error.best_peak_bytes,
        missing_bytes=error.missing_bytes,
        smallest=None if error.smallest is None else error.smallest.candidate.label,
    )


def no_fit_record(no_fit: NoFit) -> dict[str, Any]:
    """What :data:`NO_FIT_FILE` holds."""
    written_at = datetime.now(UTC).isoformat(timespec="seconds")
    return {"schema_version": SCHEMA_VERSION, **plain_data(no_fit), "written_at": written_at}


def load_no_fit(path: str | Path) -> NoFit:
    """Read a :data:`NO_FIT_FILE`.

    Raises:
        PlanFileError: naming the path and the reason, if it is none.
    """
    data = read_plain(Path(path))
    if not isinstance(data, Mapping) or data.get("schema_version") != SCHEMA_VERSION:
        raise PlanFileError(f"{path} is no record of a run that does not fit: schema_version is not {SCHEMA_VERSION}.")
    kinds = {"reason": str, "budget_bytes": int, "best_peak_bytes": int, "missing_bytes": int}
    for name, kind in kinds.items():
        if type(data.get(name)) is not kind:
            raise PlanFileError(f"{path} is no record of a run that does not fit: {name} is {data.get(name)!r}.")
    smallest = data.get("smallest")
    return NoFit(**{name: data[name] for name in kinds}, smallest=smallest if isinstance(smallest, str) else None)
