"""Small but real models of sixteen kinds, each with a batch and a loss, in files by what they are built of.

Every model peaks between 20 and 400 MiB in fp32, runs a step well under a second on one core, and has repeated blocks
that can be recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.zoo_models import attention, convolutional, feed_forward, hugging_face, recurrent
from benchmarks.zoo_models.workload import Workload


@dataclass(frozen=True)
class ZooModel:
    """One kind of model."""

    title: str
    """In tables and pictures."""
    make: Callable[[], Workload]
    """The network with new weights, and a batch for it."""


MODELS: Mapping[str, ZooModel] = {
    "mlp": ZooModel("MLP", feed_forward.mlp),
    "gpt": ZooModel("GPT", attention.gpt),
    "vit": ZooModel("ViT", attention.vit),
    "bert": ZooModel("BERT-like", attention.bert),
    "unet": ZooModel("U-Net", convolutional.unet),
    "resnet": ZooModel("ResNet-like", convolutional.resnet),
    "lstm": ZooModel("LSTM", recurrent.lstm),
    "seq2seq": ZooModel("encoder-decoder", attention.seq2seq),
    "llama": ZooModel("Llama (transformers)", hugging_face.llama),
    "bert_hf": ZooModel("BERT (transformers)", hugging_face.bert_hf),
    "t5": ZooModel("T5 (transformers)", hugging_face.t5),
    "gpt2": ZooModel("GPT-2 (transformers)", hugging_face.gpt2),
    "gru": ZooModel("GRU", recurrent.gru),
    "mobile": ZooModel("MobileNet-like", convolutional.mobile),
    "wide": ZooModel("wide MLP", feed_forward.wide),
    "big_vocabulary": ZooModel("100,000 embeddings", attention.big_vocabulary),
}
"""By the name that labels of cases begin with."""
