"""Docstrings and documents avoid the phrases that made this project read like a translation."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.pages import PAGES, ROOT

MODULES = tuple(path for package in ("mbaas", "tune_integration") for path in sorted((ROOT / package).rglob("*.py")))

PHRASES = re.compile(
    r"\b(anew|in vain|alike|whoever|reckon(?:ed|s)?|hitherto|makes? good|stands? still|(?:some|no|any|every)body|"
    r"is told|are told|what there is|that there (?:is|are) not)\b",
    re.IGNORECASE,
)
"""Old or translated words, and machines as people."""

OPENINGS = re.compile(r"(What|Whether|Of|How|Where|Who|Whose)\b")
"""Clauses in the place of a noun, as the first word of a docstring."""

CODE = re.compile(r"^```.*?^```|`+[^`]+`+", re.DOTALL | re.MULTILINE)


def docstrings_of(source: str) -> Iterator[str]:
    """Yield string statements: docstrings, and texts under names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def odd_phrases(text: str) -> list[str]:
    return PHRASES.findall(CODE.sub("", text))


def test_docstrings_have_no_odd_phrases() -> None:
    found = {path: odd_phrases("\n\n".join(docstrings_of(path.read_text()))) for path in MODULES}
    assert {str(path.relative_to(ROOT)): phrases for path, phrases in found.items() if phrases} == {}


def test_no_docstring_opens_with_a_clause() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text.splitlines()[0]}"
        for path in MODULES
        for text in docstrings_of(path.read_text())
        if OPENINGS.match(text)
    ]
    assert found == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documents_have_no_odd_phrases(path: Path) -> None:
    assert odd_phrases(path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        ("Nobody waits, and the block is made anew.", ["Nobody", "anew"]),
        ("`anew` in code, and\n```\nnobody\n```\nbehind it", []),
    ],
)
def test_an_odd_phrase_is_found(text: str, phrases: list[str]) -> None:
    assert odd_phrases(text) == phrases
