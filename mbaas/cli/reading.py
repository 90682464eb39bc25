"""Read the data of a feed's file, with a progress bar on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar

from mbaas.cli.console import err
from mbaas.cli.feed_data import FeedData
from mbaas.progress import Progress, watched
from mbaas.units import count

if TYPE_CHECKING:
    from mbaas.dataset import Dataset


def read(data: FeedData) -> Dataset:
    """List or read the data, with a progress bar on a terminal.

    Raises:
        ConfigError, DatasetError: see `FeedData.read`.
    """
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),  # a folder's name may contain brackets
        BarColumn(20),
        TextColumn("{task.fields[counted]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with ProgressBar(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(f"listing {data.where}", total=None, counted="")

        def show(progress: Progress) -> None:
            counted = f"{count(progress.done)} of {count(progress.total)} {progress.things}"
            bar.update(task, total=progress.total, completed=progress.done, counted=counted)

        with watched(show):
            return data.read()
