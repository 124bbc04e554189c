"""One rank of real ZeRO runs: trains each case for some optimizer steps and prints what the allocator counted.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m benchmarks.accuracy_ranks_zero_case --library PATH ...

Started by ``benchmarks.accuracy_ranks_zero``, once for each rank, on gloo and the CPU. Prints one JSON object a case.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.allocator.budget_allocator import BudgetAllocator
from benchmarks.zoo_models.attention import GPT
from benchmarks.zoo_models.feed_forward import MLP
from benchmarks.zoo_models.workload import Batch, Workload
from lightning_memfit.apply.activation_checkpointing import checkpoint_modules
from lightning_memfit.sharding import ZeroStage

OPTIMIZER_STEPS = 17
"""From the third forward on stage 3 knows the order of modules."""
_STEADY_STEPS = 14

Precision = Literal["32-true", "bf16-true"]


@dataclass(frozen=True, kw_only=True)
class ZeroCase:
    """One model at one setting of DeepSpeed."""

    model: str
    """Key of ``MODELS``."""
    stage: ZeroStage
    """Of ZeRO."""
    ranks: int = 2
    """Over which it is spread."""
    precision: Precision = "bf16-true"
    """``bf16-mixed`` is the same to DeepSpeed: parameters in 16 bits, master weights in 32."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum."""
    bucket: int | None = None
    """Elements of gradients reduced at once; ``None`` for DeepSpeed's default of 5e8."""
    overlaps: bool = False
    """Whether gradients are reduced while the backward goes on."""
    slices: int = 1
    """Forwards and backwards in an optimizer step."""
    offloads: bool = False
    """Whether the optimizer and its states are on the host."""
    parameters_too: bool = False
    """Stage 3: whether the shares of parameters are there too."""
    recomputes: bool = False
    """Whether blocks of the network are recomputed in the backward."""
    groups: int = 1
    """Parameter groups: one, or weights and the rest."""
    frozen: bool = False
    """Whether the first parameter is not trained."""
    persistence: int | None = None
    """Stage 3: largest parameter that is held whole, in elements; ``None`` for the default of 1e5."""
    prefetch: int | None = None
    """Stage 3: elements fetched ahead; ``None`` for the default of 5e7."""
    reuse: int | None = None
    """Stage 3: elements within which a parameter is kept for its next use; ``None`` for the default of 1e9."""

    @property
    def label(self) -> str:
        """Such as ``"gpt stage 2 bf16-true adamw bucket 1e+05"``."""
        more = {
            "1 rank": self.ranks == 1,
            "overlap": self.overlaps,
            f"{self.slices} slices": self.slices > 1,
            "offload": self.offloads and not self.parameters_too,
            "offload parameters": self.parameters_too,
            "recomputed": self.recomputes,
            f"{self.groups} groups": self.groups > 1,
            "frozen": self.frozen,
            f"persistence {self.persistence}": self.persistence is not None,
            f"prefetch {self.prefetch}": self.prefetch is not None,
            f"reuse {self.reuse}": self.reuse is not None,
        }
        bucket = "default" if self.bucket is None else f"{self.bucket:.0e}"
        words = [name for name, holds in more.items() if holds]
        return " ".join([self.model, f"stage {self.stage}", self.precision, self.optimizer, f"bucket {bucket}", *words])

    @property
    def config(self) -> dict[str, Any]:
        """DeepSpeed's configuration."""
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.overlaps}
        options = {
            "reduce_bucket_size": self.bucket,
            "stage3_param_persistence_threshold": self.persistence,
            "stage3_prefetch_bucket_size": self.prefetch,
            "stage3_max_reuse_distance": self.reuse,
        }
        zero |= {name: value for name, value in options.items() if value is not None}
        if self.offloads:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.parameters_too:
            zero["offload_param"] = {"device": "cpu"}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": zero,
            **({"bf16": {"enabled": True}} if self.precision == "bf16-true" else {}),
        }


class TrainedModule(nn.Module):
    """A network with its loss: what the engine calls."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.network = workload.network
        self.loss = workload.loss

    def forward(self, batch: Batch) -> Tensor:
        """The mean loss of the batch."""
        return self.loss(self.network, batch)


def _mlp() -> Workload:
    return Workload(network=MLP(), batch={"inputs": torch.randn(512, 256), "targets": torch.randint(10, (512,))})


def _odd() -> Workload:
    """No size is a multiple of two ranks, or of four elements."""
    network = MLP(features=101, width=517, depth=3, classes=7)
    return Workload(network=network, batch={"inputs": torch.randn(96, 101), "targets": torch.randint(7, (96,))})


def _gpt() -> Workload:
    ids = torch.randint(4096, (4, 129))
    return Workload(network=GPT(), batch={"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()})


MODELS: dict[str, Callable[[], Workload]] = {"mlp": _mlp, "odd": _odd, "gpt": _gpt}


def build(case: ZeroCase) -> tuple[TrainedModule, list[Batch]]:
    """The module and the slices of its batch, the same for every call and rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        workload = MODELS[case.model]()
    module = TrainedModule(workload)
    if case.frozen:
        next(module.parameters()).requires_grad_(False)
    if case.recomputes:
        blocks = dict(workload.network.named_children())["blocks"]
        checkpoint_modules(workload.network, [f"blocks.{name}" for name, _ in blocks.named_children()])
    parts = {name: tensor.tensor_split(case.slices) for name, tensor in workload.batch.items()}
    return module, [{name: each[index] for name, each in parts.items()} for index in range(case.slices)]


def make_optimizer(case: ZeroCase, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a case over its groups."""
    all_of_them = list(parameters)
    groups: list[dict[str, Any]] = [{"params": all_of_them}]
    if case.groups == 2:
        groups = [
            {"params": [each for each in all_of_them if each.dim() > 1]},
            {"params": [each for each in all_of_them if each.dim() <= 1], "weight_decay": 0.0},
        ]
    if case.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=1e-3)
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def measure(case: ZeroCase, allocator: BudgetAllocator) -> dict[str, Any]:
    """Train a case, and tell the peaks of an optimizer step above what was alive before it was built.

    gloo's threads give back what they worked on somewhat late, sometimes: of the last steps the lowest peak is told.
    """
    import deepspeed

    linear = nn.functional.linear  # stage 3 exchanges it for the whole process
    gc.collect()
    before, known = allocator.live_bytes, _storages()
    module, slices = build(case)
    if case.precision == "bf16-true":
        slices = [{name: _in_16_bits(tensor) for name, tensor in part.items()} for part in slices]
    optimizer = make_optimizer(case, module.parameters())
    trained = [each for each in module.parameters() if each.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=module, optimizer=optimizer, config=case.config, model_parameters=trained, dist_init_required=False
    )
    steps: list[dict[str, int]] = []
    rest = 0
    for _ in range(OPTIMIZER_STEPS):
        phases: dict[str, int] = {}
        steps.append(phases)
        gc.collect()
        rest = allocator.live_bytes - before
        for index, part in enumerate(slices):
            engine.set_gradient_accumulation_boundary(index + 1 == len(slices))
            with _peak_in(phases, "forward", allocator, before):
                loss = engine(part)
            with _peak_in(phases, "backward", allocator, before):
                engine.backward(loss, scale_wrt_gas=False)
            del loss
        with _peak_in(phases, "optimizer_step", allocator, before):
            engine.step()
    rank = engine.global_rank
    engine.destroy()
    del engine, module, optimizer, trained, slices, part
    _drop_storages(known)
    nn.functional.linear = linear
    steady = steps[-_STEADY_STEPS:]
    lowest = {name: min(each[name] for each in steady) for name in steady[-1]}
    left = allocator.live_bytes - before
    return {"label": case.label, "rank": rank, "at_rest_bytes": rest, "left_bytes": left, "by_phase": lowest}


class _peak_in:  # reads as a statement
    """Keeps the highest point of a ``with`` block under a phase's name."""

    def __init__(self, phases: dict[str, int], name: str, allocator: BudgetAllocator, before: int) -> None:
        self._phases, self._name, self._allocator, self._before = phases, name, allocator, before

    def __enter__(self) -> None:
        self._allocator.reset_peak()

    def __exit__(self, *error: object) -> None:
        peak = self._allocator.peak_bytes - self._before
        self._phases[self._name] = max(self._phases.get(self._name, 0), peak)


def _in_16_bits(tensor: Tensor) -> Tensor:
    return tensor.bfloat16() if tensor.is_floating_point() else tensor


def _tensors() -> list[Tensor]:
    return [each for each in gc.get_objects() if isinstance(each, Tensor)]


def _storages() -> set[int]:
    return {each.untyped_storage()._cdata for each in _tensors()}


def _drop_storages(known: set[int]) -> None:
    """Give back the memory of everything that is new: engines are held by hooks and tables of DeepSpeed."""
    gc.collect()
    for tensor in _tensors():
        if tensor.untyped_storage()._cdata not in known:
            if tensor.is_leaf:
                tensor.grad = None
            tensor.untyped_storage().resize_(0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--library", type=Path, required=True, help="the built allocator")
    parser.add_argument("cases", help="a JSON list of cases")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    allocator = BudgetAllocator(chosen.library)
    allocator.install()
    import deepspeed

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo reduces: nothing is compiled
    deepspeed.init_distributed("gloo")
    for fields in json.loads(chosen.cases):
        print(json.dumps(measure(ZeroCase(**fields), allocator)), flush=True)


def as_arguments(cases: Sequence[ZeroCase]) -> str:
    """What ``main`` takes for cases."""
    return json.dumps([asdict(case) for case in cases])


if __name__ == "__main__":
    main()
