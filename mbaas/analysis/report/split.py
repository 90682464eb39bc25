"""What an epoch is spent on, as bars: predicted, found by comparing runs, and as loaders say."""

from __future__ import annotations

from dataclasses import dataclass

from mbaas.analysis import words
from mbaas.analysis.measuring.verify import Split
from mbaas.analysis.quantity import Quantity
from mbaas.analysis.report.amounts import seconds
from mbaas.analysis.report.markup import Markup, element, joined
from mbaas.analysis.report.tables import details, key, table
from mbaas.analysis.whatif import Epoch
from mbaas.analysis.whole import Analysis

PARTS = (("compute", "training"), ("prep", "waiting for prep"), ("fetch", "waiting for reads"))
"""Class of a part, and what a trial does then."""

MEANINGS = (
    ("compute", "training"),
    ("prep", "waiting for prep: samples are read, but not decoded and transformed yet"),
    ("fetch", "waiting for reads: bytes have not come yet"),
)

LEAST_LABEL = 0.09
"""A part that is a smaller share of its bar has no number in it."""


@dataclass(frozen=True)
class Bar:
    """An epoch of one trial: ``parts`` in the order of `PARTS`, in seconds; ``cells`` are those for a table."""

    name: str
    parts: tuple[float, float, float]
    cells: tuple[str, str, str, str]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the whole."""
        whole = sum(self.parts)
        return tuple(part / whole for part in self.parts)

    @property
    def said(self) -> str:
        """The bar in words."""
        return ", ".join(f"{words.share(share)} {does}" for (_, does), share in zip(PARTS, self.shares, strict=True))


def bars_of(analysis: Analysis) -> list[Bar]:
    """The prediction, and what was run, if anything was."""
    epoch = analysis.prediction.steady
    found = [_bar(f"predicted, {words.seconds(epoch.epoch_s.value)}", epoch)]
    if analysis.split is not None:
        split = analysis.split
        found += [_bar(f"three runs compared, {words.seconds(split.epoch_s.value)}", split), _as_loaders_say(split)]
    return found


def stall_split(analysis: Analysis) -> Markup:
    """Bars, how they came about, and the same as a table."""
    bars = bars_of(analysis)
    rows = [(bar.name, *bar.cells) for bar in bars]
    heads = ("an epoch of one trial", *(does for _, does in PARTS), "in all")
    return joined(
        [
            element("figure", key(*MEANINGS), *map(_drawn, bars), element("figcaption", _how(analysis))),
            details("The bars as a table", table("An epoch of one trial", heads, rows, numbers=(1, 2, 3, 4))),
        ]
    )


def _bar(name: str, of: Epoch | Split) -> Bar:
    parts = (of.compute_s, of.prep_stall_s, of.fetch_stall_s)
    first, second, third = (part.value for part in parts)
    return Bar(name, (first, second, third), _cells(*parts, of.epoch_s))


def _as_loaders_say(split: Split) -> Bar:
    waits = (split.live_prep_stall_s, split.live_fetch_stall_s)
    prep_s, fetch_s = (part.value for part in waits)
    trains_s = max(0.0, split.epoch_s.value - prep_s - fetch_s)
    cells = (words.seconds(trains_s), *map(seconds, waits), seconds(split.epoch_s))
    first, second, third, fourth = cells
    return Bar("as loaders say while they run", (trains_s, prep_s, fetch_s), (first, second, third, fourth))


def _cells(compute: Quantity, prep: Quantity, fetch: Quantity, whole: Quantity) -> tuple[str, str, str, str]:
    return seconds(compute), seconds(prep), seconds(fetch), seconds(whole)


def _drawn(bar: Bar) -> Markup:
    segments = [
        element(
            "span",
            element("span", words.share(share)) if share >= LEAST_LABEL else "",
            class_=f"part {kind}",
            style=f"width:{100 * share:.2f}%",
        )
        for (kind, _), share in zip(PARTS, bar.shares, strict=True)
        if share > 0
    ]
    named = element("p", element("strong", bar.name), element("span", f": {bar.said}", class_="quiet"))
    return element("div", named, element("div", *segments, class_="stack", aria_hidden="true"), class_="bar")


def _how(analysis: Analysis) -> str:
    split = analysis.split
    predicted = f"The prediction is of the whole dataset, {words.counted(analysis.rates.samples, 'sample')}."
    if split is None:
        return f"{predicted} No feed was run for this analysis, so nothing stands beside it."
    agree = "agree to" if split.disagreement <= 0.1 else "disagree by"
    return (
        f"{predicted} The other bars are of a part of it, {words.counted(split.samples, 'sample')}: first trained on "
        "made-up data that is always ready, then with all data in memory, then as it is. What the second run takes "
        "longer is waiting for prep, what the third takes longer still is waiting for reads. Loaders say by "
        f"themselves what they wait for; both ways {agree} {words.share(split.disagreement)} of the epoch."
    )
