"""The report of an analysis: one page that needs nothing else, and its plots as files."""

from __future__ import annotations

from pathlib import Path

from mbaas.analysis.report.page import page
from mbaas.analysis.whole import Analysis
from mbaas.errors import ConfigError

__all__ = ["page", "write_plots", "write_report"]


def write_report(analysis: Analysis, path: Path, *, command: str | None = None) -> None:
    """Write the page.

    Args:
        command: that made the analysis, to be shown.

    Raises:
        ConfigError: the folder does not exist.
    """
    path = Path(path)
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"the folder of the report must exist, got {path.parent}")
    path.write_text(page(analysis, command=command), encoding="utf-8")


def write_plots(analysis: Analysis, folder: Path, suffix: str = ".svg") -> list[Path]:
    """Write the stall split, the pipeline, the what-if curves and the measured curves, each to a file of a folder.

    The folder is made if it is missing.

    Args:
        suffix: of the files, ".svg" or ".png".

    Raises:
        ConfigError: another suffix, or the folder cannot be made.
        MbaasError: matplotlib is not installed.
    """
    from mbaas.analysis.plots import check_path, save
    from mbaas.analysis.report.figures import figures

    folder = Path(folder)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder of plots {folder}: {error.strerror}") from None
    check_path(folder / f"split{suffix}")
    written = []
    for name, figure in figures(analysis).items():
        path = folder / f"{name}{suffix}"
        save(figure, path)
        written.append(path)
    return written
