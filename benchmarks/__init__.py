"""Benchmarks that developers of mbaas run from a checkout: ``python -m benchmarks --help``."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from rich.table import Table

from mbaas.samples.fields import LABEL, SAMPLE_ID
from mbaas.tools.bench.render import figure_table

Result = TypeVar("Result")

ID_BYTES = LABEL.nbytes + SAMPLE_ID.nbytes
"""Bytes of label and sample id, stored with the image of each sample."""


def rows(
    title: str, results: Iterable[Result], columns: Mapping[str, Callable[[Result], str]], words: Collection[str] = ()
) -> Table:
    """Return a table with a row for each result; ``columns`` maps headings to the texts of cells."""
    table = figure_table(title, columns, words=words)
    for result in results:
        table.add_row(*(text(result) for text in columns.values()))
    return table
