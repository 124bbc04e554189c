"""What a slice's mean loss counts. Run: ``pytest tests/apply/test_slicing.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_memfit.apply.slicing import weight_of
from lightning_memfit.errors import ConfigurationError

BATCH: dict[str, Any] = {"labels": torch.tensor([[5, 6, 7, -100], [-100, 8, 9, 10]])}


@pytest.mark.parametrize(("word", "weight"), [("samples", 2), ("tokens", 6), ("next-tokens", 5)])
def test_words_count_samples_labels_and_labels_that_something_predicts(word: str, weight: int) -> None:
    # Of the first sample 6 and 7 are predicted, of the second 8, 9 and 10.
    assert weight_of(BATCH, 2, word) == weight


def test_labels_of_whole_samples_have_nothing_in_front_of_them() -> None:
    assert weight_of({"labels": torch.tensor([1, 2, -100])}, 3, "next-tokens") == 2


def test_a_batch_without_labels_names_the_word_that_needs_them() -> None:
    with pytest.raises(ConfigurationError, match=r"loss_weight='next-tokens' counts batch\['labels'\] other than -100"):
        weight_of({"x": torch.zeros(2)}, 2, "next-tokens")
