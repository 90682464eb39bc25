"""Render an analysis for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from mbaas.base import units
from mbaas.cli.console import stack, table_of
from mbaas.model import words
from mbaas.model.gpu_stages import DevicePlan
from mbaas.model.pace import Epoch, WhatIfCurve, bottleneck, fewest_prep_cores, predict, smallest_cache
from mbaas.model.quantity import Quantity
from mbaas.model.rates import Rates, Setup
from mbaas.tools.analysis.advice import Change, Offer, epoch_costs, verdict
from mbaas.tools.analysis.decoding import decoding
from mbaas.tools.analysis.measuring.verify import EpochSplit, Verification
from mbaas.tools.analysis.whole import Analysis

WIDTH = 40
"""Cells of the bar that shows an epoch."""

GOOD = 0.05
"""Relative error above which a prediction is coloured."""


def page(found: Analysis) -> RenderableType:
    """Return the verdict, the bar of an epoch, the rates, useful changes, and the accuracy of predictions."""
    parts: list[RenderableType] = [
        Text(found.sentence, "bold"),
        _epoch(found.prediction.steady),
        _rates(found.rates, found.setup),
    ]
    if len(found.rates.prep.points) > 1:
        parts.append(_curves(found))
    if found.decoding is not None:
        parts.append(Group(*(Text(f"· {sentence}") for sentence in (found.decoding.sentence, *found.decoding.told))))
    if found.split is not None:
        parts.append(_split(found.split))
    if found.changes:
        parts.append(_changes(found.changes))
    if found.verification is not None:
        parts.append(_verification(found.verification))
    parts.append(Text(words.sentence(found.costs.sentence)))
    if found.devices is not None:
        parts.append(Text(" ".join(map(words.sentence, (found.devices.sentence, *found.devices.told)))))
    parts.append(Text(f"{found.subject.data}\n{found.subject.machine}, {found.subject.date}", "dim"))
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
    parts: list[RenderableType] = [Text(verdict(rates, changed), "bold")]
    if changed != setup:
        parts.append(_comparison(before, after))
    parts.append(_epoch(after))
    reasons = (smallest_cache(rates, changed).reason, fewest_prep_cores(rates, changed).reason)
    kept = decoding(rates, changed)
    sentences = (
        bottleneck(rates, changed).sentence,
        *reasons,
        epoch_costs(rates, changed).sentence,
        *((crosses.sentence, *crosses.told) if crosses is not None else ()),
        *((kept.sentence, *kept.told) if kept is not None else ()),
    )
    parts.append(Group(*(Text(f"· {sentence}") for sentence in sentences)))
    if curve is not None:
        parts.append(_curve(curve))
    if offered is not None:
        parts.append(_offers(offered))
    return stack(parts)


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
    between = units.interval(epoch.epoch_s.low, epoch.epoch_s.high, units.seconds)
    seconds = f"  an epoch takes {units.seconds(epoch.epoch_s.value)}" + (f" ({between})" if between else "")
    return Group(bar.append(seconds), legend)


def _rates(rates: Rates, setup: Setup) -> RenderableType:
    table = table_of("measured", ">rate", ">±", "measured as")
    workers = setup.workers_of(rates.cores)
    readers = max(rates.storage.points, key=lambda point: point[1].value)[0]
    rows = [
        ("G", rates.step, "training rate of one trial with data always ready"),
        ("P", rates.prep.quantity(workers), f"{units.counted(workers, 'prep worker')} prepare from memory"),
        ("S", rates.storage.quantity(readers), f"{units.counted(int(readers), 'reader')} read cold storage at random"),
        ("C", rates.cache.scaled(1 / rates.sample_bytes, unit="samples/s"), "cached samples come from memory"),
    ]
    if rates.serving_s.high:
        rows.insert(2, ("", rates.feed_quantity(workers), "the same workers in a feed, including delivery"))
    if rates.decoded_prep is not None:
        after = next(number for number, row in enumerate(rows) if row[0] == "S")
        rows.insert(
            after, ("", rates.decoded_prep.quantity(workers), "the same workers prepare samples that are decoded")
        )
    for name, rate, meaning in rows:
        table.add_row(
            Text(name, "bold"), f"{units.number(rate.value)}/s", units.percent(rate.spread), Text(meaning, "dim")
        )
    return table


def _curves(found: Analysis) -> RenderableType:
    """Return P against workers and threads, S against readers, and each point's stage of contention."""
    table = table_of("how it scales", ">count", ">rate", ">±", "stage")
    curves = [("prep workers", found.rates.prep), ("readers of storage", found.rates.storage)]
    if found.prep_threads is not None:
        curves.insert(1, ("threads of one worker", found.prep_threads))
    if found.rates.decoded_prep is not None:
        curves.insert(1, ("the same, decoded samples", found.rates.decoded_prep))
    for name, curve in curves:
        for number, (count, rate) in enumerate(curve.points):
            stage = curve.fit.curve.stage(count)
            shown = f"{units.number(rate.value)}/s", units.percent(rate.spread), Text(stage, "dim")
            table.add_row("" if number else name, units.exact(count), *shown)
    return table


def _split(split: EpochSplit) -> RenderableType:
    waits = ">waits for prep", ">for bytes", ">for other trials"
    table = table_of("an epoch, as run", ">compute", *waits, ">epoch")
    said = split.live_prep_stall_s, split.live_fetch_stall_s, split.live_peer_stall_s
    rest = split.epoch_s.value - sum(part.value for part in said)
    compared = map(_s, (split.compute_s, split.prep_stall_s, split.fetch_stall_s))
    table.add_row("three runs compared", *compared, "-", _s(split.epoch_s))
    table.add_row("reported by loaders", units.seconds(rest), *map(_s, said), _s(split.epoch_s))
    return table


def _changes(changes: Sequence[Change]) -> RenderableType:
    table = table_of("what would help", ">epoch", ">times as fast", "")
    for number, change in enumerate(changes):
        seconds = change.prediction.steady.epoch_s
        table.add_row(
            Text(change.advice, "bold" if not number else ""),
            units.seconds(seconds.value),
            units.number(change.speedup.value),
            Text("a setting" if change.kind == "setting" else "to be bought", "dim"),
        )
    return table


def _verification(verification: Verification) -> RenderableType:
    table = table_of("verified predictions", ">predicted", ">found", ">error", ">simulated", ">error", "limit")
    for check in verification.checks:
        table.add_row(
            f"{check.parameter} = {words.setting(check.parameter, check.value)}",
            f"{units.number(check.predicted.value)}/s",
            f"{units.number(check.found.value)}/s",
            _error(check.error),
            f"{units.number(check.simulated)}/s",
            _error(check.simulated_error),
            Text(words.NAMES[check.limit], "dim"),
        )
    median, worst = (units.percent(error) for error in (verification.median_error, verification.worst_error))
    slowest, fastest = map(units.number, verification.paces)
    pace = (
        f"the machine was {slowest} to {fastest} times as fast as during the measurements; predictions account for it"
    )
    summary = f"  median error {median}, worst {worst}\n  {pace}"
    return Group(table, Text(summary, "dim"))


def _error(error: float) -> Text:
    return Text(units.percent(error, signed=True), "green" if abs(error) <= GOOD else "yellow")


def _comparison(before: Epoch, after: Epoch) -> RenderableType:
    table = table_of("", ">now", ">then")
    table.add_row("epoch", words.duration(before.epoch_s), words.duration(after.epoch_s))
    table.add_row("samples/s of a trial", units.number(before.trial_per_s.value), units.number(after.trial_per_s.value))
    table.add_row("waits for data", *(units.percent(e.prep_stall + e.fetch_stall) for e in (before, after)))
    table.add_row("limit", *(words.NAMES[e.limit] for e in (before, after)))
    return table


def _curve(curve: WhatIfCurve) -> RenderableType:
    table = table_of(curve.parameter, ">samples/s of a trial", ">epoch", "limit")
    for value, prediction in curve.points:
        epoch = prediction.steady
        table.add_row(
            words.setting(curve.parameter, value),
            units.number(epoch.trial_per_s.value),
            words.duration(epoch.epoch_s),
            Text(words.NAMES[epoch.limit], "dim"),
        )
    return table


def _offers(offered: Sequence[Offer]) -> RenderableType:
    table = table_of("machines", ">nodes", ">job", ">cost", ">each loads alone", "limit")
    for number, offer in enumerate(offered):
        table.add_row(
            Text(offer.machine, "bold" if not number else ""),
            str(offer.nodes),
            words.duration(offer.job_s),
            units.number(offer.cost.value),
            units.number(offer.alone_cost.value),
            Text(words.NAMES[offer.limit], "dim"),
        )
    return table


def _s(quantity: Quantity) -> str:
    return units.seconds(quantity.value)
