"""The formulas for what CUDA operators take inside, as a page.

python -m benchmarks.cuda_formulas docs/cuda-temporaries.md
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_memfit.predict.cuda_temporaries import describe_formulas

_HEADING = """# What CUDA operators take inside

A trace sees the outputs of operators, not what they allocate and give back before they return. For a GPU that is not
here these formulas tell it, and on one that is here they stand for the calls that could not be run;
`predict/cuda_temporaries/` has each with its derivation, and `tests/predict/test_cuda_temporaries.py` works them out by
hand. None was measured on a GPU: they are read from the sources named. Forecasts take the lower end of an interval.

Made by `python -m benchmarks.cuda_formulas docs/cuda-temporaries.md`.

| operators | formula | | source | read from |
|---|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    lines = []
    for row in describe_formulas():
        names = ", ".join(f"`{name}`" for name in row.operators)
        lines.append(" | ".join((f"| {names}", row.formula, row.kind, row.source, f"{row.versions} |")))
    return _HEADING + "\n".join(line.replace("\n", " ") for line in lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
