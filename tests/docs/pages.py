"""The fenced blocks of the documentation, in the order of each page."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
"""Every page of the site, and the README; paths from the root of the repository."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    page: str
    """The page it is on, as a path from the root."""
    line: int
    """Line of its opening fence, from 1."""
    language: str
    """The word behind the fence; empty if there is none."""
    title: str | None
    """The file that it shows, as in ``title="train.py"``."""
    text: str
    """What is between the fences."""

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.page}:{self.line}"

    @property
    def first_line(self) -> str:
        """By which a list of exemptions names it."""
        return self.text.strip().splitlines()[0].strip() if self.text.strip() else ""


def blocks_of(page: str, text: str) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        ValueError: for code that is only indented: it has no language, so that nobody knows how to run it.
    """
    found = []
    for token in MarkdownIt().parse(text):
        line = token.map[0] + 1 if token.map else 0
        if token.type == "code_block":
            raise ValueError(f"{page}:{line}: indented code. Put fences with a language around it.")
        if token.type == "fence":
            language, _, rest = token.info.strip().partition(" ")
            title = re.search(r'title="([^"]+)"', rest)
            found.append(Block(page=page, line=line, language=language, title=title and title[1], text=token.content))
    return found


def read(page: str) -> str:
    """The text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")
