"""The report as one page: no scripts, no network, one file.

What it says stands in ``templates/page.html``, how it looks in ``templates/style.css``.
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from mbaas import units
from mbaas.analysis import words
from mbaas.analysis.answers import bottleneck
from mbaas.analysis.changes import DISAGREEMENT
from mbaas.analysis.report.charts import PARTS, Chart, bars_of, charts
from mbaas.analysis.report.inline import inline
from mbaas.analysis.report.pipeline import MOST_ROOM, SETS_THE_PACE, boxes_of, links_of
from mbaas.analysis.report.studies import studies
from mbaas.analysis.whole import Analysis, StoppedAnalysis

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffe\uffff]|[\ud800-\udfff]")
"""Characters that paths may hold, but neither HTML nor XML."""

_UNIT = re.compile(r"(?<=\d) (?=(?:%|[mµ]?s|min|h|days|[kMGTP]?B)(?!\w))")
"""The space between a number and its unit, where no line may end."""


def page(analysis: Analysis | StoppedAnalysis, *, command: str | None = None) -> str:
    """Make the whole page, as HTML that is well-formed XML too; the same for the same analysis.

    Args:
        analysis: of one that was stopped early the page holds the rates that were measured.
        command: that made the analysis, to be shown.
    """
    if isinstance(analysis, StoppedAnalysis):
        return environment().get_template("stopped.html").render(analysis=analysis, command=command)
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
            infinity=math.inf,  # templates have no word for it
        )
    )


@cache
def environment() -> Environment:
    """Load the templates, and set how they write what they are given: text never becomes markup."""
    made = Environment(
        loader=PackageLoader("mbaas.analysis.report"),
        autoescape=True,
        undefined=StrictUndefined,  # a misspelt name raises; by default it would be an empty text on the page
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
    """Write text as it was typed: its spaces stay, so that it can be copied."""
    # as markup, so that `_finalize` leaves it alone: a space that no line ends at would be copied into a shell
    return Markup("<code>{}</code>").format(_FORBIDDEN.sub("\ufffd", text))


def _drawn(chart: Chart) -> Markup:
    """Put a chart on the page; one that fills it also for a phone, where the style shows that one instead."""
    if chart.narrow is None:
        return inline(chart.figure, name=chart.name, said=chart.said)
    wide = inline(chart.figure, name=chart.name, said=chart.said, kind="wide")
    return wide + inline(chart.narrow, name=f"{chart.name}-narrow", said=chart.said, kind="narrow")


def _finalize(value: Any) -> Any:
    """Write text as prose, but numbers and markup as they are."""
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return _UNIT.sub("\u00a0", _FORBIDDEN.sub("\ufffd", value))
