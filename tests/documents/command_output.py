"""The output of a command of mbaas, as pages show it."""

from __future__ import annotations

import shlex
from unittest import mock

from typer.testing import CliRunner

from mbaas.cli import app, console


def run(line: str) -> str:
    """Run a command in this process, at the width of the documents, and return its output."""
    # Setting COLUMNS has no effect: a console reads it when it is created, perhaps by an earlier test.
    with mock.patch.object(console.out, "_width", 100):
        ended = CliRunner().invoke(app, shlex.split(line), env={"NO_COLOR": "1"})
    assert ended.exit_code == 0, ended.output
    return ended.stdout
