"""A batch written in one line, such as ``"inputs=4x512:int64[0..32000],targets=4x512:int64"``."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from lightning_memfit.errors import ConfigurationError

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
"""The dtypes that can be written."""
SYNTAX = (
    "[name=]SIZExSIZE...[:dtype][[low..high]], parts separated by commas. The first size is the batch; the dtype is "
    "float32 unless written; integers count from low up to, and without, high, over and over, and are 0 without a "
    "range; bools are true. Parts with names make a dict, several without names a tuple, one alone is the batch itself."
)
"""What can be written, for the help."""

_PART = re.compile(
    r"(?:(?P<name>[^\W\d]\w*)=)?(?P<sizes>\d+(?:x\d+)*)(?::(?P<dtype>\w+))?(?:\[(?P<low>-?\d+)\.\.(?P<high>-?\d+)\])?"
)


def batch_from_text(text: str) -> Any:
    """Make the batch that a text describes.

    Floating tensors are on ``meta``, since no forecast looks at their values; integers are real, since steps branch
    on them.

    Args:
        text: parts separated by commas, see :data:`SYNTAX`.

    Raises:
        ConfigurationError: if the text cannot be read; names the part.

    >>> batch = batch_from_text("x=2x3,y=2:int64[0..10]")
    >>> batch["x"].shape, batch["y"]
    (torch.Size([2, 3]), tensor([0, 1]))
    """
    parts = [_part(part.strip(), text) for part in text.split(",")]
    names = [name for name, _ in parts if name is not None]
    if not names:
        tensors = tuple(tensor for _, tensor in parts)
        return tensors[0] if len(tensors) == 1 else tensors
    if len(names) != len(parts):
        raise _unreadable(text, "some parts have a name and others none; name all or none")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise _unreadable(text, f"{twice!r} stands there twice")
    return {name: tensor for name, tensor in parts if name is not None}


def _part(part: str, text: str) -> tuple[str | None, Tensor]:
    match = _PART.fullmatch(part)
    if match is None:
        raise _unreadable(text, f"{part!r} is no shape")
    dtype_name = match["dtype"] or "float32"
    if dtype_name not in DTYPES:
        raise _unreadable(text, f"{dtype_name!r} is no dtype; there are {', '.join(DTYPES)}")
    dtype, sizes = DTYPES[dtype_name], [int(size) for size in match["sizes"].split("x")]
    if 0 in sizes:
        raise _unreadable(text, f"{part!r} has a size of 0")
    counts = match["low"] is not None
    if counts and (dtype.is_floating_point or dtype is torch.bool):
        raise _unreadable(text, f"{part!r} has a range, and only integers have one")
    if dtype.is_floating_point:
        return match["name"], torch.empty(sizes, dtype=dtype, device="meta")
    if not counts:
        return match["name"], torch.full(sizes, dtype is torch.bool, dtype=dtype)
    return match["name"], _counting(sizes, dtype, int(match["low"]), int(match["high"]), part, text)


def _counting(sizes: list[int], dtype: torch.dtype, low: int, high: int, part: str, text: str) -> Tensor:
    limits = torch.iinfo(dtype)
    if not limits.min <= low < high <= limits.max + 1:
        raise _unreadable(text, f"{part!r}: the range must rise and lie within {limits.min}..{limits.max}")
    numbers = torch.arange(torch.Size(sizes).numel(), dtype=torch.int64) % (high - low) + low
    return numbers.reshape(sizes).to(dtype)


def _unreadable(text: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"--batch={text!r} cannot be read: {why}. Write shapes such as inputs=4x512:int64[0..32000],targets=4x512:int64"
        ", or package.module:function."
    )
