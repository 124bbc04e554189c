"""Text of the user's own, as bytes: a file, a folder, or a pattern of names."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_memfit.demo.byte_text import VALIDATION_EVERY, ByteText, Text

VALIDATION_CHOICES = ("auto", "files", "tail")
"""How validation text is set apart: every tenth file, or the last tenth of all text; ``auto`` takes files if there are
ten of them."""

_LOOKED_AT_FOR_ZEROS = 8000
"""Bytes. A zero byte among the first so many marks a file as binary. Source: git 2.47, ``buffer_is_binary`` in
``xdiff-interface.c``."""


def find_files(path: str | Path) -> list[Path]:
    """Files that a path means, in sorted order.

    Args:
        path: a file; a folder, of which every file below is meant; or a pattern as in ``Path.glob``, where ``**``
            stands for any number of folders. Files and folders whose names begin with a dot are found only if a path
            names them itself.

    Raises:
        FileNotFoundError: if there are none.
    """
    given = Path(path).expanduser()
    if given.is_file():
        return [given]
    fixed = tuple(itertools.takewhile(lambda part: not set(part) & set("*?["), given.parts))
    folder, pattern = Path(*fixed), "/".join(given.parts[len(fixed) :])
    if given.is_dir():
        pattern = "**/*"
    found = sorted(file for file in folder.glob(pattern) if file.is_file()) if pattern else []
    files = [file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts)]
    if not files:
        what = "is a folder without files" if given.is_dir() else "is no file, no folder, and a pattern of no files"
        raise FileNotFoundError(
            f"path={str(path)!r} {what}, seen from {Path.cwd()}. Give a text file, a folder of them, or a pattern in "
            "quotes such as 'texts/**/*.txt'."
        )
    return files


def read_texts(files: Sequence[Path], max_bytes: int | None) -> list[bytes]:
    """Read files in order until there are ``max_bytes`` of text; empty files are left out.

    Args:
        files: what to read.
        max_bytes: where to stop; the last file is cut. ``None`` reads everything.

    Raises:
        ValueError: if a file is binary, or nothing is left.
    """
    texts: list[bytes] = []
    remaining = max_bytes
    for file in files:
        if remaining == 0:
            break
        with file.open("rb") as stream:
            text = stream.read(-1 if remaining is None else remaining)
        zero = text.find(b"\0", 0, _LOOKED_AT_FOR_ZEROS)
        if zero >= 0:
            raise ValueError(
                f"{file} is binary, or text in an encoding other than UTF-8: byte {zero + 1} of it is 0. Leave it out "
                "with a pattern such as path='texts/**/*.txt', or save it as UTF-8."
            )
        remaining = None if remaining is None else remaining - len(text)
        if text:
            texts.append(text)
    if not texts:
        limit = "" if max_bytes is None else f" within max_bytes={max_bytes}"
        raise ValueError(f"{len(files)} files such as {files[0]} hold 0 bytes of text{limit}. Name files with text.")
    return texts


def divide_texts(texts: Sequence[bytes], validation: str) -> tuple[Text, Text]:
    """Training and validation text.

    Args:
        texts: what the files hold, in order.
        validation: one of ``VALIDATION_CHOICES``.

    Raises:
        ValueError: if ``validation`` is not known, or asks for files and there are too few.
    """
    if validation not in VALIDATION_CHOICES:
        raise ValueError(f"validation={validation!r} is not known. Choose one of: {', '.join(VALIDATION_CHOICES)}.")
    enough = len(texts) >= VALIDATION_EVERY
    if validation == "files" and not enough:
        raise ValueError(
            f"validation='files' keeps every {VALIDATION_EVERY}th file, but there are {len(texts)} files with text. "
            "Choose validation='tail', which keeps the end of all text, or give more files."
        )
    if validation != "tail" and enough:
        parts: tuple[list[bytes], list[bytes]] = ([], [])
        for index, text in enumerate(texts):
            parts[index % VALIDATION_EVERY == VALIDATION_EVERY - 1].append(text)
        return _joined(parts[0]), _joined(parts[1])
    whole = _joined(texts)
    kept = len(whole) // VALIDATION_EVERY
    return whole[: len(whole) - kept], whole[len(whole) - kept :]


def _joined(texts: Sequence[bytes]) -> Text:
    return np.frombuffer(b"".join(texts), dtype=np.uint8)


class TextFiles(ByteText):
    """Text files as batches of ``(inputs, labels)``, both int64 ``(batch, sequence)``.

    Args:
        path: a file; a folder, of which every file below is read, hidden ones apart; or a pattern such as
            ``"texts/**/*.txt"``.
        sequence_length: bytes per sample, or the most of them.
        batch_size: samples per training batch.
        validation_batch_size: samples per validation batch.
        max_bytes: how much text to read, over training and validation; ``None`` for all of it.
        num_workers: worker processes of each loader.
        samples: ``"windows"`` of equal length; ``"lines"`` or ``"paragraphs"``, padded to the longest of their batch.
        validation: ``"files"`` keeps every tenth file for validation, ``"tail"`` the last tenth of all text,
            ``"auto"`` files if there are ten of them.

    Raises:
        ValueError: if ``samples`` or ``validation`` is not known.
    """

    def __init__(
        self,
        path: str | Path,
        sequence_length: int = 256,
        batch_size: int = 16,
        validation_batch_size: int = 4,
        max_bytes: int | None = None,
        num_workers: int = 0,
        samples: str = "windows",
        validation: str = "auto",
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            validation_batch_size=validation_batch_size,
            num_workers=num_workers,
            samples=samples,
        )
        self.path = path
        self.max_bytes = max_bytes
        self.validation = validation

    def read(self) -> tuple[Text, Text]:
        """Training and validation text."""
        return divide_texts(read_texts(find_files(self.path), self.max_bytes), self.validation)
