"""Attention on torch's own layers: GPT, ViT, BERT-like, encoder-decoder, and one with a large vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo_models.workload import Workload


class AttentionBlock(nn.Module):
    """Pre-norm self-attention and feed-forward, as in GPT-2 and ViT."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        """``(batch, sequence, width)`` to the same."""
        batch, length, width = hidden.shape
        qkv = self.qkv(self.norm_attention(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.mlp(self.norm_mlp(hidden))


class GPT(nn.Module):
    """Causal language model; the output layer shares the embedding's weights."""

    def __init__(self, vocabulary: int = 4096, length: int = 128, width: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads=6, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, sequence)`` to ``(batch, sequence, vocabulary)``."""
        hidden = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class ViT(nn.Module):
    """Vision transformer with a class token."""

    def __init__(self, image: int = 64, patch: int = 8, width: int = 192, depth: int = 4, classes: int = 100) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads=3, causal=False) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """``(batch, 3, height, width)`` to ``(batch, classes)``."""
        patches = self.patches(images).flatten(2).transpose(1, 2)
        hidden = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden[:, 0]))


class Bert(nn.Module):
    """Masked language model on torch's own encoder, with padding and dropout."""

    def __init__(self, vocabulary: int = 4096, length: int = 96, width: int = 192, depth: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(0.1)
        layer = nn.TransformerEncoderLayer(
            width, nhead=6, dim_feedforward=4 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor, padding: Tensor) -> Tensor:
        """``(batch, sequence)`` and its padding mask (true where padded) to ``(batch, sequence, vocabulary)``."""
        hidden = self.dropout(self.norm(self.tokens(ids) + self.positions.weight[: ids.shape[1]]))
        return self.head(self.encoder(hidden, src_key_padding_mask=padding))


class Seq2Seq(nn.Module):
    """Translation model on torch's own encoder and decoder, with padding on both sides and dropout."""

    def __init__(self, vocabulary: int = 2048, length: int = 64, width: int = 128, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.positions = nn.Embedding(length, width)
        self.transformer = nn.Transformer(
            width,
            nhead=4,
            num_encoder_layers=depth,
            num_decoder_layers=depth,
            dim_feedforward=4 * width,
            dropout=0.1,
            batch_first=True,
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, translated: Tensor) -> Tensor:
        """``(batch, sequence)`` of both languages, 0 where padded, to ``(batch, sequence, vocabulary)``."""
        length = translated.shape[1]
        later = torch.triu(torch.ones(length, length, dtype=torch.bool, device=source.device), diagonal=1)
        hidden = self.transformer(
            self._embedded(source),
            self._embedded(translated),
            tgt_mask=later,
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=translated == 0,
            memory_key_padding_mask=source == 0,
        )
        return self.head(hidden)

    def _embedded(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]]


class BigVocabulary(nn.Module):
    """Next-item model whose 100,000 embeddings are nearly all of its parameters; the output layer shares them."""

    def __init__(self, vocabulary: int = 100_000, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.items = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads=4, causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.items.weight
        nn.init.normal_(self.items.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """``(batch, sequence)`` to ``(batch, sequence, vocabulary)``."""
        hidden = self.items(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def gpt() -> Workload:
    """Whole sequences."""
    ids = torch.randint(4096, (8, 129))
    return Workload(network=GPT(), batch={"ids": ids[:, :-1], "targets": ids[:, 1:]})


def vit() -> Workload:
    """Images."""
    return Workload(network=ViT(), batch={"images": torch.randn(16, 3, 64, 64), "targets": torch.randint(100, (16,))})


def bert() -> Workload:
    """Sequences of falling length, one token in seven to be guessed; padding never is."""
    ids = torch.randint(1, 4096, (8, 96))
    padding = is_padding(samples=8, longest=96, step=8)
    ids = ids.masked_fill(padding, 0)
    guessed = (torch.arange(96) % 7 == 0) & ~padding
    batch = {"ids": ids.masked_fill(guessed, 1), "padding": padding, "targets": ids.masked_fill(~guessed, -100)}
    return Workload(network=Bert(), batch=batch)


def seq2seq() -> Workload:
    """Pairs of sequences, the source padded more than the translation."""
    source = torch.randint(1, 2048, (8, 64)).masked_fill(is_padding(samples=8, longest=64), 0)
    translated = torch.randint(1, 2048, (8, 49)).masked_fill(is_padding(samples=8, longest=49, step=2), 0)
    wanted = translated[:, 1:]
    batch = {"source": source, "translated": translated[:, :-1], "targets": wanted.masked_fill(wanted == 0, -100)}
    return Workload(network=Seq2Seq(), batch=batch)


def big_vocabulary() -> Workload:
    """Few and short histories of items."""
    ids = torch.randint(100_000, (4, 9))
    return Workload(network=BigVocabulary(), batch={"ids": ids[:, :-1], "targets": ids[:, 1:]})


def is_padding(*, samples: int, longest: int, step: int = 7) -> Tensor:
    """Flags of ``(samples, longest)``, true where padded: each sample is ``step`` shorter than the one before."""
    lengths = longest - step * torch.arange(samples)
    return torch.arange(longest) >= lengths[:, None]
