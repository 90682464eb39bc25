"""The report of an analysis: one self-contained page, and its charts as files."""

from __future__ import annotations

from pathlib import Path

from mbaas.errors import ConfigError
from mbaas.tools.analysis import plots
from mbaas.tools.analysis.report.charts import charts
from mbaas.tools.analysis.report.page import page
from mbaas.tools.analysis.report.studies import studies
from mbaas.tools.analysis.whole import Analysis

__all__ = ["page", "write_plots", "write_report"]


def write_report(analysis: Analysis, path: Path, *, command: str | None = None) -> None:
    """Write the `page` to a file."""
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"the folder of the report must exist, got {path.parent}")
    path.write_text(page(analysis, command=command), encoding="utf-8")


def write_plots(analysis: Analysis, folder: Path) -> list[Path]:
    """Write each chart of the page to an SVG file in a folder, which is created if missing."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder of plots {folder}: {error.strerror}") from None
    written = []
    for chart in charts(analysis, studies(analysis)):
        path = folder / f"{chart.name}.svg"
        plots.save(chart.figure, path)
        written.append(path)
    return written
