"""Where the commands write, and how they write numbers."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.filesize import decimal

out = Console(highlight=False)
"""Results."""

err = Console(stderr=True, highlight=False)
"""What goes on, and errors."""


def line(console: Console, text: str, style: str | None = None) -> None:
    """One line as it is, however long: pipes and logs want no folded lines."""
    console.print(text, style=style, markup=False, soft_wrap=True)


def say_error(sentence: str) -> None:
    """An error, as one line on stderr."""
    err.print(f"[bold red]error:[/] {plain(sentence)}", soft_wrap=True)


def say_note(sentence: str) -> None:
    """Something worth knowing that stops nothing, as one line on stderr."""
    err.print(f"[yellow]note:[/] {plain(sentence)}", soft_wrap=True)


def plain(sentence: str) -> str:
    """Text for `Console.print` and its like, without folds and with nothing taken for markup."""
    return " ".join(sentence.split()).replace("[", r"\[")


def write_json(text: str) -> None:
    """JSON for programs: never coloured, never folded."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def size(size_bytes: float) -> str:
    """Bytes in decimal units, as in mbaas's messages: "9.6 MB"."""
    return f"{size_bytes:.0f} B" if size_bytes < 1000 else decimal(int(size_bytes))


def count(number: float) -> str:
    """A whole number with thousands apart: "12,345"."""
    return f"{number:,.0f}"


def share(fraction: float) -> str:
    """A share of 1: "12 %"; what is not zero does not look like it."""
    percent = 100 * fraction
    return f"{percent:.0f} %" if percent == 0 or percent >= 9.95 else f"{percent:.1f} %"


def duration(seconds: float) -> str:
    """A length of time: "12 s", "3 min 05 s", "2 h 07 min", "3 d 04 h"."""
    for unit, length, below, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit} {seconds % length // part:02.0f} {below}"
    return f"{seconds:.0f} s"


def about(seconds: float) -> str:
    """A length of time for a narrow column: "12 s", "3 min", "2 h", "3 d"."""
    unit, length = next((u for u in (("d", 86400), ("h", 3600), ("min", 60)) if seconds >= u[1]), ("s", 1))
    return f"{seconds // length:.0f} {unit}"
