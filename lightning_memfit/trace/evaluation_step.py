"""Evaluation steps followed on fakes: no gradients, no optimizer, and what they keep."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from lightning_memfit.trace.converted_fakes import fakes_in
from lightning_memfit.trace.device_rules import DeviceRules
from lightning_memfit.trace.fake_module import new_fake_mode
from lightning_memfit.trace.faked_step import (
    add_batch_residents,
    add_module_residents,
    fake_batches,
    faked_step,
    names_of,
    timeline_of,
)
from lightning_memfit.trace.step_program import users_code
from lightning_memfit.trace.timeline import Timeline
from lightning_memfit.trace.tracer import StepTracer


def trace_evaluation_steps(
    module: nn.Module,
    evaluate: Callable[[Any, int], Any],
    batch: Any,
    *,
    num_steps: int,
    prepare: Callable[[], Any] = lambda: None,
    step_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    collect_signatures: bool = True,
    floating: torch.dtype | None = None,
    rules: DeviceRules | None = None,
) -> Timeline:
    """Follow the first evaluation steps of an epoch, in eval mode and without gradients.

    Args:
        module: its tensors may be on the CPU or on ``meta``.
        evaluate: runs one step with a batch and its index, such as ``module.validation_step``.
        batch: one collated batch; every step gets it.
        num_steps: steps to follow.
        prepare: runs in front of the first one, such as ``module.on_validation_epoch_start``.
        step_context: context of a step, such as autocast.
        collect_signatures: keep the distinct operator calls for probing.
        floating: the module and the batch have this floating dtype, whatever they have now.
        rules: how the device computes; the CPU by default.

    Returns:
        A timeline whose residents are the module's tensors and the batch; gradients and optimizer states are in none.

    Raises:
        TraceError: if a step needs values, or raises for another reason.
    """
    fakes = fakes_in(new_fake_mode(), floating)
    tracer = StepTracer(names_of(module), collect_signatures=collect_signatures, rules=rules)
    with faked_step(module, fakes, tracer), torch.no_grad():
        tracer.phase = "evaluation"
        with tracer.not_recording():
            (faked,) = fake_batches(fakes, batch, batch, 1, floating)
            tracer.known.tell(fakes.pairs())
            module.eval()
            with users_code():
                prepare()
        add_module_residents(tracer, module)
        add_batch_residents(tracer, [faked])
        with tracer.following_modules():
            for index in range(num_steps):
                with users_code(), step_context():
                    evaluate(faked, index)
        tracer.stop_following()
        return timeline_of(tracer, list(module.parameters()))
