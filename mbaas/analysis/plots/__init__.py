"""Plots in one house style, as matplotlib figures; matplotlib is imported when the first is made."""

from __future__ import annotations

from mbaas.analysis.plots.charts import heat_map, histogram, lines, stacked_bars
from mbaas.analysis.plots.style import SUFFIXES, check_path, save

__all__ = ["SUFFIXES", "check_path", "heat_map", "histogram", "lines", "save", "stacked_bars"]
