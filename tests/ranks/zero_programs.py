"""Runs under DeepSpeed's ZeRO on two ranks: MemFit's slices without its planning, and Lightning's own way."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from dataclasses import dataclass
from typing import Any
from unittest import mock

import lightning
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import MemFit
from lightning_memfit.apply import cpu_adam
from lightning_memfit.apply.deepspeed_config import make_deepspeed_delegate, write_config
from lightning_memfit.apply.deepspeed_engine import let_lightning_accumulate
from lightning_memfit.apply.gradient_exchange import exchange_of
from lightning_memfit.apply.micro_batches import Slicer
from lightning_memfit.apply.precision import DelegatingPrecision
from lightning_memfit.apply.sharding import ranks_of, sharding_of
from lightning_memfit.errors import ConfigurationError
from lightning_memfit.observe.snapshot import take_snapshot
from lightning_memfit.plan import BatchSplit, Offload, Plan
from lightning_memfit.sharding import ZeroStage
from tests.ranks.cpu_deepspeed import CPUDeepSpeed
from tests.ranks.trainer_programs import QUIET, RANKS, Case, data_of, loader_of, net_of, optimizer_of, resume

_SHORT_WINDOW = {"micro_batch_size": 3, "accumulate": 2, "samples": 8 * RANKS * 5}


@dataclass(frozen=True, kw_only=True)
class ZeroCase(Case):
    """One run under ZeRO."""

    stage: ZeroStage = 2
    offload: Offload = "never"
    clip_norm: float | None = None


CASES: dict[str, ZeroCase] = {
    "stage 1, clipped": ZeroCase(stage=1, epochs=7, clip_norm=0.05, **_SHORT_WINDOW),
    "stage 2, offloaded": ZeroCase(stage=2, epochs=7, offload="optimizer", **_SHORT_WINDOW),
    "stage 3": ZeroCase(stage=3, epochs=7, **_SHORT_WINDOW),
}
MORE_CASES: dict[str, ZeroCase] = {
    "stage 1": ZeroCase(stage=1, epochs=7, **_SHORT_WINDOW),
    "stage 1, offloaded": ZeroCase(stage=1, epochs=7, offload="optimizer", **_SHORT_WINDOW),
    "stage 2": ZeroCase(stage=2, epochs=7, **_SHORT_WINDOW),
    "stage 2, clipped": ZeroCase(stage=2, epochs=7, clip_norm=0.05, **_SHORT_WINDOW),
    "stage 2, offloaded and clipped": ZeroCase(stage=2, epochs=7, offload="optimizer", clip_norm=0.05, **_SHORT_WINDOW),
    "stage 3, clipped": ZeroCase(stage=3, epochs=7, clip_norm=0.05, **_SHORT_WINDOW),
    "stage 3, offloaded": ZeroCase(stage=3, epochs=7, offload="optimizer", **_SHORT_WINDOW),
    "a short last batch": ZeroCase(micro_batch_size=3, accumulate=2, samples=8 * RANKS * 2 + 5 * RANKS),
    "one slice, accumulated": ZeroCase(micro_batch_size=8, accumulate=3, samples=8 * RANKS * 4),
    "tokens": ZeroCase(stage=2, tokens=True, micro_batch_size=3, accumulate=2),
    "adamw": ZeroCase(stage=1, optimizer="adamw", epochs=7, **_SHORT_WINDOW),
}


class Delegating(DelegatingPrecision, Precision):
    """What MemFit is to a strategy: writes a plan into its configuration in ``convert_module``."""

    def __init__(self, case: ZeroCase) -> None:
        super().__init__(make_deepspeed_delegate("16-mixed", namespace="lightning.pytorch"))
        self.case = case

    def convert_module(self, module: nn.Module) -> nn.Module:
        trainer: Any = module.trainer
        self.delegate = make_deepspeed_delegate("32-true", namespace="lightning.pytorch")
        sharding = sharding_of(trainer)
        assert sharding is not None
        write_config(
            trainer.strategy,
            precision="32-true",
            sharding=dataclasses.replace(sharding, zero_stage=self.case.stage, reduce_bucket_elements=300),
            offload=self.case.offload,
            micro_batch_size=self.case.micro_batch_size,
            module=module,
        )
        let_lightning_accumulate(trainer.strategy)
        converted: nn.Module = self.delegate.convert_module(module)
        return converted


class Sliced(lightning.Callback):
    """Divides batches as MemFit would."""

    def __init__(self, case: ZeroCase) -> None:
        self.case = case

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        size, largest = self.case.loader_batch_size, self.case.micro_batch_size
        count = -(-size // largest)
        split = BatchSplit(
            effective_batch_size=self.case.effective_batch_size,
            ranks=RANKS,
            loader_batch_size=size,
            accumulate_grad_batches=self.case.accumulate,
            slice_sizes=tuple(size // count + (index < size % count) for index in range(count)),
        )
        Slicer(
            trainer=trainer,
            module=pl_module,
            split=split,
            loss_weight="tokens" if self.case.tokens else "samples",
            ranks=ranks_of(trainer),
            exchange=exchange_of(trainer.strategy),
        ).apply()


class Rehearsed(lightning.Callback):
    """Takes two real steps before training begins, and leaves no trace of them."""

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        strategy: Any = trainer.strategy
        engine = strategy.model
        batch = [torch.randn(8, 16), torch.randn(8, 5)]
        before = whole_weights(pl_module)
        with take_snapshot(pl_module, optimizers=trainer.optimizers, extra_roots=[engine]):
            for _ in range(2):
                for is_last in (False, True):
                    engine.set_gradient_accumulation_boundary(is_last)
                    loss = strategy.training_step(batch, 0)
                    engine.backward(loss)
                    del loss
                engine.step()
            changed = whole_weights(pl_module)
        assert all(not torch.equal(before[name], changed[name]) for name in before), "the steps were real"


def train(case: ZeroCase, rank: int, folder: str, *, rehearsed: bool = False) -> dict[str, Any]:
    """One fit on one rank."""
    net = net_of(case)
    callbacks = [*([Rehearsed()] if rehearsed else []), Sliced(case)]
    trainer = trainer_of(case, folder, plugins=[Delegating(case)], callbacks=callbacks)
    trainer.fit(net, loader_of(case, rank))
    return {"weights": whole_weights(net), "losses": net.losses, "steps": trainer.global_step}


def trainer_of(case: ZeroCase, folder: str, **more: Any) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=CPUDeepSpeed(stage=case.stage, logging_level=logging.ERROR),
        max_epochs=case.epochs,
        accumulate_grad_batches=case.accumulate,
        gradient_clip_val=case.clip_norm,
        default_root_dir=folder,
        **QUIET,
        **more,
    )


def whole_weights(net: nn.Module) -> dict[str, torch.Tensor]:
    """Of every parameter, gathered where it is divided."""
    import deepspeed

    parameters = list(net.parameters())
    divided = [each for each in parameters if hasattr(each, "ds_id")]
    with deepspeed.zero.GatheredParameters(divided, enabled=bool(divided)):
        return {name: each.detach().float().clone() for name, each in net.named_parameters()}


def one_process(case: ZeroCase) -> dict[str, Any]:
    """The run in one process, clipped as the case says."""
    net, data = net_of(case), data_of(case)
    optimizer, steps, losses = optimizer_of(net, case), 0, []
    for _ in range(case.epochs):
        for start in range(0, case.samples, case.effective_batch_size):
            members = [data[index] for index in range(start, min(start + case.effective_batch_size, case.samples))]
            optimizer.zero_grad()
            loss = net.loss(torch.utils.data.default_collate(members))
            loss.backward()
            if case.clip_norm is not None:
                nn.utils.clip_grad_norm_(net.parameters(), case.clip_norm)
            optimizer.step()
            losses.append(loss.item())
            steps += 1
    return {"weights": net.state_dict(), "losses": losses, "steps": steps}


class Constant(lightning.LightningModule):
    """A gradient of 1 with every batch: the weight tells how far each step went."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.weight.sum() * batch[0].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def run_constant(*, with_memfit: bool, folder: str) -> float:
    """Ten batches, four to a step, under ZeRO 2; the weight at the end."""
    case = ZeroCase(stage=2, accumulate=4, loader_batch_size=2, micro_batch_size=1, epochs=1)
    more: dict[str, Any] = {"plugins": [Delegating(case)], "callbacks": [Sliced(case)]} if with_memfit else {}
    module = Constant()
    data = TensorDataset(torch.ones(20, 1))
    trainer = trainer_of(case, folder, **more)
    trainer.fit(module, DataLoader(data, batch_size=2))
    return float(whole_weights(module)["weight"])


LIVE = {f"stage {stage}, planned": ZeroCase(stage=stage, epochs=7, **_SHORT_WINDOW) for stage in (1, 2, 3)}
"""Runs that MemFit plans, proves and trains; the budget leaves no room for Lightning's own buckets."""
LIVE_BUDGET = "256MiB"


NOT_BUILT = ZeroCase(stage=2, optimizer="adamw", epochs=7, **_SHORT_WINDOW)
"""A run that is to offload, where DeepSpeed's Adam cannot be built."""


def train_live(case: ZeroCase, rank: int, folder: str, **settings: Any) -> dict[str, Any]:
    """One fit on one rank, planned."""
    plugin = MemFit(
        effective_batch_size=case.effective_batch_size,
        micro_batch_size=case.micro_batch_size,
        budget=LIVE_BUDGET,
        precision="32-true",
        activation_checkpointing="none",
        cache_dir=f"{folder}/cache",
        verbose=False,
        **settings,
    )
    net = net_of(case)
    trainer = trainer_of(dataclasses.replace(case, accumulate=1), folder, plugins=[plugin])
    trainer.fit(net, loader_of(case, rank))
    return {
        "weights": whole_weights(net),
        "losses": net.losses,
        "steps": trainer.global_step,
        "plan": plugin.plan,
        "measured": plugin.measured,
    }


def _resumed(case: ZeroCase, rank: int, folder: str) -> dict[str, Any]:
    def make_trainer(case: Any, plugins: list[Any], folder: str) -> lightning.Trainer:
        return trainer_of(dataclasses.replace(case, accumulate=1), folder, plugins=plugins)

    return resume(case, rank, folder, make_trainer, whole_weights)


def run_cases(rank: int) -> dict[str, Any]:
    """The cases, and the constant gradient with and without MemFit."""
    with tempfile.TemporaryDirectory() as folder:
        found = _train_all(CASES, rank, folder)
        found |= {name: train_live(case, rank, folder) for name, case in LIVE.items()}
        found["resumed"] = _resumed(LIVE["stage 2, planned"], rank, folder)
        found["cannot be built"] = _train_where_nothing_can_be_built(rank, folder)
        found["constant"] = run_constant(with_memfit=True, folder=folder)
        found["constant, Lightning alone"] = run_constant(with_memfit=False, folder=folder)
        return found


def _train_where_nothing_can_be_built(rank: int, folder: str) -> dict[str, Any]:
    """The try ends with an error, as it does where there is no compiler."""
    with (
        tempfile.TemporaryDirectory() as extensions,
        mock.patch.dict(os.environ, {"TORCH_EXTENSIONS_DIR": extensions}),
        mock.patch.object(cpu_adam, "_TRY", "raise SystemExit('there is no compiler')"),
    ):
        found = train_live(NOT_BUILT, rank, folder, offload="optimizer")
        return found | {"given": _refusal_of_built(found["plan"], rank, folder)}


def _refusal_of_built(plan: Plan, rank: int, folder: str) -> str:
    """What a run says to its own plan, given with DeepSpeed's Adam as if it had been made where that was built."""
    candidate = dataclasses.replace(plan.candidate, optimizer_implementation="cpu-adam")
    built = dataclasses.replace(plan, forecast=dataclasses.replace(plan.forecast, candidate=candidate))
    try:
        train_live(NOT_BUILT, rank, folder, offload="optimizer", plan=built)
    except ConfigurationError as error:
        return str(error)
    return "nothing"


def run_more_cases(rank: int) -> dict[str, Any]:
    """The rest of the cases."""
    with tempfile.TemporaryDirectory() as folder:
        return _train_all(MORE_CASES, rank, folder)


def _train_all(cases: dict[str, ZeroCase], rank: int, folder: str) -> dict[str, Any]:
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # gloo reduces: nothing is compiled
    return {name: train(case, rank, folder) for name, case in cases.items()}


REHEARSED: dict[str, ZeroCase] = {
    "stage 1": ZeroCase(stage=1, optimizer="adamw", epochs=2, **_SHORT_WINDOW),
    "stage 2": ZeroCase(stage=2, optimizer="adamw", epochs=2, **_SHORT_WINDOW),
    "stage 2, offloaded": ZeroCase(stage=2, optimizer="adamw", epochs=2, offload="optimizer", **_SHORT_WINDOW),
    "stage 3": ZeroCase(stage=3, optimizer="adamw", epochs=2, **_SHORT_WINDOW),
}


def run_rehearsed(rank: int) -> dict[str, Any]:
    """Each case with two real steps before it, and without."""
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    with tempfile.TemporaryDirectory() as folder:
        return {
            name: [train(case, rank, folder, rehearsed=rehearsed) for rehearsed in (True, False)]
            for name, case in REHEARSED.items()
        }
