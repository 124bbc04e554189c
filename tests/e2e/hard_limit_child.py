"""Trains the demo's model on the demo's batch under a hard limit; a process of its own, since limits cannot be lifted.

    python tests/e2e/hard_limit_child.py (plain|memfit) (allocator|rlimit) BYTES [LIBRARY]

Prints one line of JSON: whether it trained, the error otherwise, and the plan. With ``allocator`` the model, the batch
and the steps may take ``BYTES`` of the counting allocator. With ``rlimit``, ``RLIMIT_DATA`` is set to
what the process has now, what the plan may use, and ``BYTES`` beside torch's blocks.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything

from benchmarks.allocator.budget_allocator import BudgetAllocator
from lightning_memfit import MemFit, make_plan
from lightning_memfit.config import register_configs

CONF = Path(__file__).parents[2] / "conf"


def data_segment_bytes() -> int:
    """What ``RLIMIT_DATA`` counts, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmData")


def limit(how: str, size: int, library: str) -> None:
    """Let nothing beyond what is held now and ``size`` bytes be allocated from here on."""
    if how == "allocator":
        allocator = BudgetAllocator(Path(library))
        allocator.set_limit(allocator.live_bytes + size)
    else:
        total = data_segment_bytes() + size
        resource.setrlimit(resource.RLIMIT_DATA, (total, total))


def planned_budget_bytes(config: Any, loader: Any) -> int:
    """What the plan of this job may use."""
    plan = make_plan(
        instantiate(config.model),
        next(iter(loader)),
        effective_batch_size=config.memfit.effective_batch_size,
        optimizer=torch.optim.AdamW,  # the module's own asks its Trainer for the length of its schedule
        budget=config.memfit.budget,
        probe_operators=False,
    )
    return plan.budget.budget_bytes


def main(mode: str, how: str, size: int, library: str = "") -> dict[str, Any]:
    """Train two optimizer steps and one validation batch; what happened."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if how == "allocator":
        BudgetAllocator(Path(library)).install()
    register_configs()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", overrides=["data.max_bytes=524288"])
    seed_everything(1, verbose=False)
    data = instantiate(config.data)
    data.prepare_data()
    data.setup("fit")
    loaders = data.train_dataloader(), data.val_dataloader()
    memfit = [MemFit(config.memfit.effective_batch_size, budget=config.memfit.budget, verbose=False, cache_dir=None)]
    torch.ones(8, requires_grad=True).sum().backward()  # what torch itself takes once, before the limit
    if how == "rlimit":
        size += planned_budget_bytes(config, loaders[0])
    limit(how, size, library)
    trainer = Trainer(
        accelerator="cpu", max_steps=2, limit_val_batches=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, barebones=False,
        plugins=memfit if mode == "memfit" else [],
    )  # fmt: skip
    try:
        trainer.fit(instantiate(config.model), *loaders)
    except (RuntimeError, MemoryError) as error:
        return {"trained": False, "error": type(error).__name__, "message": str(error)[:200]}
    plan = memfit[0].plan
    return {
        "trained": trainer.global_step == 2,
        "plan": None if plan is None else plan.candidate.label,
        "predicted": None if plan is None else plan.forecast.memory.peak_allocated_bytes,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), *sys.argv[4:])), flush=True)
