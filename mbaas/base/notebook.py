"""HTML for notebooks: tables and pictures instead of ``repr``, and progress bars."""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Mapping
from html import escape
from typing import Any

from mbaas.base import units

BAR_AFTER_S = 1.0
"""Shorter work shows no bar."""

BAR_EVERY_S = 0.2
"""Shortest time between two updates of a bar: each is a message to the browser."""


def table(title: str, rows: Mapping[str, str]) -> str:
    """Return a table with a heading, and a name and a text in each row; everything is escaped."""
    cells = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th><td style="text-align:left">{escape(text)}</td></tr>'
        for name, text in rows.items()
    )
    return f"<table><caption><b>{escape(title)}</b></caption>{cells}</table>"


def picture(png: bytes, caption: str) -> str:
    """Return a PNG with a caption below. The image data are in the HTML, so a saved notebook keeps them."""
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    image = f'<img alt="{escape(caption)}" src="{source}" style="max-width:100%"/>'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def sentence(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def is_running() -> bool:
    """Return whether this process is a notebook kernel; IPython in a terminal does not count."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class Bar:
    """A bar in a notebook cell's output, updated in place; it stays there when the work is done."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._began = time.monotonic()
        self._next = self._began + BAR_AFTER_S

    def show(self, things: str, done: int, total: int) -> None:
        from IPython.display import display

        now, is_over = time.monotonic(), done >= total
        if (is_over and self._handle is None) or (not is_over and now < self._next):
            return
        self._next = now + BAR_EVERY_S
        elapsed = f", {units.seconds(now - self._began)}" if is_over else ""
        text = f"{done:,} of {total:,} {things}{elapsed}"
        bar = f'<progress value="{done}" max="{max(1, total)}" style="width:20em"></progress>'
        state = {"text/plain": text, "text/html": f"{bar} {escape(text)}"}
        if self._handle is None:
            self._handle = display(state, raw=True, display_id=True)
        else:
            self._handle.update(state, raw=True)
