"""Losses: means over samples or tokens, which slices give exactly, and those that couple the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tests.zoo.models import WIDTH, Classifier, blocks
from tests.zoo.program import Program, Run

NO_MEAN = "the loss is no mean over samples"


def features(count: int = 24) -> DataLoader[Any]:
    """Batches of 8 samples of WIDTH features with one of four labels."""
    generator = torch.Generator().manual_seed(7)
    samples = torch.randn(count, WIDTH, generator=generator)
    return DataLoader(TensorDataset(samples, torch.randint(0, 4, (count,), generator=generator)), batch_size=8)


def of(make_module: Callable[[], Any]) -> Callable[[], Run]:
    """A program that trains a module on plain features."""
    return lambda: Run(module=make_module(), fit={"train_dataloaders": features()})


class TokenMean(Classifier):
    """A class per position; padding is left out of the mean, so that slices count by their tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self(batch["x"])
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()), "logits": logits.detach()}


def padded() -> Run:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (24, 6), generator=generator)
    lengths = torch.randint(1, 7, (24,), generator=generator)
    labels[torch.arange(6) >= lengths[:, None]] = -100
    x = torch.randn(24, 6, WIDTH, generator=generator)
    samples = [{"x": one, "labels": label} for one, label in zip(x, labels, strict=True)]
    return Run(module=TokenMean(), fit={"train_dataloaders": DataLoader(samples, batch_size=8)})  # type: ignore[arg-type]


class Sum(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 100


class CoupledGradients(Classifier):
    """The value is a mean over samples; the gradient grows with their number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        spread = logits.square().mean()
        return F.cross_entropy(logits, batch[1]) + len(batch[1]) * (spread - spread.detach())


class Taught(Classifier):
    """A teacher that follows the student by a moving average within training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 4).requires_grad_(False)
        self.teacher.load_state_dict(self.head.state_dict())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.blocks(batch[0])
        with torch.no_grad():
            self.teacher.weight.lerp_(self.head.weight, 0.1)
        return F.cross_entropy(self.head(hidden), batch[1]) + F.mse_loss(
            self.head(hidden), self.teacher(hidden).detach()
        )


class WeightedClasses(Classifier):
    """torch divides by the weights of the labels that are there, not by the number of samples."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1], weight=torch.tensor([0.1, 1.0, 4.0, 1.0]))


class Contrastive(Classifier):
    """Every sample's negatives are the other samples of its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        one, other = F.normalize(self.blocks(x), dim=-1), F.normalize(self.blocks(x + 0.1 * x.roll(1, -1)), dim=-1)
        return F.cross_entropy(one @ other.T / 0.1, torch.arange(len(x)))


class HardestTriplet(Classifier):
    """The negative of a sample is the nearest of another class in its batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        embedded = self.blocks(x)
        distances = torch.cdist(embedded, embedded)
        same = y[:, None] == y
        nearest = distances.masked_fill(same, 1e4).amin(1)
        furthest = distances.masked_fill(~same, 0.0).amax(1)
        return F.relu(furthest - nearest + 8.0).mean()


class Normalised(Classifier):
    """BatchNorm between the blocks and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class FrozenNorm(Normalised):
    """The same with running statistics that stay as they are, as in finetuning."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.eval()  # a fit keeps the mode of every module


class OwnNorm(Classifier):
    """Centres features over the batch while it trains and by a running mean otherwise, without being a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        if self.training:
            centre = x.mean(0)
            self.mean = self.mean.lerp(centre.detach(), 0.1)
        else:
            centre = self.mean
        logits: Tensor = self.head(x - centre)
        return logits


class Centred(Classifier):
    """Centres features over the batch while it trains, and keeps no statistics."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        logits: Tensor = self.head(x - x.mean(0) if self.training else x)
        return logits


class Dropped(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(blocks(2), nn.Dropout(0.1), blocks(1))


class Mixture(Classifier):
    """Two experts, and a loss that wants both to be used equally often over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share = self.router(x).softmax(-1)
        mixed = sum(share[:, index, None] * expert(x) for index, expert in enumerate(self.experts))
        balance = share.mean(0).square().sum()
        loss: Tensor = F.cross_entropy(self(mixed), y) + balance
        return loss


PROGRAMS = (
    Program(name="mean over tokens", make=padded, settings={"loss_weight": "tokens"}),
    Program(
        name="mean over tokens, weighed by a function",
        make=padded,
        settings={"loss_weight": lambda batch: (batch["labels"] != -100).sum().item()},
    ),
    Program(name="mean over tokens, weighed by samples", make=padded, not_sliced=NO_MEAN),
    Program(name="a sum over samples, unsaid", make=of(Sum), not_sliced="With loss_weight='sum' they do not differ"),
    Program(name="a sum over samples", make=of(Sum), settings={"loss_weight": "sum"}),
    # Three batches in windows of two: the short last one is as Lightning has it.
    Program(
        name="a sum over accumulated samples",
        make=of(Sum),
        settings={"loss_weight": "sum"},
        trainer=lambda: {"accumulate_grad_batches": 2},
    ),
    Program(name="a teacher that follows by itself", make=of(Taught), not_sliced="changes teacher.weight by itself"),
    Program(name="gradients that couple samples", make=of(CoupledGradients), not_sliced="depends on the other samples"),
    Program(name="weighted classes", make=of(WeightedClasses), not_sliced=NO_MEAN),
    Program(name="contrastive", make=of(Contrastive), not_sliced=NO_MEAN),
    Program(name="triplets of the batch", make=of(HardestTriplet), not_sliced=NO_MEAN),
    Program(name="BatchNorm", make=of(Normalised), not_sliced="norm normalises over the batch in train mode"),
    Program(name="BatchNorm, frozen", make=of(FrozenNorm)),
    Program(name="a norm of one's own", make=of(OwnNorm), not_sliced="training_step changes mean by itself"),
    Program(name="centred over the batch", make=of(Centred), not_sliced="In train mode: The loss of 4 samples"),
    # Slices draw other masks than the undivided batch does, of the same distribution: final weights differ by the noise
    # of the masks, as they do between two seeds.
    Program(name="dropout", make=of(Dropped), blocks=("blocks.0.*", "blocks.2.*"), sliced_within=0.2),
    Program(name="mixture of experts", make=of(Mixture), not_sliced=NO_MEAN),
)
