"""One training step per case, followed on fakes, as plain numbers that two ways to follow it are compared by.

``python -m benchmarks.fake_cuda.steps LIBRARY LABEL...`` prints one JSON object per label: the step on fake ``cuda``
tensors, after installing the idle device; without ``LIBRARY`` (``-``) on those of a real GPU.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from lightning_memfit.trace.device_rules import DeviceRules

Precision = Literal["32-true", "bf16-mixed", "16-mixed"]
Checkpointing = Literal["none", "blocks"]
Stepping = Literal["foreach", "fused", "8bit"]
CAPABILITY = (8, 0)


@dataclass(frozen=True)
class CudaCase:
    """A model of the zoo at one setting."""

    name: str
    """Key of ``MODELS``."""
    precision: Precision
    """In Lightning's words."""
    checkpointing: Checkpointing
    """Whether the repeated blocks are recomputed."""
    stepping: Stepping
    """AdamW over lists of tensors, fused, or with 8-bit states."""

    @property
    def label(self) -> str:
        """Such as ``"gpt bf16-mixed blocks fused"``."""
        return " ".join((self.name, self.precision, self.checkpointing, self.stepping))

    @classmethod
    def of(cls, label: str) -> CudaCase:
        """The case of a label."""
        return cls(*label.split())  # type: ignore[arg-type]


def all_cases() -> tuple[CudaCase, ...]:
    """Every model at every setting."""
    from benchmarks.zoo_models import MODELS

    settings = itertools.product(MODELS, get_args(Precision), get_args(Checkpointing), get_args(Stepping))
    return tuple(CudaCase(*setting) for setting in settings)


def step_of(case: CudaCase, rules: DeviceRules, autocast_device: str) -> dict[str, Any]:
    """What a step allocates: residents by category, and every operator and free in order.

    Returns:
        ``"residents"``: category to sizes in bytes; ``"events"``: for an operator its phase, name and the bytes of
        each storage it made, for a free its phase, ``"free"`` and the bytes; zero-sized storages are left out.
    """
    import torch

    from benchmarks.zoo import ZooCase, build
    from lightning_memfit.applied_in_a_trace import checkpointed
    from lightning_memfit.search.checkpointing import find_repeated_blocks
    from lightning_memfit.trace.training_step import program_of, trace_window

    module, batch = build(ZooCase(case.name, "32-true", "none", "adamw"))

    def context() -> AbstractContextManager[Any]:
        if case.precision == "32-true":
            return nullcontext()
        dtype = torch.bfloat16 if case.precision == "bf16-mixed" else torch.float16
        return torch.autocast(autocast_device, dtype=dtype, cache_enabled=False)

    program = program_of(module, optimizer=lambda parameters: _optimizer(module, case), step_context=context)
    blocks = find_repeated_blocks(module) if case.checkpointing == "blocks" else ()
    with checkpointed(module, blocks), _no_warning_by_index(module):
        timeline = trace_window(replace(program, rules=rules), batch, collect_signatures=False)
    residents: dict[str, list[int]] = {}
    sizes: dict[int, int] = {}
    for resident in timeline.residents:
        sizes[resident.storage] = resident.allocated_bytes
        residents.setdefault(resident.category, []).append(resident.allocated_bytes)
    return {"label": case.label, "residents": residents, "events": list(_events(timeline, sizes))}


def _no_warning_by_index(module: nn.Module) -> AbstractContextManager[Any]:
    """Transformers looks at ``input_ids[:, [-1, 0]]``: a list of indices becomes a tensor that fakes do not see."""
    from unittest import mock

    if not any(type(each).__module__.startswith("transformers.") for each in module.modules()):
        return nullcontext()
    from transformers import PreTrainedModel

    return mock.patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask")


def _events(timeline: Any, sizes: dict[int, int]) -> Iterator[list[Any]]:
    from lightning_memfit.trace.timeline import Free

    for event in timeline.events:
        if isinstance(event, Free):
            if sizes.get(event.storage):
                yield [event.phase, "free", sizes[event.storage]]
            continue
        sizes.update({output.storage: output.allocated_bytes for output in event.outputs})
        made = [output.allocated_bytes for output in event.outputs if output.allocated_bytes]
        if made:
            yield [event.phase, event.op, *made]


def _optimizer(module: nn.Module, case: CudaCase) -> Optimizer:
    import torch

    if case.stepping == "8bit":
        from lightning_memfit.apply.quantised_states import quantise

        return quantise(torch.optim.AdamW(module.parameters(), lr=1e-3), module)
    if case.stepping == "fused":
        return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    return torch.optim.AdamW(module.parameters(), lr=1e-3)  # which takes lists of tensors on CUDA by itself


def main(library: str, labels: list[str]) -> None:
    """Print the steps of the labelled cases on fake ``cuda`` tensors."""
    capability = CAPABILITY
    if library == "-":
        import torch

        capability = torch.cuda.get_device_capability()
    else:
        from benchmarks.fake_cuda.install import install

        install(Path(library))
    from benchmarks.fake_cuda.rules import FakeCudaRules

    for label in labels:
        print(json.dumps(step_of(CudaCase.of(label), FakeCudaRules(compute_capability=capability), "cuda")), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
