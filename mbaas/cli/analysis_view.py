"""Render an analysis for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mbaas.base import units
from mbaas.cli.console import Rows, stack
from mbaas.model import words
from mbaas.model.gpu_stages import DevicePlan
from mbaas.model.pace import Epoch, WhatIfCurve, bottleneck, fewest_prep_cores, predict, smallest_cache
from mbaas.model.quantity import Quantity
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.advice import Change, Offer, epoch_costs, verdict
from mbaas.tools.analysis.decoding import Decoding, decoding
from mbaas.tools.analysis.measuring.verify import EpochSplit, Verification
from mbaas.tools.analysis.whole import Analysis

WIDTH = 40
"""Cells of the bar that shows an epoch."""

GOOD = 0.05
"""Relative error above which a prediction is coloured."""


def page(found: Analysis) -> RenderableType:
    """Return the verdict, the bar of an epoch, the rates, useful changes, and the accuracy of predictions."""
    devices = found.devices
    parts = [
        Text(found.sentence, "bold"),
        _epoch(found.prediction.steady),
        _rates(found.rates, found.setup),
        _curves(found) if len(found.rates.prep.points) > 1 else None,
        _points(found.decoding) if found.decoding is not None else None,
        _split(found.split) if found.split is not None else None,
        _changes(found.changes) if found.changes else None,
        _verification(found.verification) if found.verification is not None else None,
        Text(words.sentence(found.costs.sentence)),
        Text(" ".join(map(words.sentence, (devices.sentence, *devices.told)))) if devices is not None else None,
        Text(f"{found.subject.data}\n{found.subject.machine}, {found.subject.date}", "dim"),
    ]
    return stack(parts)


def what_if_page(
    rates: Rates,
    setup: Setup,
    changed: Setup,
    *,
    curve: WhatIfCurve | None,
    offered: Sequence[Offer] | None,
    crosses: DevicePlan | None = None,
) -> RenderableType:
    """Return the effect of the changes, and the smallest sufficient cache and prep."""
    before, after = predict(rates, setup).steady, predict(rates, changed).steady
    parts = [
        Text(verdict(rates, changed), "bold"),
        _comparison(before, after) if changed != setup else None,
        _epoch(after),
        _points(
            bottleneck(rates, changed).sentence,
            smallest_cache(rates, changed).reason,
            fewest_prep_cores(rates, changed).reason,
            epoch_costs(rates, changed).sentence,
            crosses,
            decoding(rates, changed),
        ),
        _curve(curve) if curve is not None else None,
        _offers(offered) if offered is not None else None,
    ]
    return stack(parts)


def _points(*said: str | DevicePlan | Decoding | None) -> RenderableType:
    """Return a list of sentences, with those of each answer."""
    sentences = [
        sentence
        for each in said
        if each is not None
        for sentence in ([each] if isinstance(each, str) else (each.sentence, *each.told))
    ]
    return Group(*(Text(f"· {sentence}") for sentence in sentences))


def _epoch(epoch: Epoch) -> RenderableType:
    parts = [
        ("compute", epoch.compute_s, "green", "█"),
        ("waits for prep", epoch.prep_stall_s, "yellow", "▓"),
        ("waits for bytes", epoch.fetch_stall_s, "red", "░"),
    ]
    whole = sum(part.value for _, part, _, _ in parts) or 1.0
    bar = Text()
    legend = Text()
    for name, part, style, mark in parts:
        share = part.value / whole
        bar.append(mark * round(WIDTH * share), style)  # distinct marks for terminals without colours
        if share >= 0.0005:  # leave out parts that would be shown as "0.0 %"
            legend.append(f"{mark} ", style)
            legend.append(f"{name} {units.percent(share)}   ")
    return Group(bar.append(f"  an epoch takes {words.duration(epoch.epoch_s)}"), legend)


def _rates(rates: Rates, setup: Setup) -> RenderableType:
    workers = setup.workers_of(rates.cores)
    readers = rates.storage.fastest[0]
    decoded = rates.decoded_prep
    rows = [
        ("G", rates.step, "training rate of one trial with data always ready"),
        ("P", rates.prep.quantity(workers), f"{units.counted(workers, 'prep worker')} prepare from memory"),
        (
            "",
            rates.feed_quantity(workers) if rates.serving_s.high else None,
            "the same workers in a feed, including delivery",
        ),
        (
            "",
            decoded.quantity(workers) if decoded is not None else None,
            "the same workers prepare samples that are decoded",
        ),
        ("S", rates.storage.quantity(readers), f"{units.counted(int(readers), 'reader')} read cold storage at random"),
        ("C", rates.cache.scaled(1 / rates.sample_bytes, unit="samples/s"), "cached samples come from memory"),
    ]
    return Rows((name, rate, meaning) for name, rate, meaning in rows if rate is not None).table(
        ("*measured", lambda row: row[0]),
        (">rate", lambda row: _per_s(row[1])),
        (">±", lambda row: units.percent(row[1].spread)),
        ("~measured as", lambda row: row[2]),
    )


def _curves(found: Analysis) -> RenderableType:
    """Return P against workers and threads, S against readers, and each point's stage of contention."""
    curves = {
        "prep workers": found.rates.prep,
        "the same, decoded samples": found.rates.decoded_prep,
        "threads of one worker": found.prep_threads,
        "readers of storage": found.rates.storage,
    }
    points = (
        ("" if number else name, count, rate, curve.fit.curve.stage(count))
        for name, curve in curves.items()
        if curve is not None
        for number, (count, rate) in enumerate(curve.points)
    )
    return Rows(points).table(
        ("how it scales", lambda point: point[0]),
        (">count", lambda point: units.exact(point[1])),
        (">rate", lambda point: _per_s(point[2])),
        (">±", lambda point: units.percent(point[2].spread)),
        ("~stage", lambda point: point[3]),
    )


def _split(split: EpochSplit) -> RenderableType:
    said = split.live_prep_stall_s, split.live_fetch_stall_s, split.live_peer_stall_s
    rest = split.epoch_s.value - sum(part.value for part in said)
    compared = "three runs compared", *map(_s, (split.compute_s, split.prep_stall_s, split.fetch_stall_s)), "-"
    reported = "reported by loaders", units.seconds(rest), *map(_s, said)
    return Rows((compared, reported)).table(
        ("an epoch, as run", lambda row: row[0]),
        (">compute", lambda row: row[1]),
        (">waits for prep", lambda row: row[2]),
        (">for bytes", lambda row: row[3]),
        (">for other trials", lambda row: row[4]),
        (">epoch", lambda _: _s(split.epoch_s)),
    )


def _changes(changes: Sequence[Change]) -> RenderableType:
    return Rows(changes).table(
        ("what would help", lambda change: change.advice),
        (">epoch", lambda change: _s(change.epoch_s)),
        (">times as fast", lambda change: units.number(change.speedup.value)),
        ("~", lambda change: "a setting" if change.kind == "setting" else "to be bought"),
        strong_first=True,
    )


def _verification(verification: Verification) -> RenderableType:
    table = Rows(verification.checks).table(
        ("verified predictions", lambda check: f"{check.parameter} = {words.setting(check.parameter, check.value)}"),
        (">predicted", lambda check: _per_s(check.predicted)),
        (">found", lambda check: _per_s(check.found)),
        (">error", lambda check: _error(check.error)),
        (">simulated", lambda check: f"{units.number(check.simulated)}/s"),
        (">error", lambda check: _error(check.simulated_error)),
        ("~limit", lambda check: words.NAMES[check.limit]),
    )
    median, worst = (units.percent(error) for error in (verification.median_error, verification.worst_error))
    slowest, fastest = map(units.number, verification.paces)
    pace = (
        f"the machine was {slowest} to {fastest} times as fast as during the measurements; predictions account for it"
    )
    return Group(table, Text(f"  median error {median}, worst {worst}\n  {pace}", "dim"))


def _error(error: float) -> Text:
    return Text(units.percent(error, signed=True), "green" if abs(error) <= GOOD else "yellow")


def _comparison(before: Epoch, after: Epoch) -> RenderableType:
    figures: dict[str, Callable[[Epoch], str]] = {
        "epoch": lambda epoch: words.duration(epoch.epoch_s),
        "samples/s of a trial": lambda epoch: units.number(epoch.trial_per_s.value),
        "waits for data": lambda epoch: units.percent(epoch.prep_stall + epoch.fetch_stall),
        "limit": lambda epoch: words.NAMES[epoch.limit],
    }
    return Rows(figures.items()).table(
        ("", lambda each: each[0]), (">now", lambda each: each[1](before)), (">then", lambda each: each[1](after))
    )


def _curve(curve: WhatIfCurve) -> RenderableType:
    return Rows((value, found.steady) for value, found in curve.points).table(
        (curve.parameter, lambda point: words.setting(curve.parameter, point[0])),
        (">samples/s of a trial", lambda point: units.number(point[1].trial_per_s.value)),
        (">epoch", lambda point: words.duration(point[1].epoch_s)),
        ("~limit", lambda point: words.NAMES[point[1].limit]),
    )


def _offers(offered: Sequence[Offer]) -> RenderableType:
    return Rows(offered).table(
        ("machines", lambda offer: offer.machine),
        (">nodes", lambda offer: offer.nodes),
        (">job", lambda offer: words.duration(offer.job_s)),
        (">cost", lambda offer: units.number(offer.cost.value)),
        (">each loads alone", lambda offer: units.number(offer.alone_cost.value)),
        ("~limit", lambda offer: words.NAMES[offer.limit]),
        strong_first=True,
    )


def _per_s(rate: Quantity) -> str:
    return f"{units.number(rate.value)}/s"


def _s(quantity: Quantity) -> str:
    return units.seconds(quantity.value)
