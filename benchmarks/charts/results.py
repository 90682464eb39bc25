"""Reads the tables in ``docs/results``, and the command, machine, date and commit of each."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "results"

SOURCES = "sources"
"""The table with the command, machine, date and commit of each other table."""

Row = Mapping[str, str]


@dataclass(frozen=True)
class Source:
    """The origin of a table."""

    command: str
    machine: str
    date: str
    commit: str

    @property
    def line(self) -> str:
        return f"{self.machine}, {self.date}"


def table(name: str) -> Sequence[Row]:
    """Read a table; a row maps the names of columns to strings."""
    with (FOLDER / f"{name}.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def source(name: str) -> Source:
    """Find the source of a table."""
    (row,) = (row for row in table(SOURCES) if row["table"] == name)
    return Source(row["command"], row["machine"], row["date"], row["commit"])


def names() -> list[str]:
    """List all tables except `SOURCES`."""
    return sorted(path.stem for path in FOLDER.glob("*.csv") if path.stem != SOURCES)
