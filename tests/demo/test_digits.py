"""Handwritten digits: divided once and for all, normalised by what is trained on."""

from __future__ import annotations

import sys

import pytest
import torch

from lightning_memfit.demo.digits import Digits


@pytest.fixture(scope="module")
def digits() -> Digits:
    data = Digits()
    data.setup("fit")
    return data


def test_every_image_is_in_one_part(digits: Digits) -> None:
    # 1,797 images, one in five for validation: 359.
    assert (len(digits.train_images), len(digits.validation_images)) == (1438, 359)
    images = digits.train_images.tensors[0]
    digits.setup("validate")
    assert digits.train_images.tensors[0] is images


def test_training_pixels_have_mean_zero_and_deviation_one(digits: Digits) -> None:
    images, _ = digits.train_images.tensors
    assert images.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert images.std(correction=0).item() == pytest.approx(1.0, abs=1e-5)
    assert digits.validation_images.tensors[0].mean().item() == pytest.approx(0.0, abs=0.05)


def test_both_parts_hold_every_digit(digits: Digits) -> None:
    for part in (digits.train_images, digits.validation_images):
        counts = torch.bincount(part.tensors[1], minlength=10)
        assert len(counts) == 10
        assert counts.min() > 0.05 * counts.sum()


def test_batches_have_the_shapes_of_images_and_labels(digits: Digits) -> None:
    images, labels = next(iter(digits.train_dataloader()))
    assert (images.shape, images.dtype) == ((16, 1, 8, 8), torch.float32)
    assert (labels.shape, labels.dtype) == ((16,), torch.int64)
    first, again = (next(iter(digits.val_dataloader()))[0] for _ in range(2))
    assert torch.equal(first, again)


def test_the_parts_depend_on_the_seed_alone(digits: Digits) -> None:
    same, other = Digits(), Digits(split_seed=1)
    for data in (same, other):
        data.setup("fit")
    assert torch.equal(same.validation_images.tensors[1], digits.validation_images.tensors[1])
    assert not torch.equal(other.validation_images.tensors[1], digits.validation_images.tensors[1])


def test_without_scikit_learn_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        ImportError, match=r"data=digits needs scikit-learn, .* pip install 'lightning-memfit\[models\]'"
    ):
        Digits().setup("fit")
