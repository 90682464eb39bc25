"""Tables, and what opens when somebody asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from mbaas.analysis.report.markup import Markup, element, joined


def table(caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Sequence[int] = ()) -> Markup:
    """A table whose first column names its rows; it scrolls sideways by itself where it is too wide.

    Args:
        caption: says what it holds.
        heads: of columns.
        rows: cells, text or markup.
        numbers: columns that are set flush right.
    """
    classes = ["number" if column in numbers else None for column in range(len(heads))]
    head = element(
        "tr", *(element("th", name, scope="col", class_=kind) for name, kind in zip(heads, classes, strict=True))
    )
    body = []
    for row in rows:
        cells = [element("td", cell, class_=kind) for cell, kind in zip(row[1:], classes[1:], strict=True)]
        body.append(element("tr", element("th", row[0], scope="row"), *cells))
    whole = element(
        "table", element("caption", caption), element("thead", head), element("tbody", joined(body)), class_="plain"
    )
    return element("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def details(summary: str, *children: str) -> Markup:
    """Closed at first."""
    return element("details", element("summary", summary), *children)


def key(*entries: tuple[str, str]) -> Markup:
    """What the marks of a picture mean: (class of the mark, text)."""
    items = [element("li", element("span", class_=f"mark {mark}", aria_hidden="true"), name) for mark, name in entries]
    return element("ul", *items, class_="key")
