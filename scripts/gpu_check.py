"""Holds predictions to measurements on one GPU in less than six minutes, and writes JSON.

    python scripts/gpu_check.py --out gpu_check.json
    python scripts/gpu_check.py --device cpu --seconds 60     # the same, small: shows that the check itself works

Needs torch 2.11 or later, Lightning, and this source tree; without bitsandbytes, transformers and nvidia-ml-py their
parts are left out.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main(arguments: list[str] | None = None) -> int:
    """Run the check; 1 if a section failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seconds", type=float, default=330.0, help="the most that all sections may take together")
    parser.add_argument("--out", type=Path, help="where the JSON is written, after every section")
    parser.add_argument("--models", default="", help="only these models, separated by commas")
    parser.add_argument("--sections", default="", help="only these sections, separated by commas")
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    from benchmarks.gpu_check.run import Check

    check = Check(device=chosen.device, seconds=chosen.seconds, out=chosen.out, models=_listed(chosen.models))
    report = check.run(_listed(chosen.sections))
    for name, section in report["sections"].items():
        words = section.get("error", "")
        print(f"{name:12} {section['status']:12} {section['seconds']:6.1f} s  {len(section['rows']):4} rows  {words}")
    if chosen.out is None:
        print(json.dumps(report, default=str))
    return int(any(section["status"] == "failed" for section in report["sections"].values()))


def _listed(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


if __name__ == "__main__":
    sys.exit(main())
