"""Scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels that come with the library."""

from __future__ import annotations

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

VALIDATION_EVERY = 5
"""One image in so many is kept for validation."""


class Digits(LightningDataModule):
    """Handwritten digits as batches of ``(images, labels)``: float32 ``(batch, 1, 8, 8)`` and int64 ``(batch,)``.

    Images are shifted and scaled so that the pixels of all training images have mean 0 and standard deviation 1.

    Args:
        batch_size: samples per training batch.
        validation_batch_size: samples per validation batch.
        num_workers: worker processes of each loader.
        split_seed: which images are kept for validation; the library has them in the order of the writers.
    """

    def __init__(
        self, batch_size: int = 16, validation_batch_size: int = 16, num_workers: int = 0, split_seed: int = 0
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.num_workers = num_workers
        self.split_seed = split_seed

    def setup(self, stage: str) -> None:
        """Load, divide and normalise the images once.

        Raises:
            ImportError: if scikit-learn is not installed.
        """
        if hasattr(self, "train_images"):
            return
        try:
            from sklearn.datasets import load_digits
        except ImportError as error:
            raise ImportError(
                "data=digits needs scikit-learn, which is not installed. pip install 'lightning-memfit[models]'"
            ) from error
        pixels, labels = load_digits(return_X_y=True)
        order = np.random.default_rng(self.split_seed).permutation(len(labels))
        images = pixels[order].reshape(-1, 1, 8, 8).astype(np.float32)
        labels = labels[order].astype(np.int64)
        kept = len(labels) // VALIDATION_EVERY
        mean, deviation = images[kept:].mean(), images[kept:].std()
        images = (images - mean) / deviation
        # Tensors over NumPy's memory: a data set is data of the host, no part of what a training step allocates.
        self.train_images = TensorDataset(torch.from_numpy(images[kept:]), torch.from_numpy(labels[kept:]))
        self.validation_images = TensorDataset(torch.from_numpy(images[:kept]), torch.from_numpy(labels[:kept]))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Shuffled training images; a last batch that is not full is left out."""
        return DataLoader(
            self.train_images,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        """Validation images, in a fixed order."""
        return DataLoader(
            self.validation_images,
            batch_size=self.validation_batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
