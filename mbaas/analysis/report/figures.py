"""The report's charts as matplotlib figures, for slides and papers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mbaas.analysis import plots, words
from mbaas.analysis.rates import MeasuredCurve
from mbaas.analysis.report.picture import links_of
from mbaas.analysis.report.pipes import MOST_ROOM, SETS_THE_PACE
from mbaas.analysis.report.split import PARTS, bars_of
from mbaas.analysis.report.studies import Study, studies
from mbaas.analysis.whole import Analysis

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARED, ALONE = "one feed for all trials", "a feed for each trial"

ROOM = "#c3c8d0"

COLOURS = {"compute": "#8a8f98", "prep": "#3b82c4", "fetch": "#d4583f"}


def figures(analysis: Analysis) -> dict[str, Figure]:
    """By the name of their file, without a suffix."""
    found = {"split": _split(analysis), "pipeline": _pipeline(analysis)}
    for study in studies(analysis):
        found[f"what-if-{study.parameter.replace('_', '-')}"] = _what_if(study)
    found["measured-prep"] = _measured("prep, data in memory", "prep workers", analysis.rates.prep)
    found["measured-storage"] = _measured("reads of cold storage", "readers", analysis.rates.storage)
    return found


def _split(analysis: Analysis) -> Figure:
    names = [does for _, does in PARTS]
    bars = bars_of(analysis)
    return plots.stacked_bars(
        {bar.name: {name: 100 * share for name, share in zip(names, bar.shares, strict=True)} for bar in bars},
        title="An epoch of one trial",
        axis="share of the epoch, %",
        ends=[words.seconds(sum(bar.parts)) for bar in bars],
        colours={does: COLOURS[kind] for kind, does in PARTS},
    )


def _pipeline(analysis: Analysis) -> Figure:
    """What each part could carry by itself, in times of what flows: the longer its bar, the more room it has."""
    links = links_of(analysis)
    used = [float(link.flows and link.share > 0) for link in links]
    parts = {
        f"{link.verb} ({link.said})": {"flows now": flows, "could flow": flows * (min(link.room, MOST_ROOM) - 1)}
        for link, flows in zip(links, used, strict=True)
    }
    return plots.stacked_bars(
        parts,
        title="From storage to the training step",
        axis=f"times what flows in each trial now, at most {MOST_ROOM:g}",
        ends=[SETS_THE_PACE if link.limit else "" for link in links],
        colours={"flows now": COLOURS["prep"], "could flow": ROOM},
    )


def _what_if(study: Study) -> Figure:
    name = SHARED if study.sharing else ALONE
    scale, unit = _scale(study)
    x, along = zip(*study.main.points, strict=True)
    speeds = [prediction.steady.trial_per_s for prediction in along]
    at = [value / scale for value in x]
    series = {name: (at, [speed.value for speed in speeds])}
    if study.other is not None:
        other = [prediction.steady.trial_per_s.value for _, prediction in study.other.points]
        series[ALONE if study.sharing else SHARED] = (at, other)
    points = {name: ([v / scale for v, _ in study.checks], [check.found.value for _, check in study.checks])}
    return plots.lines(
        series,
        title=study.title,
        axis=(f"{study.axis}{unit}", "samples/s in each trial"),
        bands={name: ([speed.low for speed in speeds], [speed.high for speed in speeds])},
        points=points if study.checks else None,
    )


def _measured(name: str, axis: str, curve: MeasuredCurve) -> Figure:
    at = [curve.most * number / 40 for number in range(1, 41)]
    fitted = [curve.quantity(count) for count in at]
    return plots.lines(
        {name: (at, [rate.value for rate in fitted])},
        title=name.capitalize(),
        axis=(axis, "samples/s"),
        bands={name: ([rate.low for rate in fitted], [rate.high for rate in fitted])},
        points={name: ([count for count, _ in curve.points], [rate.value for _, rate in curve.points])},
    )


def _scale(study: Study) -> tuple[float, str]:
    """What values of the axis are divided by, and the unit then."""
    if "bytes" not in study.parameter:
        return 1.0, ""
    most = study.main.points[-1][0]
    scale, unit = next(
        ((size, name) for size, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB")) if most >= size), (1e3, "kB")
    )
    return scale, f", {unit}"
