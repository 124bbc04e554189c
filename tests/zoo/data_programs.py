"""Ways in which people feed a model: samplers, loaders, streams, and batches of many structures."""

from __future__ import annotations

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from tests.zoo.models import WIDTH, Classifier
from tests.zoo.program import Program, Run


def features(count: int = 24) -> TensorDataset:
    """Samples of WIDTH features with one of four labels."""
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(count, WIDTH, generator=generator), torch.randint(0, 4, (count,), generator=generator)
    )


def plain() -> Run:
    return Run(module=Classifier(), fit={"train_dataloaders": DataLoader(features(), batch_size=8)})


def shuffled() -> Run:
    return Run(module=Classifier(), fit={"train_dataloaders": DataLoader(features(26), batch_size=8, shuffle=True)})


def drop_last() -> Run:
    loader = DataLoader(features(26), batch_size=8, shuffle=True, drop_last=True)
    return Run(module=Classifier(), fit={"train_dataloaders": loader})


def weighted_sampler() -> Run:
    sampler = WeightedRandomSampler([1.0 + index % 3 for index in range(24)], num_samples=16)
    return Run(module=Classifier(), fit={"train_dataloaders": DataLoader(features(), batch_size=8, sampler=sampler)})


def batch_sampler() -> Run:
    data = features()
    sampler = BatchSampler(RandomSampler(data), batch_size=8, drop_last=False)
    return Run(module=Classifier(), fit={"train_dataloaders": DataLoader(data, batch_sampler=sampler)})


PROGRAMS = (
    Program(name="in order", make=plain),
    Program(name="shuffled, last batch short", make=shuffled),
    Program(name="shuffled, last batch dropped", make=drop_last),
    Program(name="a sampler with weights", make=weighted_sampler),
    Program(name="a batch sampler", make=batch_sampler),
)
