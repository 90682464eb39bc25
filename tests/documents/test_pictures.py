"""The pictures of a real feed fetch nothing, and `python -m benchmarks pictures` can take them again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from rich.text import Text

from benchmarks import pictures
from benchmarks.charts.charts import FOLDER

LINKS = {"http://www.w3.org/2000/svg", "https://www.textualize.io"}
"""A namespace, and a comment of rich."""

TAKEN = ("status.svg", "top.svg", "report-pipeline.svg")


def links_of(svg: str) -> set[str]:
    return set(re.findall(r"https?://[^\s\"'<>)]+", svg))


def test_a_terminal_is_drawn_without_foreign_fonts() -> None:
    drawn = pictures.terminal(Text("trial-1 busy", "green"), title="mbaas top")
    assert links_of(drawn) <= LINKS
    assert "trial-1" in drawn
    assert 'class="mbaas-top-matrix"' in drawn


@pytest.mark.parametrize("name", TAKEN)
def test_the_committed_pictures_fetch_nothing(name: str) -> None:
    assert links_of((FOLDER / name).read_text()) <= LINKS


@pytest.mark.long
def test_the_pictures_can_be_taken(tmp_path: Path) -> None:
    taken = pictures.write(tmp_path / "photos", folder=tmp_path / "images", report=lambda _: None)
    assert {file.name for file in taken} == {"grid.png", *TAKEN}
    status, top = ((tmp_path / "images" / name).read_text() for name in ("status.svg", "top.svg"))
    assert all(name in status and name in top for name in pictures.STEPS_MS)
    assert "exact" in status
