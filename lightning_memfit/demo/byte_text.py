"""Text as bytes: windows of equal length, lines or paragraphs, and the loaders that batch them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

NO_LABEL = -100
"""The label of a position that no loss counts. Source: ``torch.nn.functional.cross_entropy``, ``ignore_index``."""
VALIDATION_EVERY = 10
"""One file in so many, or one byte in so many at the end, is kept for validation."""

Text = npt.NDArray[np.uint8]
"""Bytes, ``(length of the text,)``; in numpy, since a corpus is no part of what a training step allocates."""
SAMPLES = ("windows", "lines", "paragraphs")
"""What a sample is: a window, all of one length, or a line or paragraph, padded to the longest of its batch."""

_ENDS = {"lines": re.compile(rb"\n"), "paragraphs": re.compile(rb"\n\s*\n")}


class ByteSample(NamedTuple):
    """A sample or a batch of samples: bytes, and the byte that follows each of them."""

    inputs: Tensor
    """Bytes, int64 ``(sequence,)`` or ``(batch, sequence)``."""
    labels: Tensor
    """The bytes that follow, of the same shape; ``NO_LABEL`` where there is none."""


class ByteWindows(Dataset[ByteSample]):
    """Windows that lie side by side: window ``i`` predicts bytes ``i * length + 1`` to ``(i + 1) * length``.

    Args:
        text: the bytes.
        sequence_length: bytes per window.

    Raises:
        ValueError: if the text is shorter than one window and the byte after it.
    """

    def __init__(self, text: Text, sequence_length: int) -> None:
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

    def __getitem__(self, index: int) -> ByteSample:
        """Inputs and labels of one window, both ``(sequence_length,)``."""
        if not 0 <= index < self.num_windows:
            raise IndexError(f"window {index} of {self.num_windows}")
        start = index * self.sequence_length
        return _sample(self.text[start : start + self.sequence_length + 1])


class ByteSpans(Dataset[ByteSample]):
    """Lines or paragraphs, each a sample of its own length.

    Args:
        text: the bytes.
        sequence_length: most bytes per sample; longer ones are cut into pieces.
        samples: ``"lines"``, or ``"paragraphs"`` for what stands between blank lines.

    Raises:
        ValueError: if none has the two bytes that make an input and a label.
    """

    def __init__(self, text: Text, sequence_length: int, samples: str) -> None:
        self.spans = np.array(list(find_spans(text.tobytes(), samples, sequence_length + 1)), dtype=np.int64)
        if not len(self.spans):
            raise ValueError(
                f"samples={samples!r} needs a line of at least 2 bytes, an input and the byte after it, but "
                f"{len(text)} bytes of text hold none. Use more text, or samples='windows'."
            )
        self.text = text

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.spans)

    def __getitem__(self, index: int) -> ByteSample:
        """Inputs and labels of one sample, both ``(its bytes - 1,)``."""
        if not 0 <= index < len(self.spans):
            raise IndexError(f"sample {index} of {len(self.spans)}")
        start, end = self.spans[index]
        return _sample(self.text[start:end])


def find_spans(text: bytes, samples: str, longest: int) -> Iterator[tuple[int, int]]:
    r"""Yield where the lines or paragraphs of a text begin and end, in order; the end of a line is part of it.

    Args:
        text: the text.
        samples: ``"lines"`` or ``"paragraphs"``.
        longest: most bytes of one span; what is longer is cut. A span of a single byte is left out.

    >>> text = b"ab\n\ncdefg"
    >>> [text[start:end] for start, end in find_spans(text, "paragraphs", longest=4)]
    [b'ab\n', b'cdef']
    """
    begin = 0
    ends = [(found.start() + 1, found.end()) for found in _ENDS[samples].finditer(text)]
    for end, following in [*ends, (len(text), len(text))]:
        for start in range(begin, end, longest):
            if min(start + longest, end) - start >= 2:
                yield start, min(start + longest, end)
        begin = following


def pad_samples(samples: Sequence[ByteSample]) -> ByteSample:
    """A batch as long as its longest sample; shorter ones are filled up with zeros, which have no label."""
    return ByteSample(
        inputs=pad_sequence([sample.inputs for sample in samples], batch_first=True),
        labels=pad_sequence([sample.labels for sample in samples], batch_first=True, padding_value=NO_LABEL),
    )


def _sample(text: Text) -> ByteSample:
    window = torch.from_numpy(text.astype(np.int64))
    return ByteSample(inputs=window[:-1], labels=window[1:])


class ByteText(LightningDataModule):
    """Text as batches of ``(inputs, labels)``, both int64 ``(batch, sequence)``; what text it is, a subclass reads.

    Args:
        sequence_length: bytes per sample, or the most of them.
        batch_size: samples per training batch.
        validation_batch_size: samples per validation batch.
        num_workers: worker processes of each loader.
        samples: ``"windows"`` of equal length; ``"lines"`` or ``"paragraphs"``, padded to the longest of their batch.

    Raises:
        ValueError: if ``samples`` is none of these.
    """

    def __init__(
        self, *, sequence_length: int, batch_size: int, validation_batch_size: int, num_workers: int, samples: str
    ) -> None:
        super().__init__()
        if samples not in SAMPLES:
            raise ValueError(
                f"samples={samples!r} is not known. Choose 'windows' of {sequence_length} bytes each, or 'lines' or "
                f"'paragraphs' of at most {sequence_length} bytes, padded to the longest of their batch."
            )
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        self.num_workers = num_workers
        self.samples = samples

    def read(self) -> tuple[Text, Text]:
        """Training and validation text."""
        raise NotImplementedError(f"{type(self).__name__} reads no text: override read().")

    def setup(self, stage: str) -> None:
        """Read the text once.

        Raises:
            ValueError: if it does not fill a batch of training and a sample of validation.
        """
        if hasattr(self, "train_samples"):
            return
        train, validation = self.read()
        train_samples = self._samples_of(train, "training")
        if len(train_samples) < self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size}, but {len(train)} bytes of training text are {len(train_samples)} "
                f"samples with sequence_length={self.sequence_length}, and a batch that is not full is left out. Use a "
                f"batch_size of at most {len(train_samples)}, a shorter sequence, or more text."
            )
        self.validation_samples = self._samples_of(validation, "validation")
        self.train_samples = train_samples

    def _samples_of(self, text: Text, part: str) -> ByteWindows | ByteSpans:
        try:
            if self.samples == "windows":
                return ByteWindows(text, self.sequence_length)
            return ByteSpans(text, self.sequence_length, self.samples)
        except ValueError as error:
            raise ValueError(f"The {part} text is too short: {error}") from None

    def train_dataloader(self) -> DataLoader[ByteSample]:
        """Shuffled samples of the training text; a last batch that is not full is left out."""
        return self._loader(self.train_samples, self.batch_size, training=True)

    def val_dataloader(self) -> DataLoader[ByteSample]:
        """Samples of the validation text, in order."""
        return self._loader(self.validation_samples, self.validation_batch_size, training=False)

    def _loader(self, samples: Dataset[ByteSample], batch_size: int, *, training: bool) -> DataLoader[ByteSample]:
        return DataLoader(
            samples,
            batch_size=batch_size,
            shuffle=training,
            drop_last=training,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            collate_fn=None if self.samples == "windows" else pad_samples,
        )
