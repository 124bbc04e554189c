"""The emulation of CUDA on fakes of the CPU, held to fakes of ``cuda`` on the real device or beside an idle one."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.allocator.budget_allocator import build_allocator
from benchmarks.child_process import stream_child
from benchmarks.fake_cuda import steps
from benchmarks.fake_cuda.steps import CAPABILITY, CudaCase, all_cases, step_of
from lightning_memfit.trace.cuda_rules import CudaRules

_OF_TRANSFORMERS = ("llama", "bert_hf", "t5", "gpt2")


def cases_here(names: list[str]) -> list[CudaCase]:
    """The cases that the installed libraries allow, every model once before any of them a second time."""
    has_8bit = importlib.util.find_spec("bitsandbytes") is not None
    has_transformers = importlib.util.find_spec("transformers") is not None
    allowed = [
        case
        for case in all_cases()
        if (has_8bit or case.stepping != "8bit")
        and (has_transformers or case.name not in _OF_TRANSFORMERS)
        and (not names or case.name in names)
    ]
    models = list(dict.fromkeys(case.name for case in allowed))
    per_model = {name: [case for case in allowed if case.name == name] for name in models}
    # Each model begins at another setting, and goes through all of them in steps that have no divisor in common.
    turns = [
        per_model[name][(5 * turn + 2 * place) % len(per_model[name])]
        for turn in range(max(map(len, per_model.values()), default=0))
        for place, name in enumerate(models)
    ]
    return list(dict.fromkeys(turns))


def compared(cases: list[CudaCase], device: str) -> Iterator[dict[str, Any]]:
    """Follow every case both ways; the reference runs in a process of its own."""
    on_gpu = device == "cuda"
    capability = torch.cuda.get_device_capability() if on_gpu else CAPABILITY
    library = "-" if on_gpu else str(build_allocator(source=Path(steps.__file__).with_name("fake_cuda.cpp")))
    for real in stream_child("benchmarks.fake_cuda.steps", [library, *(case.label for case in cases)]):
        case = CudaCase.of(real["label"])
        emulated = json.loads(json.dumps(step_of(case, CudaRules(compute_capability=capability), "cpu")))
        yield {"label": case.label, "equal": emulated == real, "difference": difference(emulated, real)}


def difference(emulated: dict[str, Any], real: dict[str, Any]) -> str | None:
    """The first difference in words; ``None`` if there is none."""
    if emulated == real:
        return None
    for category in sorted({*emulated["residents"], *real["residents"]}):
        mine, theirs = emulated["residents"].get(category), real["residents"].get(category)
        if mine != theirs:
            return f"{category}: {str(mine)[:200]} instead of {str(theirs)[:200]}"
    pairs = enumerate(zip(emulated["events"], real["events"], strict=False))
    return next(
        (f"event {place}: {mine} instead of {theirs}" for place, (mine, theirs) in pairs if mine != theirs),
        f"{len(emulated['events'])} events instead of {len(real['events'])}",
    )
