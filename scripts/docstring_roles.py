"""For the documentation's site: roles in docstrings, such as ``:func:`name```, are shown as names.

An extension of griffe, which reads the docstrings for mkdocstrings; ``mkdocs.yml`` names it.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`~?([^`]+)`")


class DocstringRoles(Extension):
    """Replaces roles in every docstring that is read."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Show the name that a role refers to, without its modules."""
        if obj.docstring is not None:
            obj.docstring.value = without_roles(obj.docstring.value)


def without_roles(text: str) -> str:
    """A docstring with names in place of roles."""
    return _ROLE.sub(lambda role: f"`{role[1].rsplit('.', 1)[-1]}`", text)
