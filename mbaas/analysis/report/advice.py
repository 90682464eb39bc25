"""What would help, the recommended change first and in full."""

from __future__ import annotations

from mbaas.analysis.changes import Change
from mbaas.analysis.quantity import Quantity
from mbaas.analysis.report.amounts import seconds, sentence, with_interval
from mbaas.analysis.report.markup import Markup, element, joined
from mbaas.analysis.report.tables import table
from mbaas.analysis.whole import Analysis

KINDS = {"setting": "a setting, nothing to buy", "purchase": "has to be bought"}


def advice(analysis: Analysis) -> Markup:
    """The recommended change as a picture of now and then, the others as a table."""
    if not analysis.changes:
        return element("p", "Nothing that was looked at would make an epoch 2 % faster.", class_="lead")
    first, *others = analysis.changes
    parts = [_recommended(analysis.prediction.steady.epoch_s, first)]
    if others:
        parts += [element("h3", "What else would help"), _others(others)]
    return joined(parts)


def _recommended(now_s: Quantity, change: Change) -> Markup:
    then_s = change.prediction.steady.epoch_s
    most_s = max(now_s.value, then_s.value)
    return element(
        "div",
        element("p", "Recommended", class_="tag"),
        element("p", sentence(change.advice), class_="lead"),
        element("p", f"Epochs become {with_interval(change.speedup)} times as fast; {KINDS[change.kind]}."),
        element("div", _duration("now", now_s, most_s), _duration("then", then_s, most_s), class_="durations"),
        class_="recommended",
    )


def _duration(name: str, epoch_s: Quantity, most_s: float) -> Markup:
    share = epoch_s.value / most_s
    bar = element("span", class_=f"duration {name}", style=f"width:{100 * share:.2f}%")
    track = element("span", bar, class_="track", aria_hidden="true")
    return element("p", element("span", name, class_="when"), track, element("span", seconds(epoch_s), class_="long"))


def _others(changes: list[Change]) -> Markup:
    rows = [
        (
            sentence(change.advice),
            seconds(change.prediction.steady.epoch_s),
            with_interval(change.speedup),
            KINDS[change.kind],
        )
        for change in changes
    ]
    heads = ("each on its own", "an epoch takes", "times as fast", "kind")
    return table("Other changes", heads, rows, numbers=(1, 2))
