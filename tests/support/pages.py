"""The documents of the project, and the blocks of code that they show."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

PAGES = (
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").rglob("*.md")),
)
"""All that a reader may copy code from; CHANGELOG.md shows none."""

_BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code that a page shows.

    Attributes:
        page: its path from the root of the repository.
        line: where the code begins, from 1.
        language: what the fence says: "python", "yaml", "sh"; empty for output.
        text: the code.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """Run Python with the names of what ran before, to which its own are added; errors name the page's lines."""
        exec(compile("\n" * (self.line - 1) + self.text, self.page, "exec"), names)


def blocks_of(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page, from the top down; of one language, or of all."""
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    found = [
        Block(name, text.count("\n", 0, match.start(2)) + 1, match[1], textwrap.dedent(match[2]))
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def block_with(page: Path, text: str) -> Block:
    """The one block of a page that has a text."""
    (found,) = (block for block in blocks_of(page) if text in block.text)
    return found


def text_of(page: Path) -> str:
    """What a page says outside of its blocks of code."""
    return _BLOCK.sub("", page.read_text())
