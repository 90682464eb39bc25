"""The pages that list options, messages, terms and pages agree with the code and with each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mbaas.settings import GROUPS, FeedOptions
from support.pages import PAGES, ROOT, blocks_of, text_of

DOCS = ROOT / "docs"


def rows_of(page: str) -> list[list[str]]:
    """The cells of all table rows of a page, without headings and rules."""
    lines = [line for line in (DOCS / page).read_text().splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


# ---- options ----


def default_of(each: Field[Any]) -> str:
    if each.default is not MISSING:
        return f"`{each.default!r}`".replace("'", '"')
    return "`{}`" if each.default_factory is not MISSING else "required"


def all_options() -> Iterator[tuple[str, str]]:
    """Name and default of each option; groups are listed by their members."""
    for each in fields(FeedOptions):
        if each.name in GROUPS:
            yield from ((f"`{each.name}.{inner.name}`", default_of(inner)) for inner in fields(GROUPS[each.name]))
        else:
            yield f"`{each.name}`", default_of(each)


def test_the_page_of_options_has_each_with_its_default() -> None:
    shown = {row[0]: row[2] for row in rows_of("reference/options.md")}
    assert shown == dict(all_options())


def test_options_have_an_advice() -> None:
    assert [row[0] for row in rows_of("reference/options.md") if not row[3]] == []


# ---- messages ----


def strings_in(source: str) -> Iterator[str]:
    """String constants, and the constant pieces of formatted strings, of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


SOURCES = [path for package in ("mbaas", "tune_integration") for path in (ROOT / package).rglob("*.py")]


@cache  # and not when the tests are collected, which each process does
def strings() -> str:
    return "\n".join(text for path in SOURCES for text in strings_in(path.read_text()))


def unknown_pieces(message: str) -> list[str]:
    """Pieces of a message between its ``...`` that no string in the code contains."""
    return [piece for piece in map(str.strip, message.split("...")) if piece not in strings()]


def messages() -> list[str]:
    rows = rows_of("troubleshooting.md")
    return [re.findall(r"^`([^`]+)`$", row[0])[0] for row in rows]


@pytest.mark.parametrize("message", messages())
def test_each_message_on_the_page_is_in_the_code(message: str) -> None:
    assert unknown_pieces(message) == []


def test_a_message_that_is_not_in_the_code_is_found() -> None:
    assert unknown_pieces("no feed ... runs on this machine") == ["runs on this machine"]


# ---- versions, terms, pages ----


@pytest.mark.parametrize(("package", "line"), [("ray", "Ray"), ("torch", "torch"), ("nvidia-dali", "NVIDIA DALI")])
def test_versions_are_those_of_the_package(package: str, line: str) -> None:
    (least,) = re.findall(rf'^    "{package}[^">]*>=([\d.]+)', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[:1]
    (row,) = re.findall(rf"^\| {line} \| ([\d.]+) or later", (DOCS / "limits.md").read_text(), re.MULTILINE)
    assert row == least


def test_the_glossary_is_sorted() -> None:
    terms = re.findall(r"^\| ([a-z][^|]*?) \|", (DOCS / "glossary.md").read_text(), re.MULTILINE)[1:]
    assert terms == sorted(terms)
    assert len(terms) > 20


def pages_listed(text: str) -> set[str]:
    return set(re.findall(r"\]\(([\w/.-]+\.md)\)", text))


def test_the_list_for_language_models_has_every_page() -> None:
    """Paths are relative to ``docs/``, as the file is."""
    listed = pages_listed((DOCS / "llms.txt").read_text())
    assert listed == {page.relative_to(DOCS).as_posix() for page in PAGES if page.is_relative_to(DOCS)}


def test_every_guide_is_on_the_page_of_guides() -> None:
    guides = {path.relative_to(DOCS).as_posix() for path in (DOCS / "how-to").glob("*.md")}
    listed = {link.partition("#")[0] for link in re.findall(r"\]\((how-to/[^)]+)\)", (DOCS / "how-to.md").read_text())}
    assert listed == guides


# ---- size ----

MOST_WORDS = 25_000
"""Of the README and all documents together, outside of code blocks."""

MOST_LINES_OF_README = 120


def words_in(text: str) -> int:
    """Words of a text; marks between cells of tables do not count."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_documents_stay_short() -> None:
    pages = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
    assert sum(words_in(text_of(page)) for page in pages) <= MOST_WORDS


def test_the_readme_stays_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES_OF_README


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_code_fits_the_page(page: Path) -> None:
    blocks = [*blocks_of(page, "python"), *blocks_of(page, "text")]
    assert [line for block in blocks for line in block.text.splitlines() if len(line) > 120] == []
