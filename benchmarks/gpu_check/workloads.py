"""The networks of the check: those of the zoo and of published measurements, in sizes for a GPU and tiny for a CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from benchmarks import published_models
from benchmarks.zoo_models.attention import GPT, Bert, BigVocabulary, Seq2Seq, ViT, is_padding
from benchmarks.zoo_models.convolutional import MobileNet, ResNet, UNet
from benchmarks.zoo_models.feed_forward import MLP
from benchmarks.zoo_models.recurrent import RecurrentModel
from benchmarks.zoo_models.workload import Batch, Workload

Size = Literal["full", "small"]
"""``"full"`` is for a GPU of 16 GB or more, ``"small"`` runs in a moment on one core."""


@dataclass(frozen=True, kw_only=True)
class CheckedModel:
    """A network that is measured, in both sizes."""

    network: Callable[[Size], nn.Module]
    """Makes it with new weights."""
    batch: Callable[[Size, int], Batch]
    """Size and samples to a collated batch."""
    samples: Mapping[Size, int]
    """Samples of the batch where nothing else is asked for."""
    loss: Callable[[nn.Module, Batch], Tensor] | None = None
    """Network and batch to a scalar; ``None`` is the zoo's cross entropy."""

    def workload(self, size: Size, samples: int | None = None) -> Workload:
        """The network and a batch; seeded, and the global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            batch = self.batch(size, self.samples[size] if samples is None else samples)
            batch = {name: tensor.contiguous() for name, tensor in batch.items()}
            if self.loss is None:
                return Workload(network=self.network(size), batch=batch)
            return Workload(network=self.network(size), batch=batch, loss=self.loss)


def _of(size: Size, full: int, small: int) -> int:
    return full if size == "full" else small


def _features(size: Size, samples: int) -> Batch:
    return {"inputs": torch.randn(samples, _of(size, 4096, 32)), "targets": torch.randint(10, (samples,))}


def _words(full: tuple[int, int], small: tuple[int, int], size: Size, samples: int) -> Batch:
    """Whole sequences; pairs are vocabulary and length."""
    vocabulary, length = full if size == "full" else small
    ids = torch.randint(vocabulary, (samples, length + 1))
    return {"ids": ids[:, :-1], "targets": ids[:, 1:]}


def _guessed_words(size: Size, samples: int) -> Batch:
    vocabulary, longest = (30522, 512) if size == "full" else (256, 32)
    padding = is_padding(samples=samples, longest=longest, step=longest // (2 * samples) or 1)
    ids = torch.randint(1, vocabulary, (samples, longest)).masked_fill(padding, 0)
    return {"ids": ids, "padding": padding, "targets": ids.masked_fill(padding, -100)}


def _pairs(size: Size, samples: int) -> Batch:
    vocabulary, length = (16384, 256) if size == "full" else (256, 16)
    source, wanted = (torch.randint(1, vocabulary, (samples, length)) for _ in range(2))
    return {"source": source, "translated": wanted[:, :-1], "targets": wanted[:, 1:]}


def _images(side: tuple[int, int], classes: int, size: Size, samples: int) -> Batch:
    pixels = side[0] if size == "full" else side[1]
    return {"images": torch.randn(samples, 3, pixels, pixels), "targets": torch.randint(classes, (samples,))}


def _segmented(size: Size, samples: int) -> Batch:
    side = _of(size, 256, 32)
    return {"images": torch.randn(samples, 3, side, side), "targets": torch.randint(4, (samples, side, side))}


def _mlp(full: tuple[int, int], small: tuple[int, int], size: Size) -> nn.Module:
    width, depth = full if size == "full" else small
    return MLP(features=_of(size, 4096, 32), width=width, depth=depth)


def _gpt(full: tuple[int, int, int, int], size: Size) -> nn.Module:
    vocabulary, length, width, depth = full if size == "full" else (256, 32, 48, 2)
    return GPT(vocabulary, length, width, depth)


def _vit(size: Size) -> nn.Module:
    return ViT(224, 16, 768, 12, 1000) if size == "full" else ViT(32, 8, 48, 2, 10)


def _bert(size: Size) -> nn.Module:
    return Bert(30522, 512, 768, 6) if size == "full" else Bert(256, 32, 48, 2)


def _seq2seq(size: Size) -> nn.Module:
    return Seq2Seq(16384, 256, 512, 4) if size == "full" else Seq2Seq(256, 16, 32, 2)


def _big_vocabulary(size: Size) -> nn.Module:
    return BigVocabulary(200_000, 512, 4) if size == "full" else BigVocabulary(4096, 16, 2)


def _resnet(size: Size) -> nn.Module:
    return ResNet((64, 128, 256), 10) if size == "full" else ResNet((8, 16, 32), 10)


def _unet(size: Size) -> nn.Module:
    return UNet((32, 64, 128)) if size == "full" else UNet((4, 8, 16))


def _mobile(size: Size) -> nn.Module:
    return MobileNet((32, 64, 128), 4, 10) if size == "full" else MobileNet((8, 16, 32), 2, 10)


def _recurrent(kind: type[nn.LSTM] | type[nn.GRU], dropout: float, size: Size) -> nn.Module:
    vocabulary, width, depth = (16384, 1024, 2) if size == "full" else (128, 32, 2)
    return RecurrentModel(kind, vocabulary, width, depth, dropout)


def _published(name: str, shape: int, samples: int) -> CheckedModel:
    """A network of the published measurements, in its one size; not for a CPU."""
    model = published_models.MODELS[name]
    return CheckedModel(
        network=lambda _: model.make(),
        batch=lambda _, count: model.batch(count, shape),
        samples={"full": samples, "small": 1},
        loss=model.loss,
    )


def _model(
    network: Callable[[Size], nn.Module], batch: Callable[[Size, int], Batch], *, full: int, small: int
) -> CheckedModel:
    return CheckedModel(network=network, batch=batch, samples={"full": full, "small": small})


_LANGUAGE = partial(_words, (32000, 1024), (256, 32))
_SPOKEN = partial(_words, (16384, 256), (128, 4))

MODELS: Mapping[str, CheckedModel] = {
    "mlp": _model(partial(_mlp, (4096, 8), (64, 2)), _features, full=16384, small=256),
    "gpt": _model(partial(_gpt, (32000, 1024, 768, 12)), _LANGUAGE, full=8, small=8),
    "vit": _model(_vit, partial(_images, (224, 32), 10), full=32, small=8),
    "resnet": _model(_resnet, partial(_images, (128, 16), 10), full=64, small=8),
    "lstm": _model(partial(_recurrent, nn.LSTM, 0.0), _SPOKEN, full=32, small=8),
    "bert": _model(_bert, _guessed_words, full=8, small=8),
    "wide": _model(partial(_mlp, (8192, 3), (128, 3)), _features, full=64, small=8),
    "unet": _model(_unet, _segmented, full=8, small=4),
    "big_vocabulary": _model(_big_vocabulary, partial(_words, (200_000, 16), (4096, 8)), full=8, small=4),
    "seq2seq": _model(_seq2seq, _pairs, full=16, small=4),
    "mobile": _model(_mobile, partial(_images, (128, 16), 10), full=32, small=4),
    "gru": _model(partial(_recurrent, nn.GRU, 0.1), _SPOKEN, full=32, small=8),
}
"""By name, the most telling first: what the time allows is taken from the front."""

PUBLISHED: Mapping[str, CheckedModel] = {
    "resnet101": _published("resnet101", 224, 32),
    "vit_base_patch16_224": _published("vit_base_patch16_224", 224, 32),
    "convnext_tiny": _published("convnext_tiny@torchvision", 224, 32),
    "vgg16": _published("vgg16@torchvision", 224, 32),
    "efficientnet_b0": _published("efficientnet_b0@torchvision", 224, 32),
    "mixer_b16_224": _published("mixer_b16_224", 224, 32),
    "inception_v3": _published("inception_v3", 299, 32),
    "phi_1_5_lora": _published("phi_1_5_lora", 512, 2),
}
"""Larger ones, for a GPU only."""


def models_of(size: Size) -> Mapping[str, CheckedModel]:
    """The models that are checked in a size."""
    return {**MODELS, **PUBLISHED} if size == "full" else MODELS
