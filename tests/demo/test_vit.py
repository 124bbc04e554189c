"""The vision transformer: its size worked out by hand, and images that it cannot take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from lightning_memfit.demo.vit import ViT


def small_vit(**settings: Any) -> ViT:
    return ViT(**{"d_model": 16, "num_layers": 2, "num_heads": 2, **settings})


def test_it_has_the_parameters_worked_out_by_hand() -> None:
    # A block of width d: 12 d^2 + 13 d, as in the GPT. Patches of 2 x 2 pixels: 4 d + d; sixteen positions: 16 d; norm
    # 2 d; head 10 d + 10.
    d = 96
    expected = 4 * (12 * d**2 + 13 * d) + 5 * d + 16 * d + 2 * d + 10 * d + 10
    assert sum(parameter.numel() for parameter in ViT().parameters()) == expected == 450_538


def test_every_patch_can_change_the_scores() -> None:
    model = small_vit()
    images = torch.randn(1, 1, 8, 8, requires_grad=True)
    model(images).square().sum().backward()
    assert images.grad is not None
    assert (images.grad != 0).all()


def test_images_of_another_shape_are_an_error_that_names_the_data() -> None:
    with pytest.raises(ValueError, match=r"images \(1, 8, 8\) .* but the batch is \(16, 256\)\. Choose data=digits"):
        small_vit()(torch.zeros(16, 256))


def test_patches_that_do_not_divide_the_image_are_an_error_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"^patch_size=3 does not divide image_size=8: 2 pixels .* patch_size=2,"):
        small_vit(patch_size=3)


def test_loss_and_accuracy_are_logged_for_as_many_images_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_vit()
    logged: dict[str, Any] = {}
    monkeypatch.setattr(model, "log_dict", lambda values, **options: logged.update(values, **options))
    images = torch.randn(8, 1, 8, 8)
    scores = model(images)
    # Right for the first six of eight: accuracy 0.75.
    labels = scores.argmax(dim=1)
    labels[6:] = (labels[6:] + 1) % 10
    loss = model.training_step((images, labels), 0)
    assert torch.equal(loss, F.cross_entropy(scores, labels))
    assert logged["train_loss"] is loss
    assert (logged["train_accuracy"].item(), logged["batch_size"]) == (0.75, 8)
