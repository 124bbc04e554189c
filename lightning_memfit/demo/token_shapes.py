"""Batches of token ids by their shape alone: for plans, which need no tokens."""

from __future__ import annotations

import torch

from lightning_memfit.demo.byte_text import ByteSample


def token_shapes(batch_size: int, sequence_length: int) -> list[ByteSample]:
    """A loader of one batch, every token the first of the vocabulary.

    Args:
        batch_size: sequences per batch.
        sequence_length: tokens per sequence.

    Raises:
        ValueError: if one of them is less than 1.
    """
    if batch_size < 1 or sequence_length < 1:
        raise ValueError(f"batch_size={batch_size} and sequence_length={sequence_length} must be at least 1.")
    ids = torch.zeros(batch_size, sequence_length, dtype=torch.long)
    return [ByteSample(ids, ids.clone())]
