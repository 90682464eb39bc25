"""Builds HTML and SVG: whatever is not markup already is escaped, so no text can become markup.

What comes out is well-formed XML too: every element is closed, every attribute has a value in quotes.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

VOID = frozenset({"meta", "br"})
"""Elements of HTML that have no end."""

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]|[\ud800-\udfff]")
"""Characters that neither HTML nor XML may hold; paths may."""


_UNIT = re.compile(r"(?<=\d) (?=(?:%|s|min|h|days|B|[kMGTP]B)(?!\w))")
"""Between a number and its unit."""


class Markup(str):
    """Text that is markup, and is not escaped again."""

    __slots__ = ()


def text(words: str) -> Markup:
    """Text as markup."""
    return Markup(html.escape(_FORBIDDEN.sub("\ufffd", words)))


def prose(words: str) -> Markup:
    """Text as markup; no line ends between a number and its unit."""
    return text(_UNIT.sub("\u00a0", words))


def joined(parts: Iterable[str]) -> Markup:
    """Parts one after the other; those that are not markup are prose."""
    return Markup("".join(part if isinstance(part, Markup) else prose(part) for part in parts))


def element(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element with its children.

    Args:
        name: of the element.
        children: prose, or markup.
        attributes: by their names, "_" for "-", and one at the end of a name that Python keeps for itself; numbers
            are written with at most two decimals; None is left out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in VOID:
        return Markup(f"<{name}{given} />")
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def path_of(points: Iterable[tuple[float, float]], *, closed: bool = False) -> str:
    """The ``d`` of an SVG path through these points."""
    return "M" + "L".join(f"{decimal(x)} {decimal(y)}" for x, y in points) + ("Z" if closed else "")


def decimal(number: float) -> str:
    """A coordinate: at most two decimals, never "-0"."""
    return f"{round(number, 2) + 0.0:g}" if abs(number) < 1e5 else f"{number:.0f}"


def _attribute(value: str | float) -> str:
    return text(value) if isinstance(value, str) else decimal(value)
