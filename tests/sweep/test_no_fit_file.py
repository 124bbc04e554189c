"""What is read of ``no_fit.yaml``."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_memfit.sweep.no_fit_file import read_no_fit


def test_reason_and_sizes_are_read_and_what_is_not_told_is_none(tmp_path: Path) -> None:
    path = tmp_path / "no_fit.yaml"
    path.write_text("reason: too large\nbudget_bytes: 10\nmissing_bytes: many\nsmallest: undivided batch\n")
    assert read_no_fit(path) == {
        "reason": "too large", "budget_bytes": 10, "best_peak_bytes": None, "missing_bytes": None,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "[1, 2]", "a: &x 1\nb: *x", "{"])
def test_what_cannot_be_read_says_nothing(tmp_path: Path, text: str) -> None:
    path = tmp_path / "no_fit.yaml"
    path.write_text(text)
    assert read_no_fit(path) is None
    assert read_no_fit(tmp_path / "nowhere") is None
