"""Trains a model inside a memory budget. Overrides as in Hydra: ``python scripts/train.py memfit.budget=56MiB``.

A sweep: ``python scripts/train.py -m memfit.effective_batch_size=8,16 model.num_layers=4,6``.
Exit code 0: trained. 2: MemFit refused, and the message says by how much and what would help. 1: any other error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lightning_memfit.cli.hydra_app import run_hydra_app
from lightning_memfit.cli.training import train
from lightning_memfit.errors import MemFitError, SweepError

FAILED, REFUSED = 1, 2
"""Exit codes if jobs of a sweep failed, and if MemFit refuses."""
CONF = Path(__file__).resolve().parents[1] / "conf"


def main() -> None:
    """Hand over to Hydra."""
    try:
        run_hydra_app(train, folder=CONF, name="config", words=sys.argv[1:], program=sys.argv[0])
    except MemFitError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        # Jobs of a sweep failed for reasons of their own.
        raise SystemExit(FAILED if isinstance(error, SweepError) else REFUSED) from None


if __name__ == "__main__":
    main()
