"""What the tests of the loaders share: data sets, loaders, and Trainers that are compared with plain ones."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from lightning_memfit.apply.batch_scan import ScanLimits, ScannedBatch
from lightning_memfit.apply.loader import TrainLoader

Make = Callable[[], Any]


class Numbers(Dataset[Tensor]):
    """Samples (i, noise): the noise from the global generator, as augmentation would draw it."""

    def __init__(self, size: int = 13, noise: bool = True) -> None:
        self.size, self.noise = size, noise

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Tensor:
        return torch.stack([torch.tensor(float(index)), torch.randn(()) if self.noise else torch.zeros(())])


class Endless(IterableDataset[Tensor]):
    """A stateful stream: every sample is seen once, and the global generators are used along the way."""

    def __init__(self, limit: int = 30, noise: bool = True) -> None:
        self.position, self.limit, self.noise = 0, limit, noise

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < self.limit:
            self.position += 1
            noise = torch.randn(()) + random.random() + float(np.random.rand()) if self.noise else torch.zeros(())
            yield torch.stack([torch.tensor(float(self.position)), noise])


class Counting:
    """A plain iterable whose ``__iter__`` has a side effect, and whose order comes from it."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        order = torch.randperm(6, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        random.random()
        return iter([torch.full((2, 2), float(index)) for index in order])


class Recounting(BatchSampler):
    """A batch sampler with state of its own, changed in place while it yields."""

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.rng = random.Random(5)

    def __iter__(self) -> Iterator[list[int]]:
        self.rounds.append(len(self.rounds))
        for _ in range(len(self)):
            yield [self.rng.randrange(13) for _ in range(2 + len(self.rounds) % 2)]

    def __len__(self) -> int:
        return 4


class OwnLoader(DataLoader[Any]):
    """A subclass with iteration of its own, stateful as Lightning understands it."""

    served = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for batch in super().__iter__():
            self.served += 1
            yield batch * 2

    def state_dict(self) -> dict[str, int]:
        return {"served": self.served}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.served = state["served"]


def stream_of_batches() -> Iterator[Tensor]:
    for index in range(9):
        yield torch.full((2, 2), float(index)) + torch.rand(2, 2)


def model_class(namespace: Any) -> type:
    class Model(namespace.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self, make: Make | None = None, make_validation: Make | None = None) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.3), nn.Linear(4, 1))
            self.make, self.make_validation = make, make_validation
            self.calls = self.validation_calls = 0
            self.seen: list[Any] = []
            self.validated: list[Any] = []

        def train_dataloader(self) -> Any:
            self.calls += 1
            assert self.make is not None
            return self.make()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.seen.append(copy.deepcopy(batch))
            while not isinstance(batch, Tensor):
                batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
            return self.layers(batch.reshape(-1, 2)).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    return Model


def validating(cls: type) -> type:
    class Validating(cls):  # type: ignore[misc,valid-type]
        def val_dataloader(self) -> Any:
            self.validation_calls += 1
            return self.make_validation()

        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.validated.append(copy.deepcopy(batch))

    return Validating


Model = model_class(lightning.pytorch)


class Planned(lightning.pytorch.plugins.Precision):
    """Does what a plan does to the loader, where a plan does it."""

    def __init__(self, use: Callable[[TrainLoader], Any]) -> None:
        super().__init__()
        self.use = use
        self.loader: TrainLoader | None = None
        self.result: Any = None

    def convert_module(self, module: nn.Module) -> nn.Module:
        self.loader = TrainLoader.request(module.trainer)
        self.result = self.use(self.loader)
        return module


def look_and_install(loader: TrainLoader) -> Any:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    batch = loader.peek()
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    loader.install()
    return batch


def seed() -> None:
    torch.manual_seed(11)
    random.seed(12)
    np.random.seed(13)


def fit(
    model: Any,
    plugin: Any = None,
    *,
    namespace: Any = lightning.pytorch,
    callbacks: Any = (),
    train: Any = None,
    validation: Any = None,
    datamodule: Any = None,
    ckpt_path: str | None = None,
    **settings: Any,
) -> Any:
    trainer = namespace.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "plugins": [] if plugin is None else [plugin],
            "callbacks": list(callbacks),
            **settings,
        }
    )
    trainer.fit(model, train, validation, datamodule=datamodule, ckpt_path=ckpt_path)
    return trainer


def leaves(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree
    return [leaf for item in items for leaf in leaves(item)] if isinstance(tree, (dict, list, tuple)) else []


def same(left: Any, right: Any) -> bool:
    pairs = leaves(left), leaves(right)
    return len(pairs[0]) == len(pairs[1]) and all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))


def run(make: Make, use: Callable[[TrainLoader], Any] | None, **settings: Any) -> tuple[Any, Any, Any]:
    seed()
    model = Model(make)
    plugin = None if use is None else Planned(use)
    fit(model, plugin, **settings)
    ends = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    return model, plugin, ends


def assert_as_in_a_plain_run(make: Make, **settings: Any) -> tuple[Any, Any]:
    plain, _, plain_ends = run(make, None, **settings)
    planned, plugin, ends = run(make, look_and_install, **settings)
    assert planned.calls == plain.calls
    assert len(planned.seen) > 2
    assert same(planned.seen, plain.seen)
    assert same(list(planned.parameters()), list(plain.parameters()))
    assert torch.equal(ends[0], plain_ends[0])
    assert ends[1:] == plain_ends[1:]
    assert same(plugin.result, planned.seen[0])
    return planned, plugin


def generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def split_by_the_hook() -> DataLoader[Any]:
    part, _ = torch.utils.data.random_split(Numbers(20), [11, 9])
    return DataLoader(part, batch_size=3, shuffle=True)


def shared_generator() -> DataLoader[Any]:
    shared = generator(8)
    return DataLoader(Numbers(), batch_size=4, sampler=RandomSampler(Numbers(), generator=shared), generator=shared)


LOADERS: dict[str, Make] = {
    "in order": lambda: DataLoader(Numbers(), batch_size=4),
    "shuffled": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True),
    "shuffled with a generator": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, generator=generator(7)),
    "one generator for sampler and loader": shared_generator,
    "workers": lambda: DataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=2),
    "persistent workers": lambda: DataLoader(
        Numbers(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True
    ),
    "batch sampler with state": lambda: DataLoader(Numbers(), batch_sampler=Recounting()),
    "dataset yields batches": lambda: DataLoader(TensorDataset(torch.randn(5, 3, 2)), batch_size=None),
    "random draws in the hook": split_by_the_hook,
    "stream": lambda: DataLoader(Endless(), batch_size=4),
    "stream, last batch dropped": lambda: DataLoader(Endless(31), batch_size=4, drop_last=True),
    "stream of batches": lambda: DataLoader(Endless(6), batch_size=None),
    "stream with a generator": lambda: DataLoader(Endless(), batch_size=4, generator=generator(3)),
    "stream in workers": lambda: DataLoader(Endless(12), batch_size=4, num_workers=2),
    "stream in persistent workers": lambda: DataLoader(
        Endless(12), batch_size=4, num_workers=1, persistent_workers=True
    ),
    "iterable with a side effect": Counting,
    "generator": stream_of_batches,
    "subclass with its own iteration": lambda: OwnLoader(Numbers(), batch_size=4, shuffle=True),
    "subclass over a stream": lambda: OwnLoader(Endless(), batch_size=4),
    "list of loaders": lambda: [
        DataLoader(Numbers(), batch_size=4, shuffle=True),
        DataLoader(Numbers(7), batch_size=2, shuffle=True),
    ],
    "dict with a stream and a generator": lambda: {
        "a": DataLoader(Endless(9), batch_size=3),
        "b": stream_of_batches(),
        "c": DataLoader(Numbers(6), batch_size=2, shuffle=True),
    },
    "combined loader": lambda: CombinedLoader(
        {"a": DataLoader(Numbers(), batch_size=4, shuffle=True), "b": Counting()}, "min_size"
    ),
    "list of tensors, each an iterable to Lightning": lambda: [torch.randn(4, 2), torch.randn(4, 2)],
}


def request(loader: Any, **settings: Any) -> TrainLoader:
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, **settings
    )
    model = Model(lambda: loader)
    trainer.strategy.connect(model)
    trainer._data_connector.attach_data(model)
    return TrainLoader.request(trainer)


# Sequences of various lengths, and scans of them.

LIMITS = ScanLimits(max_seconds=1000.0)
"""No test depends on how fast the machine is."""

LENGTHS = [3 + index % 5 for index in range(64)]
"""Samples of 3 to 7 positions, and one of 20."""
LONGEST = 35
LENGTHS[LONGEST] = 20


class Sequences(Dataset[Tensor]):
    """Samples (length, 2) of various lengths; every position holds the sample's number and noise."""

    def __init__(self, lengths: list[int] | None = None, noise: bool = False) -> None:
        self.of_samples = LENGTHS if lengths is None else lengths
        self.noise = noise
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.of_samples)

    def __getitem__(self, index: int) -> Tensor:
        self.read.append(index)
        sample = torch.full((self.of_samples[index], 2), float(index))
        return sample + torch.rand(()) if self.noise else sample


class Stream(IterableDataset[Tensor]):
    """The same samples, each epoch anew from the first."""

    def __init__(self, lengths: list[int] | None = None) -> None:
        self.of_samples = LENGTHS if lengths is None else lengths
        self.epochs = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epochs += 1
        for index, length in enumerate(self.of_samples):
            yield torch.full((length, 2), float(index))


def pad(samples: list[Tensor]) -> Tensor:
    return pad_sequence(samples, batch_first=True)


def padded(dataset: Any = None, batch_size: int = 2, **settings: Any) -> DataLoader[Any]:
    return DataLoader(Sequences() if dataset is None else dataset, batch_size=batch_size, collate_fn=pad, **settings)


def scan_and_install(loader: TrainLoader) -> Any:
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    loader.result = loader.scan(LIMITS)  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]
    loader.install()
    return loader.result.batch  # type: ignore[attr-defined]


def found(loader: Any, limits: ScanLimits = LIMITS, **settings: Any) -> ScannedBatch:
    return request(loader, **settings).scan(limits)
