"""What a job that went on without a plan left beside its results: ``no_fit.yaml``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_memfit.errors import PlanFileError
from lightning_memfit.plan_file import read_plain

NO_FIT_FILE = "no_fit.yaml"
"""Written where ``memfit.on_no_fit`` is ``"skip"`` or ``"value"``, and nothing fits."""


def read_no_fit(path: Path) -> dict[str, Any] | None:
    """What the file says: ``reason``, ``budget_bytes``, ``best_peak_bytes`` and ``missing_bytes``.

    Returns:
        ``None`` where it cannot be read; sizes that it does not tell are ``None``.
    """
    try:
        data = read_plain(path)
    except PlanFileError:
        return None
    if not isinstance(data, Mapping):
        return None
    sizes = {name: data.get(name) for name in ("budget_bytes", "best_peak_bytes", "missing_bytes")}
    reason = str(data.get("reason") or "no plan fits the budget").strip()
    return {
        "reason": reason.splitlines()[0],
        **{name: size if isinstance(size, int) else None for name, size in sizes.items()},
    }
