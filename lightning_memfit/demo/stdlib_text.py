"""Real text that every machine has: the source files of Python's own standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lightning_memfit.demo.byte_text import VALIDATION_EVERY, ByteText, Text

_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def library_files(root: Path) -> Iterator[Path]:
    """Yield the ``.py`` files below ``root`` in sorted order, without tests and installed packages."""
    for path in sorted(root.rglob("*.py")):
        if not _NOT_LIBRARY.intersection(path.relative_to(root).parts):
            yield path


def read_library(root: Path, max_bytes: int) -> tuple[Text, Text]:
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
    train, validation = (np.frombuffer(b"".join(part), dtype=np.uint8) for part in parts)
    return train, validation


class StdlibText(ByteText):
    """The Python standard library's source as batches of ``(inputs, labels)``, both int64 ``(batch, sequence)``.

    Args:
        sequence_length: bytes per sample, or the most of them.
        batch_size: samples per training batch.
        validation_batch_size: samples per validation batch.
        max_bytes: how much text to read, over training and validation.
        num_workers: worker processes of each loader.
        root: directory of ``.py`` files; ``None`` means the standard library of the running Python.
        samples: ``"windows"`` of equal length; ``"lines"`` or ``"paragraphs"``, padded to the longest of their batch.
    """

    def __init__(
        self,
        sequence_length: int = 256,
        batch_size: int = 16,
        validation_batch_size: int = 4,
        max_bytes: int = 8 * 1024**2,
        num_workers: int = 0,
        root: str | Path | None = None,
        samples: str = "windows",
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            validation_batch_size=validation_batch_size,
            num_workers=num_workers,
            samples=samples,
        )
        self.max_bytes = max_bytes
        self.root = Path(root) if root is not None else Path(sysconfig.get_path("stdlib"))

    def read(self) -> tuple[Text, Text]:
        """Training and validation text."""
        return read_library(self.root, self.max_bytes)
