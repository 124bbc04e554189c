"""What is known of the run that a composed config asks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader

from lightning_memfit.application import composed
from lightning_memfit.application.composed import subject_of_config


class Model(LightningModule):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def twelve_batches() -> DataLoader[Any]:
    return DataLoader(torch.zeros(24, 2), batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("trainer", "effective_batch_size", "steps"),
    [
        ({"max_steps": 7}, None, 7),
        ({"max_epochs": 3}, None, 36),
        # Two Lightning batches of 2 samples for each step: 6 of them in an epoch.
        ({"max_epochs": 3}, 4, 18),
        ({"max_epochs": 3, "limit_train_batches": 5}, None, 15),
        ({"max_epochs": 2, "limit_train_batches": 0.5}, None, 12),
        ({"max_epochs": -1}, None, None),
    ],
)
def test_the_optimizer_steps_of_the_whole_run_are_known_where_it_has_an_end(
    trainer: dict[str, Any], effective_batch_size: int | None, steps: int | None
) -> None:
    config = OmegaConf.create(
        {
            "model": {"_target_": f"{__name__}.Model"},
            "data": {"_target_": f"{__name__}.twelve_batches"},
            "trainer": {"_target_": "lightning.pytorch.Trainer", **trainer},
            "memfit": {"effective_batch_size": effective_batch_size},
        }
    )
    with subject_of_config(config, words="a model", source="a test", otherwise="do not", real=False) as subject:
        assert subject.optimizer_steps == steps


@pytest.mark.parametrize(
    ("config", "has_gpu", "device"),
    [
        ({}, True, None),
        ({"hardware": {"device": "t4"}, "trainer": {"accelerator": "cpu"}}, True, "t4"),
        ({"hardware": {"device": "local"}, "trainer": {"accelerator": "cpu"}}, True, "cpu"),
        ({"trainer": {"accelerator": "cpu"}}, True, "cpu"),
        ({"trainer": {"accelerator": "cpu"}}, False, None),
        ({"hardware": {"device": "local"}, "trainer": {"accelerator": "gpu"}}, True, "local"),
    ],
)
def test_what_is_forecast_for_is_what_the_config_says_and_where_its_trainer_trains(
    config: dict[str, Any], has_gpu: bool, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composed, "has_gpu", lambda: has_gpu)
    assert composed.device_of(OmegaConf.create(config)) == device
