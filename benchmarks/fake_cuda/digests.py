"""What steps under CUDA's rules allocate with the installed torch, to compare one version of torch with another.

python -m benchmarks.fake_cuda.digests write FILE      # the peak and a digest of the events of every case
python -m benchmarks.fake_cuda.digests compare FILE    # names the cases in which this version differs
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.fake_cuda.steps import CAPABILITY, all_cases, step_of
from lightning_memfit.trace.cuda_rules import CudaRules


def digests() -> dict[str, dict[str, Any]]:
    """By label of each case that steps over lists of tensors: its peak in bytes, and a digest of its events."""
    found = {}
    for case in all_cases():
        if case.stepping == "foreach":
            step = step_of(case, CudaRules(compute_capability=CAPABILITY), "cpu")
            text = json.dumps([step["residents"], step["events"]])
            found[case.label] = {"peak_bytes": _peak(step), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}
    return found


def _peak(step: dict[str, Any]) -> int:
    live = peak = sum(sum(sizes) for sizes in step["residents"].values())
    for _, op, *sizes in step["events"]:
        live += -sizes[0] if op == "free" else sum(sizes)
        peak = max(peak, live)
    return peak


def main(command: str, file: str) -> int:
    """Write the digests, or say which differ; the number of peaks that differ is the exit code."""
    here = {"torch": torch.__version__, "cases": digests()}
    if command == "write":
        Path(file).write_text(json.dumps(here, indent=1), encoding="utf-8")
        return 0
    other = json.loads(Path(file).read_text(encoding="utf-8"))
    differing = 0
    for label, one in other["cases"].items():
        two = here["cases"][label]
        if one["peak_bytes"] != two["peak_bytes"]:
            differing += 1
            print(f"{label}: peak {two['peak_bytes']} instead of {one['peak_bytes']}")
        elif one != two:
            print(f"{label}: the same peak by other events")
    print(f"torch {here['torch']} against {other['torch']}: {differing} of {len(other['cases'])} peaks differ")
    return min(differing, 1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
