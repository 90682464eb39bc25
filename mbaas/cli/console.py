"""Where the commands write."""

from __future__ import annotations

import sys

from rich.console import Console

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
