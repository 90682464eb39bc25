"""The pictures of a real feed are on pages, fetch nothing, and show what mbaas prints today.

`python -m benchmarks pictures` makes them again.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.text import Text
from typer.testing import CliRunner

from benchmarks import pictures
from benchmarks.__main__ import app
from benchmarks.charts import charts
from benchmarks.charts.charts import FOLDER
from support.pages import PAGES, ROOT

LINKS = {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
"""A namespace, and a comment of rich."""

TAKEN = ("status.svg", "top.svg", "report-pipeline.svg")

WORD = re.compile(r"[A-Za-z][A-Za-z-]+")
"""A word, also with a hyphen; names with digits, such as trial-1, have other ends."""


def links_of(svg: str) -> set[str]:
    return set(re.findall(r"https?://[^\s\"'<>)]+", svg))


def words_of(text: str) -> set[str]:
    return {word for token in text.split() if WORD.fullmatch(word := token.strip("().,;:%\"'"))}


def strings_in(source: str) -> Iterator[str]:
    """String constants of a module without its docstrings."""
    tree = ast.parse(source)
    told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in told:
            yield node.value


@cache
def known_words() -> set[str]:
    """The words of all strings in mbaas."""
    modules = (path.read_text() for path in (ROOT / "mbaas").rglob("*.py"))
    return words_of(" ".join(re.sub(r"[^\w-]", " ", text) for module in modules for text in strings_in(module)))


def unknown_words(svg: str) -> set[str]:
    """Words of a picture that no string in mbaas contains."""
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    shown = words_of(" ".join(html.unescape("".join(node.itertext())).replace("\xa0", " ") for node in texts))
    return shown - known_words() - {pictures.FEED}


def test_a_terminal_is_drawn_without_foreign_fonts() -> None:
    drawn = pictures.terminal(Text("trial-1 busy", "green"), title="mbaas top")
    assert links_of(drawn) <= LINKS
    assert "trial-1" in drawn
    assert 'class="mbaas-top-matrix"' in drawn


@pytest.mark.parametrize("name", ["status.svg", "top.svg"])
def test_the_last_line_of_a_terminal_is_not_cut(name: str) -> None:
    drawn = (FOLDER / name).read_text()
    (height,) = re.findall(r'<clipPath id="[\w-]+-clip-terminal">\s*<rect [^>]*height="([\d.]+)"', drawn)
    baselines = re.findall(r'<text [^>]*y="([\d.]+)"[^>]*clip-path[^>]*>[^<]*[^\s<]', drawn)
    assert max(map(float, baselines)) + 6 < float(height)


@pytest.mark.parametrize("name", TAKEN)
def test_the_committed_pictures_fetch_nothing(name: str) -> None:
    assert links_of((FOLDER / name).read_text()) <= LINKS


@pytest.mark.parametrize("name", TAKEN)
def test_the_committed_pictures_have_the_words_of_the_code(name: str) -> None:
    """A word that mbaas no longer prints means that the picture is old: run `python -m benchmarks pictures`."""
    assert unknown_words((FOLDER / name).read_text()) == set()


def test_a_word_that_is_not_printed_is_found() -> None:
    assert unknown_words(pictures.terminal(Text("cost 0.002 CPU-h, trial-1 busy"), title="mbaas top")) == {"CPU-h"}


def test_each_picture_is_on_a_page() -> None:
    shown = {name for page in PAGES for name in re.findall(r"!\[[^]]+\]\([\w./]*images/([\w.-]+)\)", page.read_text())}
    assert shown == {file.name for file in FOLDER.iterdir()}


def test_one_command_makes_all_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    dashboards = pytest.importorskip("benchmarks.dashboards", reason="Grafana's library needs Python 3.11")
    for module in (charts, dashboards, pictures):
        monkeypatch.setattr(module, "write", lambda *_, _name=module.__name__, **__: [Path(_name)])
    ended = CliRunner().invoke(app, ["pictures"])
    assert ended.output.split() == ["benchmarks.charts.charts", "benchmarks.dashboards", "benchmarks.pictures"]


@pytest.mark.long
def test_the_pictures_can_be_taken(tmp_path: Path) -> None:
    taken = pictures.write(tmp_path / "photos", folder=tmp_path / "images", report=lambda _: None)
    assert {file.name for file in taken} == {"grid.png", *TAKEN}
    status, top = ((tmp_path / "images" / name).read_text() for name in ("status.svg", "top.svg"))
    assert all(name in status and name in top for name in pictures.STEPS_MS)
    assert "exact" in status
    assert all(unknown_words((tmp_path / "images" / name).read_text()) == set() for name in TAKEN)
