"""What a gradient scaler adds to a step: the scaled loss, and gradients that are unscaled in place before clipping.

Source: ``torch/amp/grad_scaler.py`` (``scale``, ``_unscale_grads_``, ``_lazy_init_scale_growth_tracker``), torch 2.13;
``lightning/pytorch/plugins/precision/amp.py``, 2.6: scaled in front of the backward, unscaled after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.optim import Optimizer

from lightning_memfit.trace.step_program import StepProgram

_SCALE = 65536.0


def with_scaled_loss(program: StepProgram) -> StepProgram:
    """The same step with a gradient scaler, for optimizers that do not unscale by themselves."""
    scaler = _Scaler(program.clip_gradients)
    return replace(program, scale_loss=scaler.scale, clip_gradients=scaler.unscale_and_clip)


class _Scaler:
    def __init__(self, clip: Callable[[Optimizer], None]) -> None:
        self._clip = clip

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss times the scale; the scale itself is two numbers, made when it is first needed."""
        scale = torch.full((), _SCALE, dtype=torch.float32, device=loss.device)
        return loss * scale

    def unscale_and_clip(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of each dtype together, then clip, then grow or shrink the scale."""
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not getattr(optimizer, "_step_supports_amp_scaling", False) and gradients:
            device = gradients[0].device
            scale = torch.full((), _SCALE, dtype=torch.float32, device=device)
            found = torch.full((), 0.0, dtype=torch.float32, device=device)
            inverse = scale.double().reciprocal().float()
            for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
                same = [gradient for gradient in gradients if gradient.dtype is dtype]
                torch._amp_foreach_non_finite_check_and_unscale_(same, found, inverse)
        self._clip(optimizer)
