"""What-if curves with the points that were run on them, and the measured curves that they rest on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mbaas.analysis import words
from mbaas.analysis.answers import Curve
from mbaas.analysis.measuring.verify import Check
from mbaas.analysis.rates import MeasuredCurve
from mbaas.analysis.report.amounts import SHORT, sentence, setting, with_interval
from mbaas.analysis.report.chart import Chart, Line, Point, charts_beside, drawn, nice_step, nice_ticks
from mbaas.analysis.report.markup import Markup, element, joined
from mbaas.analysis.report.studies import Study, studies
from mbaas.analysis.report.tables import details, key, table
from mbaas.analysis.whole import Analysis

ROWS = 8
"""Of a table of a curve, besides points that mean something."""

SPEED = "samples/s in each trial"

FRACTIONS = {0.25: "¼", 0.5: "½"}


def what_if(analysis: Analysis) -> Markup:
    """A chart, its meaning and its table for each parameter."""
    found = studies(analysis)
    entries = [("line-main", "predicted, with the interval that the measurements leave open")]
    if any(study.other is not None for study in found):
        main = "one feed shared by all trials" if analysis.setup.sharing else "a feed for each trial"
        other = "a feed for each trial" if analysis.setup.sharing else "one feed shared by all trials"
        entries = [("line-main", f"predicted, {main}, with its interval"), ("line-other", f"predicted, {other}")]
    if any(study.checks for study in found):
        entries.append(("diamond", "run and measured, with its interval"))
    entries.append(("line-now", "now"))
    if any(study.enough is not None for study in found):
        entries.append(("line-enough", "enough: more of it brings nothing"))
    return joined([key(*entries), charts_beside(*map(_figure, found))])


def measured_curves(analysis: Analysis) -> Markup:
    """P against workers and S against readers, with the straight lines that predictions follow."""
    rates = analysis.rates
    return charts_beside(
        _measured(
            "prep",
            "Preparing, data in memory",
            "prep workers",
            rates.prep,
            beyond="to add as much each",
        ),
        _measured("storage", "Reading cold storage", "readers", rates.storage, beyond="to be no faster"),
    )


def ticks_of(study: Study) -> list[tuple[float, str]]:
    """Values of the horizontal axis with their labels."""
    values = [value for value, _ in study.main.points]
    if study.log:
        powers = range(math.ceil(math.log2(values[0])), math.floor(math.log2(values[-1])) + 1)
        return [(2.0**power, FRACTIONS.get(2.0**power, f"{2.0**power:g}")) for power in powers]
    if "bytes" in study.parameter:
        return [
            (value, words.size(value).replace(".0 ", " ") if value else "0")
            for value in nice_ticks(values[-1], ticks=4)
        ]
    return _whole_ticks(values[0], values[-1])


def label_of(check: Check) -> str:
    """What was run and found, in words."""
    return (
        f"{setting(check.parameter, check.value)}: measured {with_interval(check.found)}, predicted "
        f"{with_interval(check.predicted)} samples/s, {100 * check.error:+.1f} %"
    )


def _figure(study: Study) -> Markup:
    lines = [Line([(x, p.steady.trial_per_s) for x, p in study.main.points])]
    if study.other is not None:
        other = [(x, p.steady.trial_per_s) for x, p in study.other.points]
        lines.insert(0, Line(other, kind="other", band=False))
    marks = [(study.now, "now")]
    if study.enough is not None and study.enough != study.now:
        marks.append((study.enough, "enough"))
    chart = Chart(
        name=study.parameter.replace("_", "-"),
        title=f"{study.title}: predicted {SPEED} against {study.axis}",
        x=study.axis,
        y=SPEED,
        ticks=ticks_of(study),
        lines=lines,
        points=[Point(value, check.found, label_of(check)) for value, check in study.checks],
        marks=marks,
        log=study.log,
    )
    caption = element("figcaption", " ".join(study.sentences))
    numbers = details("The numbers", _table(study))
    return element("div", element("figure", element("h3", study.title), drawn(chart), caption), numbers)


def _table(study: Study) -> Markup:
    checked = dict(study.checks)
    special = {study.now, *checked, *([study.enough] if study.enough is not None else [])}
    shown = _some(study.main, special)
    others = dict(study.other.points) if study.other is not None else {}
    other = ["a feed each" if study.sharing else "sharing one feed"] if others else []
    heads = [study.axis, SPEED, *other, *(["measured", "error"] if checked else []), "an epoch", "sets the pace"]
    rows = []
    for value in shown:
        epoch = dict(study.main.points)[value].steady
        name = setting(study.parameter, value) + (" (now)" if value == study.now else "")
        row = [name, with_interval(epoch.trial_per_s)]
        if others:
            row.append(words.number(others[value].steady.trial_per_s.value))
        if checked:
            check = checked.get(value)
            row += ["", ""] if check is None else [with_interval(check.found), f"{100 * check.error:+.1f} %"]
        rows.append([*row, words.seconds(epoch.epoch_s.value), SHORT[epoch.limit]])
    numbers = [n for n, head in enumerate(heads) if n and head != "sets the pace"]
    return table(f"{study.title}: predictions", heads, rows, numbers=numbers)


def _some(along: Curve, special: set[float]) -> list[float]:
    """A few values, and those that mean something."""
    values = [value for value, _ in along.points]
    step = (len(values) - 1) / (ROWS - 1)
    return sorted({*(values[round(step * number)] for number in range(ROWS)), *special})


def _measured(name: str, title: str, axis: str, curve: MeasuredCurve, *, beyond: str) -> Markup:
    most = curve.most
    counts = sorted({0.0, *(count for count, _ in curve.points), *(most * n / 40 for n in range(1, 41))})
    fitted = [(count, curve.quantity(count)) for count in counts if count]
    points = [
        Point(count, rate, f"{words.number(count)} {axis}: {with_interval(rate)} samples/s")
        for count, rate in curve.points
    ]
    chart = Chart(
        name=f"measured-{name}",
        title=f"{title}: samples/s against {axis}",
        x=axis,
        y="samples/s",
        ticks=_whole_ticks(0, most),
        lines=[Line(fitted)],
        points=points,
    )
    rows = [
        (words.number(count), with_interval(rate), words.number(curve.rate(count)), str(rate.samples or "stated"))
        for count, rate in curve.points
    ]
    numbers = table(title, (axis, "samples/s", "straight lines say", "measurements"), rows, numbers=(1, 2, 3))
    caption = element("figcaption", _about_fit(curve, beyond))
    return element(
        "div", element("figure", element("h3", title), drawn(chart), caption), details("The numbers", numbers)
    )


def _about_fit(curve: MeasuredCurve, beyond: str) -> str:
    if len(curve.points) == 1:
        return f"One point is known; more are taken {beyond}."
    return sentence(
        f"predictions follow straight lines through the measured points (R²\u00a0{curve.fit.r_squared:.3f}, at most "
        f"{words.share(curve.worst_error)} off); the band holds all measurements"
    )


def _whole_ticks(first: float, last: float) -> list[tuple[float, str]]:
    """Whole numbers, the first one too."""
    step = max(1.0, nice_step(last, ticks=6)) if last > 6 else 1.0
    step = math.ceil(step)
    values: Sequence[float] = [step * number for number in range(1, int(last // step) + 1)]
    shown = [first, *(value for value in values if value - first >= step / 2)]
    return [(value, f"{value:,.0f}") for value in shown]
