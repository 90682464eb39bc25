"""How commands get their help: the docstring, paragraph by paragraph, and examples below the options."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import typer

Function = TypeVar("Function", bound=Callable[..., Any])


def examples(*lines: str) -> str:
    """What stands below a command's options."""
    return "\n".join(["[bold]Examples[/]", *(f"  {line}" for line in lines)])


def command(app: typer.Typer, *lines: str) -> Callable[[Function], Function]:
    """Register a command of ``app``, with these examples."""

    def register(function: Function) -> Function:
        paragraphs = inspect.cleandoc(function.__doc__ or "").split("\n\n")
        text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
        return app.command(help=text, epilog=examples(*lines))(function)

    return register
