"""Batches that change on their way to the step: bytes become numbers, images are flipped, samples are stacked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tests.zoo.data_programs import features
from tests.zoo.models import WIDTH, Classifier
from tests.zoo.program import Program, Run


class Photographs(lightning.LightningDataModule):
    """Bytes as they are stored; what is computed from them belongs to the transfer hooks."""

    def prepare_data(self) -> None:
        self.prepared = True

    def setup(self, stage: str) -> None:
        assert self.prepared
        pixels = torch.randint(0, 256, (24, WIDTH), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)
        self.training = TensorDataset(pixels, pixels[:, 0] % 4)
        self.chance = torch.Generator().manual_seed(5)

    def train_dataloader(self) -> Any:
        return DataLoader(self.training, batch_size=8, shuffle=True)


class FlippedPhotographs(Photographs):
    """Some batches are flipped before they are moved, by a generator of their own; numbers are scaled after."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        pixels, labels = batch
        flips = torch.rand(1, generator=self.chance) < 0.5
        return pixels.flip(1) if flips else pixels, labels.long()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        pixels, labels = batch
        return pixels.float() / 255 - 0.5, labels


def transfer_hooks() -> Run:
    return Run(module=Classifier(), fit={"datamodule": FlippedPhotographs()})


class StreamedPhotographs(FlippedPhotographs):
    """The same without a length, so that Lightning fetches one batch ahead."""

    def train_dataloader(self) -> Any:
        return DataLoader(InOrder(self.training), batch_size=8)


class InOrder(IterableDataset[Any]):
    """A data set as a stream."""

    def __init__(self, data: Dataset[Any]) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[index] for index in range(24))


class CollatesLate(Classifier):
    """Samples arrive as a list, and become a batch on the device."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        noise = torch.rand(len(batch), 1)
        return torch.stack([x for x, _ in batch]) + 0.01 * noise, torch.stack([y for _, y in batch])


def streamed_transfer_hooks() -> Run:
    return Run(module=Classifier(), fit={"datamodule": StreamedPhotographs()})


def collated_on_the_device() -> Run:
    loader = DataLoader(features(26), batch_size=8, shuffle=True, collate_fn=list)
    return Run(module=CollatesLate(), fit={"train_dataloaders": loader})


PROGRAMS = (
    Program(name="a data module with transfer hooks", make=transfer_hooks),
    Program(name="a stream with transfer hooks", make=streamed_transfer_hooks),
    Program(name="a batch collated on the device", make=collated_on_the_device),
)
