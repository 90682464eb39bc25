"""Small tables and pictures in HTML, as notebooks show them instead of a value's ``repr``."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape


def table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table with a heading, and a name and a text in each row; all of them are escaped."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in rows.items()
    )
    return f"<table><caption><b>{escape(title)}</b></caption>{cells}</table>"


def picture(png: bytes, caption: str) -> str:
    """Return a PNG with a caption below it; the picture itself is in the HTML, so a saved notebook keeps it."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    image = f'<img alt="{escape(caption)}" src="{source}" style="max-width:100%"/>'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def sentence(text: str) -> str:
    """Return a paragraph of a plain text."""
    return f"<p>{escape(text)}</p>"


def some(names: Sequence[str], most: int = 8) -> str:
    """Write the first of some names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most:,} more" if len(names) > most else "")
