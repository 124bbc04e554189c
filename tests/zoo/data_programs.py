"""Ways in which people feed a model: samplers, loaders, streams, and batches of many structures."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
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


class Sentences(Dataset[Tensor]):
    """Sequences of 3 to 20 tokens, as people keep text that is not padded yet."""

    def __init__(self, count: int = 24) -> None:
        generator = torch.Generator().manual_seed(7)
        lengths = torch.randint(3, 21, (count,), generator=generator)
        self.tokens = [torch.randint(1, 50, (int(length),), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class BucketSampler(Sampler[list[int]]):
    """Batches of samples of similar length; the batches come in random order, anew in every epoch."""

    def __init__(self, lengths: list[int], batch_size: int) -> None:
        self.lengths, self.batch_size = lengths, batch_size

    def __iter__(self) -> Iterator[list[int]]:
        by_length = sorted(range(len(self.lengths)), key=lambda index: self.lengths[index])
        batches = list(torch.tensor(by_length).split(self.batch_size))
        for position in torch.randperm(len(batches)).tolist():
            yield batches[position].tolist()

    def __len__(self) -> int:
        return -(-len(self.lengths) // self.batch_size)


class TokenBudgetSampler(Sampler[list[int]]):
    """Batches of as many samples, longest first, as fit into a number of padded tokens."""

    def __init__(self, lengths: list[int], tokens: int) -> None:
        by_length = sorted(range(len(lengths)), key=lambda index: -lengths[index])
        self.batches: list[list[int]] = [[]]
        for index in by_length:
            if lengths[(self.batches[-1] or [index])[0]] * (len(self.batches[-1]) + 1) > tokens:
                self.batches.append([])
            self.batches[-1].append(index)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def padded(sentences: list[Tensor]) -> dict[str, Tensor]:
    """Tokens filled up with 0, and the next token as label where there is one."""
    tokens = pad_sequence(sentences, batch_first=True)
    labels = pad_sequence([sentence[1:] for sentence in sentences], batch_first=True, padding_value=-100)
    return {"input_ids": tokens[:, :-1], "labels": labels}


class NextToken(Classifier):
    """The next token from the last ones, by the mean over all labelled tokens of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.mixer = nn.Conv1d(WIDTH, WIDTH, 3)
        self.head = nn.Linear(WIDTH, 50)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        embedded = self.embedding(batch["input_ids"]).transpose(1, 2)
        logits = self(self.mixer(F.pad(embedded, (2, 0))).transpose(1, 2))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        self.log("loss", loss)
        return loss


def buckets() -> Run:
    data = Sentences()
    sampler = BucketSampler([len(tokens) for tokens in data.tokens], batch_size=8)
    return Run(
        module=NextToken(), fit={"train_dataloaders": DataLoader(data, batch_sampler=sampler, collate_fn=padded)}
    )


def token_budget() -> Run:
    data = Sentences()
    sampler = TokenBudgetSampler([len(tokens) for tokens in data.tokens], tokens=80)
    return Run(
        module=NextToken(), fit={"train_dataloaders": DataLoader(data, batch_sampler=sampler, collate_fn=padded)}
    )


class WholeBatches(Dataset[tuple[Tensor, Tensor]]):
    """A dataset whose items are batches, as tables and databases give them."""

    def __init__(self) -> None:
        self.x, self.y = features(20).tensors

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        part = slice(8 * index, 8 * index + 8)
        return self.x[part], self.y[part]


def whole_batches() -> Run:
    return Run(
        module=Classifier(), fit={"train_dataloaders": DataLoader(WholeBatches(), batch_size=None, shuffle=True)}
    )


class Shards(IterableDataset[tuple[Tensor, Tensor]]):
    """A stream of which every worker reads its share."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = get_worker_info()
        share = slice(0, None) if worker is None else slice(worker.id, None, worker.num_workers)
        yield from list(features(26))[share]


def stream() -> Run:
    return Run(module=Classifier(), fit={"train_dataloaders": DataLoader(Shards(), batch_size=8)})


def sharded_stream() -> Run:
    loader = DataLoader(Shards(), batch_size=4, num_workers=2, persistent_workers=True)
    return Run(module=Classifier(), fit={"train_dataloaders": loader})


class ResumableLoader(DataLoader[tuple[Tensor, Tensor]]):
    """A loader whose position is saved in checkpoints, as torchdata's is."""

    position = 0

    def __iter__(self) -> Any:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(3)).tolist()
        while self.position < len(self):
            indices = order[8 * self.position : 8 * self.position + 8]
            self.position += 1
            yield self.collate_fn([self.dataset[index] for index in indices])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class KeepsPositions(Classifier):
    """Notes where its loader says that it is, as a checkpoint would save it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.zeros(6, dtype=torch.int64))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        (state,) = self.trainer.fit_loop._combined_loader._state_dicts()
        self.positions[self.trainer.global_step] = state["position"]


def resumable_loader() -> Run:
    loader = ResumableLoader(features(), batch_size=8)
    loader.load_state_dict({"position": 1})
    return Run(module=KeepsPositions(), fit={"train_dataloaders": loader})


@functools.cache
def own_folder() -> str:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def resumed_within_an_epoch() -> Run:
    """From a checkpoint that a plain Trainer wrote after two of three batches."""
    path = f"{own_folder()}/two_steps.ckpt"
    first = Run(module=KeepsPositions(), fit={"train_dataloaders": ResumableLoader(features(), batch_size=8)})
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(accelerator="cpu", max_steps=2, enable_checkpointing=False, **quiet)
    trainer.fit(first.module, **first.fit)
    trainer.save_checkpoint(path)
    again = ResumableLoader(features(), batch_size=8)
    return Run(module=KeepsPositions(), fit={"train_dataloaders": again, "ckpt_path": path})


class TwoSources(Classifier):
    """One loss over the batches of two loaders of the same task."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = [F.cross_entropy(self(x), y) for x, y in (batch.values() if isinstance(batch, dict) else batch)]
        self.log("loss", losses[0])
        return losses[0] + 0.5 * losses[1]


def combined(mode: str, new: int = 16) -> Run:
    loaders = {
        "old": DataLoader(features(24), batch_size=8, shuffle=True),
        "new": DataLoader(features(new), batch_size=8, shuffle=True),
    }
    return Run(module=TwoSources(), fit={"train_dataloaders": CombinedLoader(loaders, mode)})


class MakesTwoLoaders(TwoSources):
    def train_dataloader(self) -> Any:
        return [DataLoader(features(), batch_size=8), DataLoader(features(), batch_size=8, shuffle=True)]


def two_loaders() -> Run:
    return Run(module=MakesTwoLoaders(), fit={})


class Curriculum(Classifier):
    """Another loader in every epoch."""

    def train_dataloader(self) -> Any:
        easy_first = features(16 + 8 * self.current_epoch)
        return DataLoader(easy_first, batch_size=8, shuffle=self.current_epoch > 0)


def curriculum() -> Run:
    return Run(module=Curriculum(), fit={})


def validated() -> Run:
    loaders = {
        "train_dataloaders": DataLoader(features(26), batch_size=4, shuffle=True),
        "val_dataloaders": [DataLoader(features(9), batch_size=6), DataLoader(features(5), batch_size=3)],
    }
    return Run(module=ValidatedTwice(), fit=loaders)


class ValidatedTwice(Classifier):
    """What it learns next depends on what validation saw, so that a validation run too many would show."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("validated", torch.zeros(2))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("val_loss", loss)
        self.validated[dataloader_idx] += loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + 0.01 * self.validated.sum())


def small_batches() -> Run:
    return Run(module=Classifier(), fit={"train_dataloaders": DataLoader(features(24), batch_size=4, shuffle=True)})


PROGRAMS = (
    Program(name="in order", make=plain),
    Program(name="shuffled, last batch short", make=shuffled),
    Program(name="shuffled, last batch dropped", make=drop_last),
    Program(name="a sampler with weights", make=weighted_sampler),
    Program(name="a batch sampler", make=batch_sampler),
    Program(name="buckets of padded sentences", make=buckets, settings={"loss_weight": "tokens"}),
    Program(name="batches of a number of tokens", make=token_budget, settings={"loss_weight": "tokens"}),
    Program(name="items that are batches", make=whole_batches),
    Program(name="a stream", make=stream),
    Program(name="a stream sharded over persistent workers", make=sharded_stream),
    Program(name="a loader whose position is saved", make=resumable_loader),
    Program(name="resumed at a saved position", make=resumed_within_an_epoch),
    Program(name="two loaders, the shorter one cycled", make=lambda: combined("max_size_cycle")),
    Program(
        name="two loaders, one ends with a short batch",
        make=lambda: combined("max_size_cycle", new=13),
        not_sliced="batch_idx 1 has 8 and 5 samples of the loaders that are read side by side",
    ),
    Program(name="two loaders, as long as the shorter one", make=lambda: combined("min_size")),
    Program(name="a list of loaders", make=two_loaders),
    Program(
        name="another loader in every epoch", make=curriculum, trainer=lambda: {"reload_dataloaders_every_n_epochs": 1}
    ),
    Program(name="half of the epoch", make=shuffled, trainer=lambda: {"limit_train_batches": 0.5}),
    Program(name="overfitted batches", make=plain, trainer=lambda: {"overfit_batches": 2, "max_epochs": 3}),
    Program(
        name="validated within the epoch",
        make=validated,
        trainer=lambda: {"val_check_interval": 0.5, "limit_val_batches": 2},
    ),
    Program(
        name="accumulated batches",
        make=small_batches,
        trainer=lambda: {"accumulate_grad_batches": 3},
        settings={"effective_batch_size": 12},
    ),
)
