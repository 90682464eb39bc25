"""The charts of the documents are what `python -m benchmarks charts` draws from docs/results, and are readable."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from benchmarks.charts import drawing, results
from benchmarks.charts.charts import CHARTS, FOLDER, Chart
from benchmarks.charts.drawing import Bar, Panel
from support.pages import PAGES, ROOT

TEXT = "".join(page.read_text() for page in PAGES)

PINNED = re.findall(r"^matplotlib==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
"""Versions of matplotlib in the tested environments; the newest one drew the files."""

by_name = pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.name)


def words_of(svg: str) -> list[str]:
    """The texts of a chart, sorted, because another version of matplotlib may draw them in another order."""
    texts = ("".join(node.itertext()) for node in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"))
    return sorted(texts)


@by_name
def test_the_file_shows_its_table(chart: Chart) -> None:
    there = (FOLDER / f"{chart.name}.svg").read_text()
    assert words_of(there) == words_of(chart.svg()), "run `python -m benchmarks charts`"
    if matplotlib.__version__ == PINNED[-1]:
        assert there == chart.svg(), "run `python -m benchmarks charts`"


def boxes_of(figure: Figure) -> Iterator[tuple[str, Bbox]]:
    """Text and place of all visible texts. The font here is wider than the ones that browsers take."""
    renderer: Any = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    figure.draw(renderer)
    for text in figure.findobj(Text):
        if text.get_visible() and text.get_text().strip() and not text.get_text().startswith("$"):
            yield text.get_text(), text.get_window_extent(renderer)


def unreadable(figure: Figure) -> list[str]:
    """Texts that meet another one, or that end outside of the chart."""
    placed = list(boxes_of(figure))
    meet = [f"{a} | {b}" for (a, one), (b, other) in itertools.combinations(placed, 2) if one.overlaps(other)]
    width, height = figure.bbox.width, figure.bbox.height
    outside = [text for text, box in placed if box.x0 < 0 or box.y0 < 0 or box.x1 > width or box.y1 > height]
    return meet + outside


@by_name
def test_texts_do_not_meet(chart: Chart) -> None:
    assert unreadable(chart.figure()) == []


def test_texts_that_meet_are_found() -> None:
    bar = Bar(name="a name that is much too long " * 3, value=1, figure="1 s", kind="other")
    assert len(unreadable(drawing.bars("title", [Panel("panel", [bar])], source=""))) == 2


def test_a_chart_has_light_and_dark_colours_and_real_text() -> None:
    (chart,) = (chart for chart in CHARTS if chart.name == "trials")
    drawn = chart.svg()
    assert "prefers-color-scheme:dark" in drawn
    assert "47,089 samples/s" in words_of(drawn)
    used = set(re.findall(r"var\(--(\w+)\)", drawn))
    assert {"paper", "ink", "soft", "blue", "grey"} == used
    assert all(drawn.count(f"--{name}:#") == 4 for name in used)


@by_name
def test_a_page_shows_the_chart(chart: Chart) -> None:
    assert re.search(rf"!\[[^]]+\]\((?:docs/)?images/{chart.name}\.svg\)", TEXT)


def test_each_table_has_a_source_and_a_page() -> None:
    assert [row["table"] for row in results.table(results.SOURCES)] != []
    assert sorted(row["table"] for row in results.table(results.SOURCES)) == results.names()
    assert [name for name in results.names() if f"results/{name}.csv" not in TEXT] == []


@pytest.mark.parametrize("name", results.names())
def test_each_row_of_a_table_is_whole(name: str) -> None:
    rows = results.table(name)
    assert rows
    assert all(None not in row and None not in row.values() for row in rows)
