"""Errors of the commands: a sentence and an exit code, no traceback."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from mbaas.cli.console import say_error, say_note
from mbaas.errors import ConfigError, MbaasError

FAILED = 1
MISUSED = 2
CUT_OFF = 130


class SentencesGroup(TyperGroup):
    """The commands, with everything that mbaas raises on purpose turned into a sentence and an exit code.

    What is not raised on purpose is a bug and keeps its traceback.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            with _warnings_as_notes():
                return super().invoke(ctx)
        except ConfigError as error:
            say_error(str(error))
            raise typer.Exit(MISUSED) from None
        except MbaasError as error:
            say_error(str(error))
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            say_error("interrupted")
            raise typer.Exit(CUT_OFF) from None


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """mbaas's own warnings as sentences; those that libraries mean for programmers are left out."""

    def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        if category is UserWarning:
            say_note(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield
