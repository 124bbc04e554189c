"""Real text that every machine has: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

if TYPE_CHECKING:
    Window = tuple[Tensor, Tensor]

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
VALIDATION_EVERY = 10
"""One file in so many is kept for validation."""


def library_files(root: Path) -> Iterator[Path]:
    """Yield the ``.py`` files below ``root`` in sorted order, without tests and installed packages."""
    for path in sorted(root.rglob("*.py")):
        if not _NOT_LIBRARY.intersection(path.relative_to(root).parts):
            yield path


def read_library(root: Path, max_bytes: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Read whole files until there are ``max_bytes`` of text, and divide them by file.

    Args:
        root: directory to read.
        max_bytes: where to stop, over both parts; the last file is cut.

    Returns:
        Training and validation text, each a vector of bytes. Every tenth file is validation.

    Raises:
        FileNotFoundError: if there are too few files to divide.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    remaining = max_bytes
    for index, path in enumerate(library_files(root)):
        if remaining <= 0:
            break
        text = path.read_bytes()[:remaining]
        remaining -= len(text)
        parts[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].append(text)
    if not parts[1]:
        raise FileNotFoundError(
            f"{root} gave {len(parts[0])} Python files within max_bytes={max_bytes}; at least {VALIDATION_EVERY} are "
            "needed to keep one for validation. Raise max_bytes, or name a directory of text with root=."
        )
    # Kept in numpy: a corpus is data of the host, no part of what a training step allocates.
    train, validation = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    return train, validation


class ByteWindows(Dataset["Window"]):
    """Windows that lie side by side: window ``i`` predicts bytes ``i * length + 1`` to ``(i + 1) * length``.

    Args:
        text: the bytes, uint8 ``(length of the text,)``.
        sequence_length: bytes per window.

    Raises:
        ValueError: if the text is shorter than one window and the byte after it.
    """

    def __init__(self, text: npt.NDArray[np.uint8], sequence_length: int) -> None:
        self.num_windows = (len(text) - 1) // sequence_length
        if self.num_windows < 1:
            raise ValueError(
                f"sequence_length={sequence_length} needs {sequence_length + 1} bytes of text, "
                f"but there are {len(text)}. Use a shorter sequence or more text."
            )
        self.text = text
        self.sequence_length = sequence_length

    def __len__(self) -> int:
        """Number of windows."""
        return self.num_windows

    def __getitem__(self, index: int) -> Window:
        """Inputs and targets of one window, both int64 ``(sequence_length,)``."""
        if not 0 <= index < self.num_windows:
            raise IndexError(f"window {index} of {self.num_windows}")
        start = index * self.sequence_length
        window = torch.from_numpy(self.text[start : start + self.sequence_length + 1].astype(np.int64))
        return window[:-1], window[1:]


class StdlibText(LightningDataModule):
    """The Python standard library's source as batches of ``(inputs, targets)``, both int64 ``(batch, sequence)``.

    Args:
        sequence_length: bytes per sample.
        batch_size: samples per training batch.
        validation_batch_size: samples per validation batch.
        max_bytes: how much text to read, over training and validation.
        num_workers: worker processes of each loader.
        root: directory of ``.py`` files; ``None`` means the standard library of the running Python.
    """

    def __init__(
        self,
        sequence_length: int = 256,
        batch_size: int = 16,
        validation_batch_size: int = 4,
        max_bytes: int = 8 * 1024**2,
        num_workers: int = 0,
        root: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.max_bytes = max_bytes
        self.num_workers = num_workers
        self.root = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))

    def setup(self, stage: str) -> None:
        """Read the text once."""
        if hasattr(self, "train_windows"):
            return
        train, validation = read_library(self.root, self.max_bytes)
        self.train_windows = ByteWindows(train, self.sequence_length)
        self.validation_windows = ByteWindows(validation, self.sequence_length)

    def train_dataloader(self) -> DataLoader[Window]:
        """Shuffled windows of the training files; a last batch that is not full is left out."""
        return DataLoader(
            self.train_windows,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )

    def val_dataloader(self) -> DataLoader[Window]:
        """Windows of the validation files, in order."""
        return DataLoader(
            self.validation_windows,
            batch_size=self.validation_batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
        )
