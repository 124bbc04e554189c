"""The networks of published memory measurements, rebuilt: each allocates as the one that was measured.

Every network is made with real parameters, or without any memory under ``torch.device("meta")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.published_models import (
    cached_language,
    convnext,
    inception,
    language,
    low_rank,
    mobile,
    patches,
    plain_convolutions,
    residual,
)
from benchmarks.zoo_models.workload import Batch, Loss, own_loss


def _images(samples: int, side: int) -> Batch:
    return {"inputs": torch.zeros(samples, 3, side, side), "targets": torch.zeros(samples, dtype=torch.long)}


def classification_loss(network: nn.Module, batch: Batch) -> Tensor:
    """Mean cross entropy of the network's output."""
    return F.cross_entropy(network(batch["inputs"]), batch["targets"])


def _words(samples: int, length: int) -> Batch:
    ids = torch.zeros(samples, length, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def _labelled_texts(samples: int, length: int) -> Batch:
    ids = torch.zeros(samples, length, dtype=torch.long)
    mask, labels = torch.ones_like(ids), torch.zeros(samples, dtype=torch.long)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids.clone(), "labels": labels}


def _tokens(samples: int, length: int) -> Batch:
    ids = torch.zeros(samples, length, dtype=torch.long)
    return {"ids": ids, "labels": ids.clone()}


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A network that others trained and measured."""

    make: Callable[[], nn.Module]
    """The network."""
    parameters: int
    """Parameters that its authors or its library publish, tied ones counted once."""
    batch: Callable[[int, int], Batch] = _images
    """Samples, and pixels a side or tokens, to a collated batch."""
    loss: Loss = classification_loss
    """Network and batch to a scalar."""


def _llama_family(parameters: int, **numbers: int) -> PublishedModel:
    return PublishedModel(make=partial(language.llama, **numbers), parameters=parameters, batch=_words, loss=own_loss)


def _cached_gpt2(parameters: int, *, layers: int) -> PublishedModel:
    return PublishedModel(
        make=partial(cached_language.cached_gpt2, layers=layers),
        parameters=parameters,
        batch=cached_language.padded_words,
        loss=cached_language.returned_loss,
    )


def _adapted(shape: low_rank.Shape, parameters: int) -> PublishedModel:
    return PublishedModel(
        make=partial(low_rank.AdaptedLanguageModel, shape),
        parameters=parameters,
        batch=_tokens,
        loss=low_rank.next_token_loss,
    )


MODELS: Mapping[str, PublishedModel] = {
    "vgg16@torchvision": PublishedModel(make=partial(plain_convolutions.vgg, 16), parameters=138_357_544),
    "vgg19": PublishedModel(make=partial(plain_convolutions.vgg, 19), parameters=143_667_240),
    "vgg16@timm": PublishedModel(
        make=partial(plain_convolutions.vgg_with_convolutional_head, 16), parameters=138_357_544
    ),
    "resnet18": PublishedModel(make=partial(residual.resnet, 18), parameters=11_689_512),
    "resnet101": PublishedModel(make=partial(residual.resnet, 101), parameters=44_549_160),
    "resnet152": PublishedModel(make=partial(residual.resnet, 152), parameters=60_192_808),
    "mobilenet_v2": PublishedModel(make=mobile.mobilenet_v2, parameters=3_504_872),
    "efficientnet_b0@torchvision": PublishedModel(make=mobile.efficientnet_b0, parameters=5_288_548),
    "efficientnet_b0@timm": PublishedModel(
        make=partial(mobile.efficientnet_b0, regularised=False), parameters=5_288_548
    ),
    # 27,161,264 with the auxiliary classifier, which has 3,326,696.
    "inception_v3": PublishedModel(make=inception.inception_v3, parameters=23_834_568),
    "convnext_tiny@torchvision": PublishedModel(make=convnext.convnext_tiny, parameters=28_589_128),
    "convnext_tiny@timm": PublishedModel(
        make=partial(convnext.convnext_tiny, regularised=False), parameters=28_589_128
    ),
    "vit_small_patch16_224": PublishedModel(make=partial(patches.vit, "small"), parameters=22_050_664),
    "vit_base_patch16_224": PublishedModel(make=partial(patches.vit, "base"), parameters=86_567_656),
    "vit_large_patch16_224": PublishedModel(make=partial(patches.vit, "large"), parameters=304_326_632),
    "mixer_b16_224": PublishedModel(make=patches.mixer_base, parameters=59_880_472),
    "gpt2": PublishedModel(make=language.gpt2, parameters=124_439_808, batch=_words, loss=own_loss),
    "gpt2@transformers-4.51": _cached_gpt2(124_439_808, layers=12),
    "distilgpt2": _cached_gpt2(81_912_576, layers=6),
    "bert_base_masked_words": PublishedModel(
        make=language.bert_base_for_masked_words, parameters=109_514_298, batch=_words, loss=own_loss
    ),
    "bert_large_classification": PublishedModel(
        make=language.bert_large_for_classification,
        parameters=335_143_938,
        batch=_labelled_texts,
        loss=language.own_loss_with_cached_casts,
    ),
    "llama_3_8b": _llama_family(
        8_030_261_248, width=4096, hidden=14336, layers=32, heads=32, key_value_heads=8, vocabulary=128256
    ),
    "qwen3_8b": PublishedModel(make=language.qwen3_8b, parameters=8_190_735_360, batch=_words, loss=own_loss),
    # The adapters (1,572,864, 2,097,152, 4,194,304, 6,553,600) are in the numbers.
    "phi_1_5_lora": _adapted(low_rank.PHI_1_5, 1_418_270_720 + 1_572_864),
    # 2 x 50,688 x 4096 in the embeddings, 16 x (12 x 4096^2 + 13 x 4096) in the blocks, 2 x 4096 in the last norm.
    "stablelm_alpha_3b_lora": _adapted(low_rank.STABLELM_ALPHA_3B, 3_637_321_728 + 2_097_152),
    "llama_2_7b_lora": _adapted(low_rank.LLAMA_2_7B, 6_738_415_616 + 4_194_304),
    "llama_2_13b_lora": _adapted(low_rank.LLAMA_2_13B, 13_015_864_320 + 6_553_600),
}
"""By the name that rows of the data carry; ``@`` names the library where libraries differ."""
