"""The report as one page: a single file without scripts or network access.

The text is in ``templates/page.html``, the style in ``templates/style.css``.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mbaas import units
from mbaas.analysis.changes import DISAGREEMENT
from mbaas.analysis.report.charts import PARTS, Chart, bars_of, charts
from mbaas.analysis.report.inline import inline
from mbaas.analysis.report.pipeline import MOST_ROOM, SETS_THE_PACE, boxes_of, links_of
from mbaas.analysis.report.studies import studies
from mbaas.analysis.whole import Analysis
from mbaas.model import words
from mbaas.model.pace import bottleneck

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]|[\ud800-\udfff]")
"""Characters that are allowed in paths, but not in HTML or XML."""

_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµ]?s|min|h|days|[kMGTP]?B)(?!\w))")
"""Spaces between a number and its unit, which must not break."""


def page(analysis: Analysis, *, command: str | None = None) -> str:
    """Return the whole page as HTML that is also well-formed XML. The output is reproducible.

    Args:
        command: the command that made the analysis, shown on the page.
    """
    found = studies(analysis)
    return (
        environment()
        .get_template("page.html")
        .render(
            analysis=analysis,
            command=command,
            bottleneck=bottleneck(analysis.rates, analysis.setup),
            boxes=boxes_of(analysis),
            links=links_of(analysis),
            bars=bars_of(analysis),
            parts=[name for name, *_ in PARTS],
            studies=found,
            charts={chart.name: _drawn(chart) for chart in charts(analysis, found)},
            most_room=MOST_ROOM,
            sets_the_pace=SETS_THE_PACE,
            disagreement=DISAGREEMENT,
            readers=analysis.rates.storage.fastest[0],
            infinity=math.inf,  # Jinja has no literal for it
        )
    )


@cache
def environment() -> Environment:
    """Load the templates with autoescaping and the filters that format values."""
    made = Environment(
        loader=PackageLoader("mbaas.analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name raises instead of rendering as an empty string
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for write in (
        units.number,
        units.count,
        units.counted,
        units.percent,
        units.rate,
        units.seconds,
        units.size,
        words.between,
        words.with_interval,
        words.duration,
        words.setting,
        words.sentence,
        words.cell,
        words.either,
        code,
    ):
        made.filters[write.__name__] = write
    return made


def code(text: str) -> Markup:
    """Format text as code with its spaces unchanged, so that it can be copied."""
    # as markup, which `_finalize` does not change: a non-breaking space would be copied into a shell
    return Markup("<code>{}</code>").format(_FORBIDDEN.sub("\ufffd", text))


def _drawn(chart: Chart) -> Markup:
    if chart.narrow is None:
        return inline(chart.figure, name=chart.name, said=chart.said)
    # CSS shows one of the two
    wide = inline(chart.figure, name=chart.name, said=chart.said, kind="wide")
    return wide + inline(chart.narrow, name=f"{chart.name}-narrow", said=chart.said, kind="narrow")


def _finalize(value: Any) -> Any:
    """Replace forbidden characters and spaces before units in text; leave numbers and markup as they are."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _UNIT.sub("\u00a0", _FORBIDDEN.sub("\ufffd", value))
