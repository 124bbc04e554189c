"""How a change is taken back: every lever hands out the function that undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]
"""Takes a lever back; calling it twice is harmless. Afterwards every touched ``__dict__`` is as it was before."""


def set_instance_attribute(target: Any, name: str, value: Any) -> Undo:
    """Put ``value`` in front of what ``target``'s class defines under ``name``, for this instance only.

    >>> class Door:
    ...     colour = "red"
    >>> door = Door()
    >>> undo = set_instance_attribute(door, "colour", "blue")
    >>> door.colour, undo(), undo(), door.colour, vars(door)
    ('blue', None, None, 'red', {})
    """
    attributes = vars(target)
    had_one = name in attributes
    before = attributes.get(name)
    attributes[name] = value
    pending = True

    def undo() -> None:
        nonlocal pending
        if not pending:
            return
        pending = False
        if had_one:
            attributes[name] = before
        else:
            attributes.pop(name, None)

    return undo
