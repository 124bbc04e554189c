"""Batches written in one line. Run: ``pytest tests/cli/test_batch_text.py``."""

from __future__ import annotations

import pytest

from lightning_memfit.cli.batch_text import DTYPES, batch_from_text
from lightning_memfit.errors import ConfigurationError


def test_a_part_alone_is_the_batch_several_are_a_tuple_and_named_ones_a_dict() -> None:
    assert batch_from_text("4x512").shape == (4, 512)
    first, second = batch_from_text("4x3x8x8, 4:int64")
    assert first.shape == (4, 3, 8, 8) and second.shape == (4,)
    assert set(batch_from_text("x=4x2,y=4:int64")) == {"x", "y"}


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_can_be_written(name: str) -> None:
    assert batch_from_text(f"2:{name}").dtype is DTYPES[name]


def test_floating_tensors_take_no_memory_and_integers_have_values() -> None:
    assert batch_from_text("4000000x512:bfloat16").device.type == "meta"
    assert batch_from_text("2x3:int64[5..9]").tolist() == [[5, 6, 7], [8, 5, 6]]
    assert batch_from_text("3:int64").tolist() == [0, 0, 0]
    assert batch_from_text("2:bool").tolist() == [True, True]
    assert batch_from_text("2:int8[-1..1]").tolist() == [-1, 0]


BAD = {
    "": "'' is no shape",
    "4x": "'4x' is no shape",
    "x=": "'x=' is no shape",
    "4x8,": "'' is no shape",
    "-4": "'-4' is no shape",
    "4 x 8": "'4 x 8' is no shape",
    "4:int99": "'int99' is no dtype",
    "0x4": "has a size of 0",
    "4:float32[0..2]": "only integers have one",
    "4:bool[0..2]": "only integers have one",
    "4:int64[2..2]": "the range must rise",
    "4:int8[0..200]": "lie within -128..127",
    "x=4,4": "name all or none",
    "x=4,x=4": "'x' stands there twice",
}


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_read_is_named_with_an_example(text: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        batch_from_text(text)
    message = str(error.value)
    assert message.startswith(f"--batch={text!r} cannot be read: ") and BAD[text] in message
    assert "inputs=4x512:int64[0..32000]" in message
