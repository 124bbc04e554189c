"""Plain data from a file, as the fields of a dataclass: taken only where every value is of its field's type."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def fields_of(kind: type, data: Mapping[str, Any]) -> dict[str, Any] | None:
    """The values of the fields that data has.

    Args:
        kind: a dataclass whose fields are numbers, text, literals, tuples of these, or unions of these.
        data: as JSON gives it; a list stands for a tuple, and what is no field is left out.

    Returns:
        Arguments of the dataclass; ``None`` where a value is of another type, or one that has no default is missing.
    """
    hints = get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        if field.name not in data:
            if field.default is dataclasses.MISSING:
                return None
            continue
        value = data[field.name]
        value = tuple(value) if isinstance(value, list) else value
        if not _is_of(hints[field.name], value):
            return None
        found[field.name] = value
    return found


def _is_of(hint: Any, value: Any) -> bool:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is_of(part, value) for part in parts)
    if origin is Literal:
        return isinstance(value, str) and value in parts
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(parts[0], item) for item in value)
    if hint in (int, float):  # JSON writes 2.0 as 2 where it likes; a bool is no number
        return type(value) is int or (hint is float and type(value) is float)
    return isinstance(value, hint)
