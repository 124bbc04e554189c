"""The cases that predictions for several ranks are checked against: small models for which exchange fills memory.

Everything is seeded: the same case is the same weights and the same batch on every rank. What an engine does to a
module, and what is predicted for it, stands in ``ENGINES``; a case of another engine needs an entry there and no more.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from benchmarks.zoo_models.attention import GPT
from benchmarks.zoo_models.feed_forward import MLP
from benchmarks.zoo_models.workload import Batch, Workload
from lightning_memfit.applied_in_a_trace import autocast_context
from lightning_memfit.batch_tree import split_by_sizes
from lightning_memfit.search.checkpointing import find_repeated_blocks
from lightning_memfit.sharding import Engine, PolicyDtype, Sharding
from lightning_memfit.trace.training_step import StepProgram, program_of

OptimizerName = Literal["adamw", "sgd"]
Policy = tuple[PolicyDtype, PolicyDtype]


def _gpt() -> Workload:
    """Few tokens for many weights, embeddings tied to the output layer: the root group is the largest."""
    ids = torch.randint(1021, (6, 64))
    return Workload(network=GPT(vocabulary=1021, depth=4), batch={"ids": ids, "targets": ids.roll(-1, 1)})


def _deep() -> Workload:
    """Equal blocks and a small root: what two blocks take at once decides."""
    rows, targets = torch.randn(12, 64), torch.randint(10, (12,))
    return Workload(network=MLP(features=64, width=384, depth=8), batch={"inputs": rows, "targets": targets})


def _odd() -> Workload:
    """Sizes that no number of ranks divides, so that shards are filled up."""
    rows, targets = torch.randn(12, 257), torch.randint(11, (12,))
    return Workload(
        network=MLP(features=257, width=307, depth=4, classes=11), batch={"inputs": rows, "targets": targets}
    )


def _activations() -> Workload:
    """Many tokens: activations outweigh what is exchanged."""
    ids = torch.randint(2048, (6, 128))
    return Workload(network=GPT(vocabulary=2048, depth=3), batch={"ids": ids, "targets": ids.roll(-1, 1)})


MODELS: Mapping[str, Callable[[], Workload]] = {"gpt": _gpt, "deep": _deep, "odd": _odd, "activations": _activations}
"""By the name in a case's label."""


@dataclass(frozen=True, kw_only=True)
class RankCase:
    """One model at one setting, spread over several ranks."""

    engine: Engine
    """Who spreads it."""
    model: str
    """Key of :data:`MODELS`."""
    ranks: int = 2
    """Processes, all on this machine."""
    precision: Literal["32-true", "bf16-mixed"] = "32-true"
    """In Lightning's words."""
    optimizer: OptimizerName = "adamw"
    """AdamW, or SGD with momentum 0.9."""
    slices: int = 1
    """Slices of one rank's batch."""
    accumulate: int = 1
    """Batches per optimizer step."""
    recomputed: bool = False
    """Whether the repeated blocks are recomputed."""
    setting: str = ""
    """What the engine is told beside; its words are the engine's."""
    policy: Policy | None = None
    """FSDP2: the dtypes of its ``MixedPrecisionPolicy``, computing and reducing."""

    @property
    def label(self) -> str:
        """Such as ``"fsdp2 gpt 2 ranks 32-true adamw 1x1 saved"``, with the engine's setting behind it."""
        window = f"{self.accumulate}x{self.slices}"
        kept = "recomputed" if self.recomputed else "saved"
        precision = self.precision if self.policy is None else f"policy {'/'.join(self.policy)}"
        parts = (self.engine, self.model, f"{self.ranks} ranks", precision, self.optimizer, window, kept)
        return " ".join((*parts, self.setting)).strip()


BF16: Policy = ("bfloat16", "bfloat16")
SUMS_IN_32: Policy = ("bfloat16", "float32")

FSDP2_CASES = (
    RankCase(engine="fsdp2", model="gpt"),
    RankCase(engine="fsdp2", model="gpt", setting="kept after forward"),
    RankCase(engine="fsdp2", model="gpt", optimizer="sgd", slices=3),
    RankCase(engine="fsdp2", model="gpt", optimizer="sgd", slices=3, setting="exchanged once"),
    RankCase(engine="fsdp2", model="gpt", slices=3, accumulate=2, recomputed=True),
    RankCase(engine="fsdp2", model="gpt", precision="bf16-mixed"),
    RankCase(engine="fsdp2", model="gpt", precision="bf16-mixed", optimizer="sgd", slices=3, recomputed=True),
    RankCase(engine="fsdp2", model="gpt", policy=SUMS_IN_32, slices=3),
    RankCase(engine="fsdp2", model="gpt", policy=SUMS_IN_32, optimizer="sgd", slices=3, setting="exchanged once"),
    RankCase(engine="fsdp2", model="gpt", policy=BF16, optimizer="sgd", slices=3, recomputed=True),
    RankCase(engine="fsdp2", model="gpt", ranks=3),
    RankCase(engine="fsdp2", model="deep"),
    RankCase(engine="fsdp2", model="deep", optimizer="sgd", setting="kept after forward"),
    RankCase(engine="fsdp2", model="deep", recomputed=True, accumulate=2),
    RankCase(engine="fsdp2", model="deep", optimizer="sgd", slices=3, setting="exchanged once"),
    RankCase(engine="fsdp2", model="odd"),
    RankCase(engine="fsdp2", model="odd", optimizer="sgd", slices=3),
    RankCase(engine="fsdp2", model="odd", ranks=3, optimizer="sgd"),
    RankCase(engine="fsdp2", model="odd", ranks=3, policy=SUMS_IN_32, optimizer="sgd"),
    RankCase(engine="fsdp2", model="deep", policy=BF16, optimizer="sgd", setting="kept after forward"),
    RankCase(engine="fsdp2", model="activations"),
    RankCase(engine="fsdp2", model="activations", recomputed=True, slices=3),
)

ALL_CASES: tuple[RankCase, ...] = FSDP2_CASES
"""Every case, engine by engine."""


def select_cases(pattern: str) -> tuple[RankCase, ...]:
    """The cases whose label matches a pattern as in ``fnmatch``, such as ``"fsdp2 gpt *"``.

    Raises:
        ValueError: if none does.
    """
    selected = tuple(case for case in ALL_CASES if fnmatch.fnmatchcase(case.label, pattern))
    if not selected:
        raise ValueError(f"no case matches {pattern!r}; labels are such as {ALL_CASES[0].label!r}")
    return selected


def build(case: RankCase) -> tuple[torch.nn.Module, Batch, StepProgram]:
    """The whole network of a case, its batch, and its step; the optimizer is made when the step is asked for it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        workload = MODELS[case.model]()
    program = program_of(
        workload.network,
        loss=workload.loss,
        optimizer=partial(_optimizer, case.optimizer),
        step_context=autocast_context(case.precision),
    )
    return workload.network, workload.batch, program


def _optimizer(name: OptimizerName, parameters: Iterator[torch.nn.Parameter]) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-3)
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def slices_of(case: RankCase, batch: Batch) -> list[Batch]:
    """The slices of one batch, of equal sizes."""
    samples = len(next(iter(batch.values())))
    return list(split_by_sizes(batch, (samples // case.slices,) * case.slices))


def fsdp2_sharding(case: RankCase, network: torch.nn.Module) -> Sharding:
    """The repeated blocks and the root, as ``memfit.fully_shard`` groups them."""
    return Sharding(
        engine="fsdp2",
        ranks=case.ranks,
        synchronisation="step" if case.setting == "exchanged once" else "slice",
        shard_groups=(*find_repeated_blocks(network), ""),
        reshard_after_forward=case.setting != "kept after forward",
        param_dtype=None if case.policy is None else case.policy[0],
        reduce_dtype=None if case.policy is None else case.policy[1],
    )
