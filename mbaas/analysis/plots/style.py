"""One look for all plots, readable on white and on black: no background, grey ink, colours of middling brightness.

Figures are made and saved without pyplot, so they need no display and leave no state behind.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbaas.errors import ConfigError, MbaasError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#777777"
SERIES = ("#3b82c4", "#d4583f", "#2f9e6e", "#9a6cc9", "#c08a1e", "#2aa3a8", "#c55a93", "#8a8f98")
"""Colours of lines and bars, in turn."""

SUFFIXES = (".png", ".svg")
_SETTINGS: Any = {"svg.hashsalt": "mbaas", "svg.fonttype": "none", "font.family": "sans-serif"}


def check_path(path: Path) -> None:
    """Refuse early what `save` would refuse late.

    Raises:
        ConfigError: the suffix is none of `SUFFIXES`, or the folder does not exist.
        MbaasError: matplotlib is not installed.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"a plot's file must end with {' or '.join(SUFFIXES)}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder of a plot must exist, got {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MbaasError("plots need matplotlib; install it with: pip install matplotlib") from None


def new_figure(*, title: str, width: float = 8.0, height: float = 4.5) -> tuple[Figure, Axes]:
    """An empty figure, inches wide and high, with one set of axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    style(axes)
    return figure, axes


def style(axes: Axes) -> None:
    """Give axes the look; again after something that makes new ones."""
    axes.patch.set_alpha(0)
    axes.tick_params(colors=INK, labelsize=9, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(9)
    axes.set_axisbelow(True)


def whole_numbers(axes: Axes) -> None:
    """No fractions below the horizontal axis."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def add_legend(axes: Axes, *, columns: int) -> None:
    """A legend below the plot."""
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=columns, frameon=False, labelcolor=INK, fontsize=9
    )


def save(figure: Figure, path: Path) -> None:
    """Write PNG or SVG, as the suffix says; the same figure gives the same SVG.

    Raises:
        ConfigError: another suffix, or the folder does not exist.
    """
    import matplotlib

    check_path(path)
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    with matplotlib.rc_context(_SETTINGS):
        figure.savefig(path, dpi=150, transparent=True, metadata=metadata)
