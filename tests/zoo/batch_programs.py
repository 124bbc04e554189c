"""Batches of many structures: what collation makes of samples, and what a step expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.zoo.models import WIDTH, Classifier
from tests.zoo.program import Program, Run

Sample = tuple[Tensor, Tensor]


def samples(count: int = 26) -> list[Sample]:
    """Samples of WIDTH features with one of four labels, as a list, which is a data set too."""
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(WIDTH, generator=generator), torch.randint(0, 4, (), generator=generator)) for _ in range(count)
    ]


class NamedBatch(NamedTuple):
    features: Tensor
    labels: Tensor


@dataclass
class BatchOfADataclass:
    features: Tensor
    labels: Tensor
    names: tuple[str, ...]
    temperature: float = 0.5


class Of(Classifier):
    """A classifier that finds features and labels in a batch of its own structure."""

    def __init__(self, read: Callable[[Any], Sample]) -> None:
        super().__init__()
        self.read = read

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        features, labels = self.read(batch)
        loss = F.cross_entropy(self(features), labels)
        self.log("loss", loss, batch_size=len(labels))
        return {"loss": loss, "labels": labels}


def of(collate: Callable[[Tensor, Tensor], Any], read: Callable[[Any], Sample]) -> Callable[[], Run]:
    """A program whose collation makes something else of stacked features and labels."""

    def made(parts: list[Sample]) -> Any:
        return collate(torch.stack([x for x, _ in parts]), torch.stack([y for _, y in parts]))

    def make() -> Run:
        loader = DataLoader(samples(), batch_size=8, shuffle=True, collate_fn=made)  # type: ignore[arg-type]
        return Run(module=Of(read), fit={"train_dataloaders": loader})

    return make


def encoded() -> Run:
    """What tokenizers of transformers return, which is no dict but behaves like one."""
    from transformers import BatchEncoding

    return of(
        lambda x, y: BatchEncoding({"features": x, "labels": y}), lambda batch: (batch["features"], batch["labels"])
    )()


# Detection: images, and for each of them as many boxes as it has.


def photographs() -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Images with one to three boxes; the last two, which make a short batch, have two each."""
    generator = torch.Generator().manual_seed(7)
    counts = [1 + index % 3 for index in range(24)] + [2, 2]
    return [
        (torch.randn(1, 8, 8, generator=generator), {"boxes": torch.rand(count, 4, generator=generator)})
        for count in counts
    ]


class Detector(Classifier):
    """The mean over images of how far the one box that it finds is from all that are there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, targets = batch
        found = self(images.flatten(1))
        errors = [(box - target["boxes"]).square().mean() for box, target in zip(found, targets, strict=True)]
        return torch.stack(errors).mean()


def listed(parts: Any) -> Any:
    return torch.stack([image for image, _ in parts]), [target for _, target in parts]


def ragged_targets() -> Run:
    loader = DataLoader(photographs(), batch_size=8, collate_fn=listed)  # type: ignore[arg-type]
    return Run(module=Detector(), fit={"train_dataloaders": loader})


def four_targets() -> Run:
    """As many as there are samples in the first comparison of slices with the whole."""
    data = [(image, {"boxes": target["boxes"][:1].repeat(4, 1)}) for image, target in photographs()]
    loader = DataLoader(data, batch_size=8, collate_fn=listed)  # type: ignore[arg-type]
    return Run(module=Detector(), fit={"train_dataloaders": loader})


class FlatDetector(Detector):
    """The same of boxes in one tensor, each with the number of its image."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        images, boxes = batch
        found, owner = self(images.flatten(1)), boxes[:, 0].long()
        errors = (found[owner] - boxes[:, 1:]).square().mean(1)
        none = torch.zeros(len(images))
        return (none.index_add(0, owner, errors) / none.index_add(0, owner, torch.ones_like(errors))).mean()


def flat_targets() -> Run:
    def collate(parts: Any) -> Any:
        rows = [F.pad(target["boxes"], (1, 0), value=float(number)) for number, (_, target) in enumerate(parts)]
        return torch.stack([image for image, _ in parts]), torch.cat(rows)

    loader = DataLoader(photographs(), batch_size=8, collate_fn=collate)  # type: ignore[arg-type]
    return Run(module=FlatDetector(), fit={"train_dataloaders": loader})


def split_flat_targets(batch: Any, micro_batch_size: int) -> list[tuple[Any, int]]:
    images, boxes = batch
    parts = []
    for start in range(0, len(images), micro_batch_size):
        part = images[start : start + micro_batch_size]
        own = boxes[(boxes[:, 0] >= start) & (boxes[:, 0] < start + len(part))].clone()
        own[:, 0] -= start
        parts.append(((part, own), len(part)))
    return parts


# Graphs: nodes of all graphs in one tensor, and which graph each belongs to.


@dataclass
class Graphs:
    """A batch of graphs as libraries for graphs make it."""

    nodes: Tensor
    edges: Tensor
    graph: Tensor
    labels: Tensor


class SomeGraphs(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Rings of 3 to 6 nodes."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        size = 3 + index % 4
        nodes = torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(index))
        ring = torch.stack([torch.arange(size), (torch.arange(size) + 1) % size])
        return nodes, ring, torch.tensor(size % 4)


def collate_graphs(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Graphs:
    sizes = torch.tensor([len(nodes) for nodes, _, _ in parts])
    starts = sizes.cumsum(0) - sizes
    return Graphs(
        nodes=torch.cat([nodes for nodes, _, _ in parts]),
        edges=torch.cat([edges + start for (_, edges, _), start in zip(parts, starts, strict=True)], dim=1),
        graph=torch.arange(len(parts)).repeat_interleave(sizes),
        labels=torch.stack([label for _, _, label in parts]),
    )


class GraphClassifier(Classifier):
    """One round of messages along the edges, then the sum over each graph's nodes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hidden = self.blocks(batch.nodes)
        hidden = hidden.index_add(0, batch.edges[1], hidden[batch.edges[0]])
        pooled = torch.zeros(len(batch.labels), WIDTH).index_add(0, batch.graph, hidden)
        return F.cross_entropy(self.head(pooled), batch.labels)


def graphs() -> Run:
    loader = DataLoader(SomeGraphs(), batch_size=8, shuffle=True, collate_fn=collate_graphs)
    return Run(module=GraphClassifier(), fit={"train_dataloaders": loader})


def split_graphs(batch: Graphs, micro_batch_size: int) -> list[tuple[Graphs, int]]:
    parts = []
    for start in range(0, len(batch.labels), micro_batch_size):
        labels = batch.labels[start : start + micro_batch_size]
        inside = (batch.graph >= start) & (batch.graph < start + len(labels))
        first = int(inside.long().argmax())
        part = Graphs(
            nodes=batch.nodes[inside],
            edges=batch.edges[:, inside[batch.edges[0]]] - first,
            graph=batch.graph[inside] - start,
            labels=labels,
        )
        parts.append((part, len(labels)))
    return parts


# Numbers of other kinds.


class Readings(Dataset[dict[str, Tensor]]):
    """Series of 6 readings in double precision, some missing, with a 32-bit label at each."""

    def __len__(self) -> int:
        return 26

    def present(self, index: int) -> Tensor:
        return torch.arange(6) <= index % 6

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "values": torch.randn(6, WIDTH, generator=generator, dtype=torch.float64),
            "classes": torch.randint(0, 4, (6,), generator=generator, dtype=torch.int32),
            "present": self.present(index),
        }


class HalfOfTheReadings(Readings):
    """As many are missing in each series, since what cannot be traced is forecast by a line through equal samples."""

    def present(self, index: int) -> Tensor:
        return torch.randperm(6, generator=torch.Generator().manual_seed(index)) < 3


class MaskedMean(Classifier):
    """The mean over readings that are there, by a mask that multiplies."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits, classes, present = self(batch["values"].float()), batch["classes"].long(), batch["present"]
        losses = F.cross_entropy(logits.flatten(0, 1), classes.flatten(), reduction="none")
        return (losses * present.flatten()).sum() / present.sum()


class MaskedChoice(Classifier):
    """The same by a mask that chooses: how many readings are left is known only when it runs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        present = batch["present"]
        return F.cross_entropy(self(batch["values"].float()[present]), batch["classes"].long()[present])


def readings(module: type[nn.Module], data: Readings) -> Callable[[], Run]:
    return lambda: Run(module=module(), fit={"train_dataloaders": DataLoader(data, batch_size=8, shuffle=True)})


def count_present(batch: Any) -> float:
    return float(batch["present"].sum())


PROGRAMS = (
    Program(
        name="a dict",
        make=of(lambda x, y: {"x": x, "y": y, "weight": torch.tensor(0.5)}, lambda batch: (batch["x"], batch["y"])),
    ),
    Program(
        name="a dataclass",
        make=of(
            lambda x, y: BatchOfADataclass(x, y, tuple("abcdefgh"[: len(y)])),
            lambda batch: (batch.features * batch.temperature, batch.labels),
        ),
    ),
    Program(name="a named tuple", make=of(NamedBatch, lambda batch: (batch.features, batch.labels))),
    Program(name="a batch encoding", make=encoded),
    Program(
        name="nested lists",
        make=of(
            lambda x, y: [[x[:, :40], [x[:, 40:]]], y],
            lambda batch: (torch.cat([batch[0][0], *batch[0][1]], 1), batch[1]),
        ),
    ),
    Program(name="targets of any number per image", make=ragged_targets, micro_batch_size=1),
    Program(name="four targets per image", make=four_targets),
    Program(
        name="targets of all images in one tensor",
        make=flat_targets,
        not_sliced="batch[1] has shape (17, 5), but batch[0] of shape (8, 1, 8, 8) means 8 samples",
    ),
    Program(
        name="targets in one tensor, split by the user",
        make=flat_targets,
        settings={"split_batch": split_flat_targets},
    ),
    Program(name="graphs", make=graphs, not_sliced="batch.edges has shape (2, "),
    Program(name="graphs split by the user", make=graphs, settings={"split_batch": split_graphs}),
    Program(
        name="readings with a mask", make=readings(MaskedMean, Readings()), settings={"loss_weight": count_present}
    ),
    Program(
        name="readings chosen by a mask",
        make=readings(MaskedChoice, HalfOfTheReadings()),
        settings={"loss_weight": count_present},
        traceable=False,
    ),
)
