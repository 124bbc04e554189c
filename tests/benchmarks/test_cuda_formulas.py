"""The page of formulas is what the formulas say. Run: ``pytest tests/benchmarks/test_cuda_formulas.py``."""

from __future__ import annotations

from pathlib import Path

from benchmarks.cuda_formulas import page

_PAGE = Path(__file__).parents[2] / "docs/cuda-temporaries.md"


def test_the_page_is_up_to_date() -> None:
    assert _PAGE.read_text(encoding="utf-8") == page(), "python -m benchmarks.cuda_formulas docs/cuda-temporaries.md"
