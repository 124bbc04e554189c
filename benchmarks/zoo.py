"""The cases that predictions are checked against: small but real models, each at settings of its own.

Everything is seeded: the same case is the same weights and the same batch.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from benchmarks.zoo_models import MODELS
from benchmarks.zoo_models.workload import Batch, Workload

try:
    from lightning.pytorch import LightningModule
except ImportError:
    from pytorch_lightning import LightningModule

Precision = Literal["32-true", "bf16-mixed"]
Checkpointing = Literal["none", "blocks"]
Optimizer = Literal["adamw", "sgd"]
OptimizerStates = Literal["as-configured", "8bit"]
Implementation = Literal["as-configured", "foreach", "fused"]

_AT_EVERY_SETTING = ("mlp", "gpt", "vit", "bert", "unet", "resnet", "lstm")
# Half of the eight settings: any two values of two different levers occur together.
_SPANNING: tuple[tuple[Precision, Checkpointing, Optimizer], ...] = (
    ("32-true", "none", "adamw"),
    ("32-true", "blocks", "sgd"),
    ("bf16-mixed", "none", "sgd"),
    ("bf16-mixed", "blocks", "adamw"),
)
_SGD_IN_8BIT = ("wide", "resnet", "gpt2", "seq2seq")
_IMPLEMENTATIONS_OF: tuple[tuple[str, Optimizer], ...] = (
    ("wide", "adamw"),
    ("wide", "sgd"),
    ("big_vocabulary", "adamw"),
    ("t5", "adamw"),
)


@dataclass(frozen=True)
class ZooCase:
    """One model at one setting."""

    name: str
    """Key of ``MODELS``."""
    precision: Precision
    """In Lightning's words."""
    checkpointing: Checkpointing
    """Whether the repeated blocks are recomputed."""
    optimizer: Optimizer
    """AdamW, or SGD with momentum 0.9."""
    optimizer_states: OptimizerStates = "as-configured"
    """Whether the optimizer's states are quantised."""
    implementation: Implementation = "as-configured"
    """How the optimizer's step is run."""

    @property
    def has_optimizer_levers(self) -> bool:
        """Whether the optimizer is another one than the module configures, or is run otherwise."""
        return (self.optimizer_states, self.implementation) != ("as-configured", "as-configured")

    @property
    def label(self) -> str:
        """Such as ``"gpt 32-true none adamw"``, with ``"8bit"``, ``"foreach"`` or ``"fused"`` behind it."""
        levers = [value for value in (self.optimizer_states, self.implementation) if value != "as-configured"]
        return " ".join([self.name, self.precision, self.checkpointing, self.optimizer, *levers])


def all_cases() -> tuple[ZooCase, ...]:
    """Every case, model by model."""
    return tuple(case for name in MODELS for case in _cases_of(name))


def _cases_of(name: str) -> Iterator[ZooCase]:
    every = itertools.product(get_args(Precision), get_args(Checkpointing), get_args(Optimizer))
    for setting in every if name in _AT_EVERY_SETTING else _SPANNING:
        yield ZooCase(name, *setting)
    # With recomputed blocks less else is alive, so that the optimizer's states and temporaries count for more.
    yield ZooCase(name, "32-true", "blocks", "adamw", "8bit")
    if name in _SGD_IN_8BIT:
        yield ZooCase(name, "bf16-mixed", "blocks", "sgd", "8bit")
    for model, optimizer in _IMPLEMENTATIONS_OF:
        if model == name:
            yield ZooCase(name, "32-true", "blocks", optimizer, implementation="foreach")
            yield ZooCase(name, "bf16-mixed", "blocks", optimizer, implementation="fused")


def select_cases(pattern: str) -> tuple[ZooCase, ...]:
    """The cases whose label matches a pattern as in ``fnmatch``, such as ``"gpt *"``.

    Raises:
        ValueError: if none does.
    """
    selected = tuple(case for case in all_cases() if fnmatch.fnmatchcase(case.label, pattern))
    if not selected:
        raise ValueError(f"no case matches {pattern!r}; labels are such as {all_cases()[0].label!r}")
    return selected


def build(case: ZooCase, *, with_optimizer_levers: bool = False) -> tuple[ZooModule, Batch]:
    """The module and one batch of a case, the same for every call. The global random state is left alone.

    Precision and checkpointing are for the caller to apply: they are settings of the run, not of the model. So are the
    optimizer's levers, unless ``with_optimizer_levers``: then ``configure_optimizers`` applies those of the case.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        workload = MODELS[case.name].make()
        kind = LeveredZooModule if with_optimizer_levers and case.has_optimizer_levers else ZooModule
        return kind(workload, case), workload.batch


class ZooModule(LightningModule):
    """A network and its loss under Lightning; knows nothing of MemFit."""

    def __init__(self, workload: Workload, case: ZooCase) -> None:
        super().__init__()
        self.network = workload.network
        self.loss = workload.loss
        self.case = case

    def training_step(self, batch: Batch, batch_idx: int = 0) -> Tensor:
        """The mean loss of the batch."""
        return self.loss(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the case, with torch's default implementation."""
        if self.case.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=1e-3)
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class LeveredZooModule(ZooModule):
    """The same with the optimizer's levers of the case applied, as MemFit would apply them."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """The optimizer of the case, its states quantised or its implementation chosen."""
        from lightning_memfit.apply.optimizer_levers import with_levers

        return with_levers(
            super().configure_optimizers(),
            self,
            optimizer_states=self.case.optimizer_states,
            implementation=self.case.implementation,
        )
