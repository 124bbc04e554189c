"""Programs that a first look at four samples would have let through, or that could not be looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, TensorDataset

from lightning_memfit import ConfigurationError, MemFit

pytestmark = pytest.mark.usefixtures("no_probing")
MakeTrainer = Callable[..., Any]

# The levers that this file is not about.
AS_IT_IS: Any = {
    "precision": "32-true",
    "optimizer_states": "as-configured",
    "optimizer_implementation": "as-configured",
}


class Classifier(lightning.LightningModule):
    def __init__(self, **loss: Any) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
        self.loss = loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1], **self.loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rare_class() -> DataLoader[Any]:
    """Class 2 is rare, and not among the first four samples."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(256, generator=generator) < 0.05).long() * 2
    labels[:4] = 0
    assert labels.any()
    return DataLoader(TensorDataset(torch.randn(256, 16, generator=generator), labels), batch_size=128)


@pytest.mark.parametrize(
    "loss", [{"weight": torch.tensor([0.05, 1.0, 5.0, 1.0])}, {"ignore_index": 2}], ids=["weights", "ignored"]
)
def test_a_loss_that_is_no_mean_over_samples_is_found_beyond_the_first_four(
    loss: Any, make_trainer: MakeTrainer
) -> None:
    plugin = MemFit(micro_batch_size=32, verbose=False, **AS_IT_IS)
    # The size is given, so that there is no way round.
    with pytest.raises(ConfigurationError, match="loss is no mean over samples"):
        make_trainer(plugin).fit(Classifier(**loss), rare_class())


def test_a_batch_that_can_neither_be_traced_nor_divided_trains_undivided(make_trainer: MakeTrainer) -> None:
    class Packed(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(8, 16)
            self.head = nn.Linear(16, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self.head(self.lstm(batch[0])[1][0][-1]), batch[1])

    data = [(torch.randn(3 + index % 5, 8), index % 4) for index in range(32)]

    def collate(items: Any) -> Any:
        return pack_sequence([x for x, _ in items], enforce_sorted=False), torch.tensor([y for _, y in items])

    plugin = MemFit(verbose=False, **AS_IT_IS)
    trainer = make_trainer(plugin)
    trainer.fit(Packed(), DataLoader(data, batch_size=16, collate_fn=collate))  # type: ignore[arg-type]
    assert trainer.global_step == 2
    assert plugin.plan is not None and plugin.plan.split.num_slices == 1
    assert plugin.plan.forecast.method == "floor"


def test_loaders_of_unequal_batches_train_undivided(make_trainer: MakeTrainer) -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return sum(F.cross_entropy(self.net(x), y) for x, y in batch.values())

    def loader(batch_size: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(64, 16), torch.arange(64) % 4), batch_size=batch_size)

    plugin = MemFit(verbose=False, **AS_IT_IS)
    trainer = make_trainer(plugin)
    trainer.fit(Two(), CombinedLoader({"a": loader(32), "b": loader(16)}, "max_size_cycle"))
    assert trainer.global_step == 4
    assert plugin.plan is not None and plugin.plan.split.num_slices == 1


def test_a_first_batch_without_a_loss_proves_nothing_and_that_is_said(
    make_trainer: MakeTrainer, capsys: pytest.CaptureFixture[str]
) -> None:
    class Late(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None if batch_idx == 0 else super().training_step(batch, batch_idx)

    plugin = MemFit(**AS_IT_IS)
    with pytest.warns(UserWarning, match="returned `None`"):
        make_trainer(plugin).fit(Late(), rare_class())
    assert plugin.measured is not None and plugin.measured.profiled_steps == 0
    assert plugin.plan is not None and plugin.plan.notes[-1].startswith("NOT PROVEN")
    assert "gave no loss for the first batch" in capsys.readouterr().out
