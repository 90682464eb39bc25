"""The project's documents and their code blocks."""

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
"""All pages with code to copy; CHANGELOG.md has none."""

_BLOCK = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        page: path relative to the repository root.
        line: first line of the code, from 1.
        language: language of the fence: "python", "yaml", "sh"; empty for output.
        text: the code.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def run(self, names: dict[str, Any]) -> None:
        """Run Python code with the names that earlier blocks defined, and add its own. Errors name the page's lines."""
        exec(compile("\n" * (self.line - 1) + self.text, self.page, "exec"), names)


def blocks_of(page: Path, language: str | None = None) -> list[Block]:
    """The blocks of a page in order, of one language or of all."""
    text, name = page.read_text(), page.relative_to(ROOT).as_posix()
    found = [
        Block(name, text.count("\n", 0, match.start(2)) + 1, match[1], textwrap.dedent(match[2]))
        for match in _BLOCK.finditer(text)
    ]
    return [block for block in found if language in (None, block.language)]


def block_with(page: Path, text: str) -> Block:
    """The only block of a page that contains a text."""
    (found,) = (block for block in blocks_of(page) if text in block.text)
    return found


def text_of(page: Path) -> str:
    """Text of a page outside its code blocks."""
    return _BLOCK.sub("", page.read_text())
