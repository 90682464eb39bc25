"""Small tables in HTML, as notebooks show them instead of a value's ``repr``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape


def table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table with a heading, and a name and a text in each row; all of them are escaped."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in rows.items()
    )
    return f"<table><caption><b>{escape(title)}</b></caption>{cells}</table>"


def some(names: Sequence[str], most: int = 8) -> str:
    """Write the first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
