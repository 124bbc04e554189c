"""A small vision transformer, for images of a few pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn

from lightning_memfit.demo.optimization import adamw_with_schedule
from lightning_memfit.demo.transformer import Block, initialise_blocks


class ViT(LightningModule):
    """Vision transformer: patches as tokens, learned positions, pre-norm blocks, and the mean token decides.

    Source: Dosovitskiy et al., An Image is Worth 16x16 Words (arXiv 2010.11929), with the mean of the tokens in place
    of a class token (its appendix D.3).

    Args:
        image_size: height and width of the images in pixels.
        channels: colour channels of the images.
        classes: classes to tell apart.
        patch_size: height and width of a patch in pixels; divides ``image_size``.
        d_model: width of the residual stream.
        num_layers: number of blocks.
        num_heads: attention heads per block; divides ``d_model``.
        dropout: probability of dropping a value while training.
        learning_rate: highest learning rate.
        weight_decay: decay of the matrices.
        warmup_steps: optimizer steps until the highest learning rate.

    Raises:
        ValueError: if ``patch_size`` does not divide ``image_size``, or ``num_heads`` does not divide ``d_model``.
    """

    loss_unit = "nats per image"
    """What ``train_loss`` and ``val_loss`` are in."""

    def __init__(
        self,
        image_size: int = 8,
        channels: int = 1,
        classes: int = 10,
        patch_size: int = 2,
        d_model: int = 96,
        num_layers: int = 4,
        num_heads: int = 4,
        dropout: float = 0.0,
        learning_rate: float = 1e-3,
        weight_decay: float = 0.1,
        warmup_steps: int = 20,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(
                f"patch_size={patch_size} does not divide image_size={image_size}: {image_size % patch_size} pixels "
                "would be left over on each side. Choose patch_size="
                f"{max(size for size in range(1, patch_size) if image_size % size == 0)}, or another image_size."
            )
        self.save_hyperparameters()
        self.image_shape = (channels, image_size, image_size)
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.warmup_steps = warmup_steps
        self.patches = nn.Conv2d(channels, d_model, kernel_size=patch_size, stride=patch_size)
        self.positions = nn.Parameter(torch.empty((image_size // patch_size) ** 2, d_model))
        self.blocks = nn.ModuleList(Block(d_model, num_heads, dropout, causal=False) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, classes)
        # A patch of pixels of variance one becomes a token of variance one, and its position weighs half as much.
        nn.init.normal_(self.patches.weight, std=(channels * patch_size**2) ** -0.5)
        nn.init.normal_(self.positions, std=0.5)
        initialise_blocks(self.blocks, token_deviation=1.0)

    def forward(self, images: Tensor) -> Tensor:
        """Score the classes: ``(batch, channels, image_size, image_size)`` to ``(batch, classes)``.

        Raises:
            ValueError: if the images have another shape.
        """
        if images.shape[1:] != self.image_shape:
            raise ValueError(
                f"model=vit was made for images {self.image_shape} (channels, height, width), but the batch is "
                f"{tuple(images.shape)}. Choose data=digits, or set image_size and channels to those of the data."
            )
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden).mean(dim=1))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of one batch of ``(images, labels)``."""
        return self._loss(batch, "train")

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log loss and accuracy of one validation batch."""
        self._loss(batch, "val")

    def _loss(self, batch: tuple[Tensor, Tensor], part: str) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        accuracy = (logits.argmax(dim=1) == labels).float().mean()
        self.log_dict({f"{part}_loss": loss, f"{part}_accuracy": accuracy}, prog_bar=True, batch_size=images.shape[0])
        return loss

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW with a linear warm-up and a cosine over the steps of this run."""
        return adamw_with_schedule(
            self,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            warmup_steps=self.warmup_steps,
            total_steps=self.trainer.estimated_stepping_batches,
        )
