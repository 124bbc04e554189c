"""How the models of this package are optimized: AdamW that decays matrices only, and a warmed-up cosine."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR


def warmed_up_cosine(step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Factor of the learning rate at ``step``: up in a line, then down to a tenth along a cosine.

    Source: Loshchilov and Hutter, SGDR (arXiv 1608.03983), equation 5, with one period.

    >>> [warmed_up_cosine(step, warmup_steps=2, total_steps=4) for step in range(5)]
    [0.5, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
    return 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2


def schedule_steps(warmup_steps: int, total_steps: float) -> tuple[int, int]:
    """Steps of the warm-up and of the run, as whole numbers; the warm-up takes at most half of a short run.

    A run without an end never reaches the foot of a cosine; any large number says the same.

    >>> schedule_steps(20, 250.0), schedule_steps(20, 4.0)
    ((20, 250), (2, 4))
    """
    steps = int(total_steps) if math.isfinite(total_steps) else 10**9
    return min(warmup_steps, max(1, steps // 2)), steps


def adamw(module: nn.Module, *, learning_rate: float, weight_decay: float) -> AdamW:
    """AdamW that decays matrices only.

    Args:
        module: the owner of the parameters.
        learning_rate: highest learning rate, per optimizer step.
        weight_decay: decoupled decay of weights of two or more dimensions; gains and biases have none.
    """
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


def adamw_with_schedule(
    module: nn.Module, *, learning_rate: float, weight_decay: float, warmup_steps: int, total_steps: float
) -> OptimizerLRSchedulerConfig:
    """AdamW that decays matrices only, and a schedule that moves once per optimizer step.

    Args:
        module: the owner of the parameters.
        learning_rate: highest learning rate, per optimizer step.
        weight_decay: decoupled decay of weights of two or more dimensions; gains and biases have none.
        warmup_steps: optimizer steps until the highest learning rate.
        total_steps: optimizer steps of the whole run; infinite for a run without an end, which keeps the rate high.
    """
    optimizer = adamw(module, learning_rate=learning_rate, weight_decay=weight_decay)
    warmup, total = schedule_steps(warmup_steps, total_steps)
    factor = partial(warmed_up_cosine, warmup_steps=warmup, total_steps=total)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}
