"""Batches divided again and again, as planning divides them. Run: ``pytest tests/test_batch_functions.py``."""

from __future__ import annotations

import torch

from lightning_memfit.batch_functions import BatchFunctions


def test_a_part_of_a_batch_is_divided_as_the_batch_was() -> None:
    functions = BatchFunctions(split_batch=None, loss_weight="samples")
    batch = [torch.zeros(8, 2), [torch.full((4, 1), float(image)) for image in range(8)]]
    four = functions.divide(batch, (4, 4))[1]  # four images of four boxes each could be a structure
    first, second = functions.divide(four, (3, 1))
    assert [boxes[0].item() for boxes in first[1]] == [4, 5, 6]
    assert [boxes.shape for boxes in second[1]] == [(4, 1)]


def test_what_was_found_in_batches_does_not_tell_functions_apart() -> None:
    functions = [BatchFunctions(split_batch=None, loss_weight="samples") for _ in range(2)]
    functions[0].lists_of_samples.add("[1]")
    assert functions[0] == functions[1] and hash(functions[0]) == hash(functions[1])
