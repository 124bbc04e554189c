"""Runs of a Trainer on two ranks, under DDP or FSDP2, and the same run in one process with plain torch."""

from __future__ import annotations

import copy
import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from lightning_memfit import MemFit, fully_shard
from lightning_memfit.apply.fsdp2 import is_fully_sharded
from lightning_memfit.plan import Forecast
from lightning_memfit.real_steps import Ran, RealSteps

RANKS = 2
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,  # loaders come with one
    "num_sanity_val_steps": 0,
}
"""Settings of every Trainer."""
MakeTrainer = Callable[[Any, list[Any], str], lightning.Trainer]
"""(case, plugins, folder) to a Trainer."""
WeightsOf = Callable[[nn.Module], dict[str, torch.Tensor]]
"""Every weight of a module, whole; all ranks ask."""
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run."""

    engine: str = "ddp"
    """``"ddp"`` or ``"fsdp2"``."""
    optimizer: str = "sgd"
    """``"sgd"`` with momentum, or ``"adamw"``."""
    loader_batch_size: int = 8
    """Samples per Lightning batch on one rank."""
    samples: int = 8 * RANKS * 4
    """Samples of the dataset."""
    accumulate: int = 1
    """Lightning batches per optimizer step."""
    micro_batch_size: int = 8
    """Samples of the largest slice."""
    epochs: int = 10
    """Epochs; each has at least 2 optimizer steps."""
    tokens: bool = False
    """Whether the loss is the mean over labels that are not ignored."""
    buckets_are_gradients: bool = False
    """``gradient_as_bucket_view`` of DDP."""
    policy: MixedPrecisionPolicy | None = None
    """Of ``fully_shard``."""
    finds_unused: bool = False
    """``find_unused_parameters`` of DDP, and a layer that no step uses."""
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Of MemFit, beside these."""

    @property
    def effective_batch_size(self) -> int:
        return RANKS * self.loader_batch_size * self.accumulate


CASES = {
    "uneven slices": Case(micro_batch_size=3, epochs=5),
    "accumulation and a short last window": Case(micro_batch_size=3, accumulate=2, samples=8 * RANKS * 5),
    "a short last batch": Case(micro_batch_size=3, accumulate=2, samples=8 * RANKS * 2 + 5 * RANKS),
    "gradients in buckets": Case(micro_batch_size=3, accumulate=2, buckets_are_gradients=True),
    "nothing divided": Case(),
    "adamw": Case(optimizer="adamw", micro_batch_size=3, accumulate=2, samples=8 * RANKS * 5),
    "blocks recomputed": Case(micro_batch_size=3, settings={"activation_checkpointing": "blocks"}),
    "blocks recomputed, a layer unused": Case(
        micro_batch_size=3, accumulate=2, finds_unused=True, settings={"activation_checkpointing": "blocks"}
    ),
    "tokens": Case(tokens=True, micro_batch_size=3, accumulate=2, settings={"loss_weight": "tokens"}),
    "fsdp2": Case(engine="fsdp2", micro_batch_size=3, accumulate=2, samples=8 * RANKS * 5),
    "fsdp2, a short last batch": Case(
        engine="fsdp2", micro_batch_size=3, accumulate=2, samples=8 * RANKS * 2 + 5 * RANKS
    ),
    "fsdp2, nothing divided": Case(engine="fsdp2", epochs=5),
    "fsdp2, adamw, blocks recomputed": Case(
        engine="fsdp2",
        optimizer="adamw",
        micro_batch_size=3,
        accumulate=2,
        settings={"activation_checkpointing": "blocks"},
    ),
}


class Net(lightning.LightningModule):
    """Four blocks; regression, or classification with ignored labels."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(16, 5)
        if case.finds_unused:
            self.unused = nn.Linear(16, 5)
        self.losses: list[float] = []
        self.is_spread = True

    def configure_model(self) -> None:
        if self.case.engine == "fsdp2" and self.is_spread and not is_fully_sharded(self):
            fully_shard(self, mixed_precision=self.case.policy)

    def loss(self, batch: Any) -> torch.Tensor:
        x, labels = (batch["x"], batch["labels"]) if isinstance(batch, dict) else batch
        for block in self.blocks:
            x = block(x)
        out = self.head(x.to(self.head.weight.dtype))  # a policy may cast what blocks return
        if self.case.tokens:
            return nn.functional.cross_entropy(out, labels, ignore_index=IGNORED)
        return nn.functional.mse_loss(out, labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self, self.case)


class Samples(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, x: torch.Tensor, labels: torch.Tensor) -> None:
        self.x, self.labels = x, labels

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}


def optimizer_of(module: nn.Module, case: Case) -> torch.optim.Optimizer:
    if case.optimizer == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=1e-2)
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def net_of(case: Case) -> Net:
    torch.manual_seed(0)
    return Net(case)


def data_of(case: Case) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(case.samples, 16, generator=generator)
    if not case.tokens:
        return TensorDataset(x, torch.randn(case.samples, 5, generator=generator))
    labels = torch.randint(5, (case.samples,), generator=generator)
    # Two of three labels of the first rank's samples (the even ones) are ignored, and none of the other's.
    index = torch.arange(case.samples)
    labels[(index % 2 == 0) & (index % 6 != 0)] = IGNORED
    labels[16:32:2] = IGNORED  # and all of the first rank's second batch
    return Samples(x, labels)


def strategy_of(case: Case) -> Any:
    strategies = lightning.pytorch.strategies
    if case.engine == "fsdp2":
        return strategies.ModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1)
    return strategies.DDPStrategy(
        gradient_as_bucket_view=case.buckets_are_gradients, find_unused_parameters=case.finds_unused
    )


def weights_of(net: nn.Module) -> dict[str, torch.Tensor]:
    """Every weight whole; all ranks ask."""
    state = {name: weight.detach() for name, weight in net.state_dict().items()}
    return {name: getattr(weight, "full_tensor", weight.clone)() for name, weight in state.items()}


def trainer_of(case: Case, plugins: list[Any], folder: str) -> lightning.Trainer:
    return lightning.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=strategy_of(case),
        max_epochs=case.epochs,
        plugins=plugins,
        default_root_dir=folder,
        **QUIET,
    )


def loader_of(case: Case, rank: int) -> DataLoader[Any]:
    data = data_of(case)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=RANKS, rank=rank, shuffle=False)
    return DataLoader(data, batch_size=case.loader_batch_size, sampler=sampler)


def plugin_of(case: Case, folder: str, **settings: Any) -> MemFit:
    return MemFit(
        effective_batch_size=case.effective_batch_size,
        **{
            "micro_batch_size": case.micro_batch_size,
            "precision": "32-true",
            "optimizer_implementation": "as-configured",
            "activation_checkpointing": "none",
        }
        | case.settings
        | settings,
        cache_dir=f"{folder}/cache",
        verbose=False,
    )


def resume(case: Case, rank: int, folder: str, make_trainer: MakeTrainer, weights_of: WeightsOf) -> dict[str, Any]:
    """Three epochs at once, and two, saved and resumed for the third."""
    # In the folder that all ranks work in: each writes its part of the checkpoint.
    case, path = dataclasses.replace(case, epochs=3), str(Path.cwd() / "resumed.ckpt")
    at_once = net_of(case)
    make_trainer(case, [plugin_of(case, folder)], folder).fit(at_once, loader_of(case, rank))
    whole = weights_of(at_once)
    two = dataclasses.replace(case, epochs=2)
    trainer = make_trainer(two, [plugin_of(two, folder)], folder)
    trainer.fit(net_of(two), loader_of(two, rank))
    trainer.save_checkpoint(path)
    net, plugin = net_of(case), plugin_of(case, folder)
    make_trainer(case, [plugin], folder).fit(net, loader_of(case, rank), ckpt_path=path, weights_only=False)
    assert plugin.plan is not None and plugin.measured is not None
    return {"at once": whole, "resumed": weights_of(net)}


def train(case: Case, rank: int, folder: str) -> dict[str, Any]:
    """One fit on one rank."""
    plugin = plugin_of(case, folder)
    net = net_of(case)
    trainer = trainer_of(case, [plugin], folder)
    trainer.fit(net, loader_of(case, rank))
    assert plugin.plan is not None and plugin.measured is not None
    saved = Path(folder) / "last.ckpt"
    if case.engine == "ddp":
        trainer.save_checkpoint(saved)
    return {
        "checkpoint": saved.read_bytes() if case.engine == "ddp" and rank == 0 else None,
        "weights": weights_of(net),
        "losses": net.losses,
        "steps": trainer.global_step,
        "plan": plugin.plan,
        "measured": plugin.measured,
    }


def plain(case: Case, rank: int, folder: str) -> dict[str, Any]:
    """The same fit without MemFit."""
    net = net_of(case)
    trainer_of(case, [], folder).fit(net, loader_of(case, rank))
    return {"weights": weights_of(net)}


def run_cases(rank: int) -> dict[str, dict[str, Any]]:
    """Every case, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        found = {name: train(case, rank, folder) for name, case in CASES.items()}
        found["resumed"] = resume(CASES["fsdp2"], rank, folder, trainer_of, weights_of)
        for name in ("nothing divided", "fsdp2, nothing divided"):
            found[f"plain, {name}"] = plain(CASES[name], rank, folder)
        return found


def losses_of_steps(case: Case, ranks: list[list[float]]) -> list[float]:
    """The mean loss of each optimizer step, of the losses that every rank saw batch by batch.

    Args:
        case: one whose Lightning batches have the same size.
        ranks: losses in the order of batches.
    """
    per_epoch, found = case.samples // (RANKS * case.loader_batch_size), []
    # Callbacks see what Lightning divided by the number of accumulated batches.
    of_batches = [case.accumulate * sum(each) / len(each) for each in zip(*ranks, strict=True)]
    for start in range(0, len(of_batches), per_epoch):
        epoch = of_batches[start : start + per_epoch]
        windows = [epoch[first : first + case.accumulate] for first in range(0, per_epoch, case.accumulate)]
        found += [sum(window) / len(window) for window in windows]
    return found


def run_without_labels(rank: int) -> dict[str, torch.Tensor]:
    """Weights of a run with a gradient scaler, in which one rank's second batch has no label and the other's has."""
    settings = {"loss_weight": "tokens", "precision": "16-mixed"}
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, torch.Tensor] = train(
            Case(tokens=True, micro_batch_size=3, epochs=2, settings=settings), rank, folder
        )["weights"]
        return found


def run_planned_again(rank: int) -> dict[str, Any]:
    """A run under FSDP2 whose undivided step is measured to need more than it may, so that slices are compared then."""
    measured_for_real, case = RealSteps.warm_up, Case(engine="fsdp2", epochs=5)

    def measured_large(steps: RealSteps, forecast: Forecast, *, timed: bool) -> Ran:
        ran = measured_for_real(steps, forecast, timed=timed)
        if forecast.candidate.split.num_slices > 1 or ran.measurement is None:
            return ran
        large = dataclasses.replace(ran.measurement, measured_peak_allocated_bytes=2**30)
        return dataclasses.replace(ran, measurement=large)

    RealSteps.warm_up = measured_large  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            plugin, net = plugin_of(case, folder, micro_batch_size="auto", budget="200MiB"), net_of(case)
            trainer_of(case, [plugin], folder).fit(net, loader_of(case, rank))
            return {"weights": weights_of(net), "plan": plugin.plan}
    finally:
        RealSteps.warm_up = measured_for_real  # type: ignore[method-assign]


def one_process(case: Case) -> dict[str, Any]:
    """The run in one process: the mean loss over each effective batch, and one step for it."""
    net, data = net_of(case), data_of(case)
    optimizer = optimizer_of(net, case)
    losses, steps = [], 0
    for _ in range(case.epochs):
        for start in range(0, case.samples, case.effective_batch_size):
            members = [data[index] for index in range(start, min(start + case.effective_batch_size, case.samples))]
            batch = torch.utils.data.default_collate(members)
            optimizer.zero_grad()
            loss = net.loss(batch)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            steps += 1
    return {"weights": copy.deepcopy(net.state_dict()), "losses": losses, "steps": steps}
