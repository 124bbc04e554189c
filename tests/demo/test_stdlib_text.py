"""The standard library's source as batches: deterministic, divided by file, nothing left out but tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lightning_memfit.demo.stdlib_text import StdlibText, library_files, read_library


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Twenty files of ten bytes: file ``07.py`` is ten times the letter ``h``."""
    for index in range(20):
        (tmp_path / f"{index:02}.py").write_bytes(bytes([ord("a") + index]) * 10)
    return tmp_path


def test_files_come_in_sorted_order_without_tests_and_installed_packages(tmp_path: Path) -> None:
    for name in ("b.py", "a/c.py", "test/d.py", "site-packages/e.py", "a/tests/f.py", "note.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [path.relative_to(tmp_path).as_posix() for path in library_files(tmp_path)] == ["a/c.py", "b.py"]


def test_every_tenth_file_is_for_validation(library: Path) -> None:
    train, validation = read_library(library, max_bytes=10**6)
    # The tenth and the twentieth of 20 files: letters j and t.
    assert bytes(validation) == b"j" * 10 + b"t" * 10
    assert len(train) == 180
    assert not set(bytes(train)) & set(b"jt")


def test_reading_stops_at_the_limit_within_a_file(library: Path) -> None:
    train, validation = read_library(library, max_bytes=95)
    assert (len(train), bytes(validation)) == (90, b"j" * 5)


def test_too_few_files_are_an_error_that_names_the_limit(library: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"gave 3 Python files within max_bytes=30; at least 10 are needed"):
        read_library(library, max_bytes=30)


def test_batches_of_the_real_library_have_the_shapes_asked_for() -> None:
    data = StdlibText(sequence_length=32, batch_size=6, validation_batch_size=2, max_bytes=200_000)
    data.setup("fit")
    samples = data.train_samples
    data.setup("validate")
    assert data.train_samples is samples
    inputs, labels = next(iter(data.train_dataloader()))
    assert inputs.shape == labels.shape == (6, 32)
    assert torch.equal(inputs[:, 1:], labels[:, :-1])
    assert next(iter(data.val_dataloader()))[0].shape == (2, 32)


def test_two_readings_are_equal() -> None:
    first, second = (StdlibText(max_bytes=300_000) for _ in range(2))
    for data in (first, second):
        data.setup("fit")
    assert np.array_equal(first.train_samples.text, second.train_samples.text)
    assert np.array_equal(first.validation_samples.text, second.validation_samples.text)
