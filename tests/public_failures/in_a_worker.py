"""What becomes of fits inside a worker of a launcher, where processes can be started only in some ways.

As a program: in a daemonic process, of which Python lets nobody start another through ``multiprocessing``.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any

FITS = {
    "plain": {"memfit": False, "num_workers": 1},
    "memfit": {"memfit": True, "num_workers": 1},
    "plain, forked": {"memfit": False, "num_workers": 1, "multiprocessing_context": "fork"},
    "memfit, forked": {"memfit": True, "num_workers": 1, "multiprocessing_context": "fork"},
    "memfit, no workers": {"memfit": True, "num_workers": 0},
}
"""Loaders of the fits, and whether MemFit takes part."""


def fit(folder: Path, *, memfit: bool, **settings: Any) -> int:
    """Train one epoch, with operators probed for real; the number of optimizer steps."""
    import lightning
    import torch

    from tests.public_failures.network import Network, loader, quiet

    torch.set_num_threads(1)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        plugins=[quiet(micro_batch_size=16, cache_dir=folder / "cache")] if memfit else [],
    )  # fmt: skip
    trainer.fit(Network(), loader(64, **settings))
    return trainer.global_step


def write_outcomes(folder: Path) -> None:
    """The steps of every fit or the error that it raised, in ``outcomes.json``."""
    import psutil

    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, settings in FITS.items():
            try:
                found[name] = fit(folder, **settings)
            except Exception as error:
                found[name] = _first_words(error)
    children = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    found["children"] = [command for command in children if "tracker" not in command]  # those are Python's own
    (folder / "outcomes.json").write_text(json.dumps(found))


def _first_words(error: BaseException) -> str:
    """Of the error that came first: Lightning's own cleaning up may raise another one over it."""
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    worker = multiprocessing.get_context("fork").Process(target=write_outcomes, args=(Path(sys.argv[1]),), daemon=True)
    worker.start()
    worker.join()
    sys.exit(worker.exitcode)
