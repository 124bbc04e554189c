"""Bytes as samples: windows, lines and paragraphs, padded to the longest of their batch with nothing to predict."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lightning_memfit.demo.byte_text import (
    NO_LABEL,
    ByteSpans,
    ByteText,
    ByteWindows,
    Text,
    find_spans,
    pad_samples,
)


def text_of(content: bytes) -> Text:
    return np.frombuffer(content, dtype=np.uint8)


class Given(ByteText):
    """Text that is given: nine tenths for training."""

    def __init__(self, content: bytes, **settings: Any) -> None:
        defaults = {"sequence_length": 4, "batch_size": 2, "validation_batch_size": 2, "num_workers": 0}
        super().__init__(**{"samples": "windows", **defaults, **settings})
        self.content = content

    def read(self) -> tuple[Text, Text]:
        end = len(self.content) * 9 // 10
        return text_of(self.content[:end]), text_of(self.content[end:])


def test_windows_lie_side_by_side_and_labels_are_one_ahead() -> None:
    windows = ByteWindows(np.arange(11, dtype=np.uint8), sequence_length=5)
    assert len(windows) == 2
    inputs, labels = windows[1]
    assert inputs.tolist() == [5, 6, 7, 8, 9]
    assert labels.tolist() == [6, 7, 8, 9, 10]
    assert inputs.dtype == labels.dtype == torch.int64
    with pytest.raises(IndexError):
        windows[2]


def test_a_text_shorter_than_a_window_is_an_error_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"^sequence_length=5 needs 6 bytes of text, but there are 5\."):
        ByteWindows(np.zeros(5, dtype=np.uint8), sequence_length=5)


@pytest.mark.parametrize(
    ("samples", "pieces"),
    [
        # A line's end belongs to it; empty lines are left out, since one byte has no byte to predict.
        ("lines", [b"ab\n", b" \t\n", b"  c\n", b"def\n", b"gh"]),
        # Blank lines may hold blanks, and part; the indentation after them stays. What is longer than six is cut.
        ("paragraphs", [b"ab\n", b"  c\nde", b"f\n", b"gh"]),
    ],
)
def test_spans_are_lines_or_what_stands_between_blank_lines(samples: str, pieces: list[bytes]) -> None:
    text = b"ab\n \t\n\n  c\ndef\n\ngh"
    assert [text[start:end] for start, end in find_spans(text, samples, longest=6)] == pieces


def test_a_span_is_a_sample_of_its_own_length() -> None:
    spans = ByteSpans(text_of(b"ab\nc\n"), sequence_length=8, samples="lines")
    assert [len(sample.inputs) for sample in (spans[0], spans[1])] == [2, 1]
    assert bytes(spans[0].inputs.tolist()) == b"ab"
    assert bytes(spans[0].labels.tolist()) == b"b\n"
    with pytest.raises(IndexError):
        spans[2]


def test_a_batch_is_as_long_as_its_longest_sample_and_the_rest_has_no_label() -> None:
    spans = ByteSpans(text_of(b"abcd\nx\n"), sequence_length=8, samples="lines")
    batch = pad_samples([spans[1], spans[0]])
    assert batch.inputs.tolist() == [[ord("x"), 0, 0, 0], [*b"abcd"]]
    assert batch.labels.tolist() == [[ord("\n"), NO_LABEL, NO_LABEL, NO_LABEL], [*b"bcd\n"]]


def test_batches_of_lines_differ_in_length() -> None:
    data = Given(b"a\nbcdefg\n" * 50, sequence_length=16, samples="lines")
    data.setup("fit")
    lengths = {batch.inputs.shape[1] for batch in data.train_dataloader()}
    assert lengths == {1, 6}
    assert all(batch.labels.ne(NO_LABEL).any(dim=1).all() for batch in data.val_dataloader())


def test_batches_of_windows_are_full_and_drawn_in_another_order() -> None:
    data = Given(bytes(range(256)), batch_size=4)
    data.setup("fit")
    # 230 bytes are 57 windows of four: 14 batches of four, and one window that is left out.
    batches = list(data.train_dataloader())
    assert [tuple(batch.inputs.shape) for batch in batches] == [(4, 4)] * 14
    first_bytes = torch.cat([batch.inputs[:, 0] for batch in batches]).tolist()
    assert first_bytes != sorted(first_bytes)
    assert set(first_bytes) < set(range(0, 228, 4))


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        (
            b"x" * 40,
            {},
            r"The validation text is too short: sequence_length=4 needs 5 bytes of text, but there are 4",
        ),
        (b"x" * 40, {"sequence_length": 36}, r"The training text is too short: sequence_length=36 needs 37 bytes of"),
        (
            b"x" * 100,
            {"batch_size": 99},
            r"^batch_size=99, but 90 bytes of training text are 22 samples with sequence_length=4, .* at most 22,",
        ),
        (
            b"\n" * 40,
            {"samples": "lines"},
            r"samples='lines' needs a line of at least 2 bytes, .* but 36 bytes of",
        ),
    ],
)
def test_too_little_text_is_an_error_with_the_numbers(content: bytes, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Given(content, **settings).setup("fit")


def test_unknown_samples_are_an_error_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^samples='words' is not known. Choose 'windows' of 4 bytes each, or"):
        Given(b"", samples="words")


def test_text_that_nobody_reads_is_an_error() -> None:
    data = ByteText(sequence_length=4, batch_size=2, validation_batch_size=2, num_workers=0, samples="windows")
    with pytest.raises(NotImplementedError, match="ByteText reads no text"):
        data.setup("fit")
