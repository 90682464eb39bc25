"""The report of an analysis: one self-contained page, and its charts as files."""

from __future__ import annotations

from mbaas.tools.analysis.report.page import page, write_plots, write_report

__all__ = ["page", "write_plots", "write_report"]
