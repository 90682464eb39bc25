"""Finds flaws in the samples that trials received: missing, repeated, different bytes, or wrong order.

It reads recorded values and uses no mbaas code, so a bug in mbaas cannot hide itself.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Literal

FlawKind = Literal["missing", "repeated", "different", "misplaced", "unknown"]

NAMED = 8
"""Maximum number of samples listed in a message."""

Row = tuple[int, str]
"""A sample's id, and a digest of the bytes that the trial received."""


@dataclass(frozen=True)
class Delivery:
    """One minibatch, as recorded by a trial.

    Attributes:
        epoch: the feed's epoch number.
        rows: the samples, in order. Empty if a trial went through an epoch without any minibatch.
        order: the epoch's shuffle, as text; "" for an epoch shuffled as a whole, as in the reference.
        begin: position in the feed's epoch at which the trial's own epoch began. Above 0, the trial's epoch ends in the
            feed's next one.
        pipeline: number of the pipeline that it was prepared with; 0 for the feed's own.
    """

    epoch: int
    rows: tuple[Row, ...]
    order: str = ""
    begin: int = 0
    pipeline: int = 0


@dataclass(frozen=True, repr=False)
class Flaw:
    """A flaw in the samples that a trial received in one epoch.

    Attributes:
        kind: "missing" or "repeated" samples; "different" bytes or "misplaced" positions compared with the reference;
            samples or epochs "unknown" to the reference.
        samples: their ids, sorted.
    """

    kind: FlawKind
    trial: str
    epoch: int
    samples: tuple[int, ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.samples[:NAMED])) + (", ..." if len(self.samples) > NAMED else "")
        return f"{self.trial}, epoch {self.epoch}: {len(self.samples)} samples {self.kind}: {named}"

    def __repr__(self) -> str:  # thousands of ids would hide the rest of a failed run's output
        return f"Flaw({self})"


def by_epoch(history: Sequence[Delivery]) -> dict[int, list[Delivery]]:
    """Group minibatches by epoch, in order of the epochs' first minibatches."""
    epochs: dict[int, list[Delivery]] = {}
    for delivery in filter(lambda each: each.rows, history):
        epochs.setdefault(delivery.epoch, []).append(delivery)
    return epochs


def check(
    trial: str,
    ranks: Sequence[Sequence[Delivery]],
    reference: Mapping[int, Sequence[Row]],
    *,
    orders: Mapping[str, Sequence[int]],
    was_cut_off: bool,
) -> list[Flaw]:
    """Compare the samples that a trial received with the reference.

    Args:
        trial: its name, for flaws.
        ranks: minibatches of each rank, in order; a single sequence for a trial in one process.
        reference: all samples of each epoch, in order.
        orders: sample orders of epochs with another shuffle than the reference; see `orders_of`.
        was_cut_off: the trial was stopped early, so its last epoch may be incomplete.
    """
    whole = {sample for rows in reference.values() for sample, _ in rows}
    flaws = [
        Flaw("missing", trial, delivery.epoch, tuple(sorted(whole)))
        for history in ranks
        for delivery in history
        if not delivery.rows
    ]
    epochs = [by_epoch(history) for history in ranks]
    if was_cut_off and len(ranks) > 1:  # an epoch is only complete if all ranks finished it
        last = min(max(each, default=-1) for each in epochs)
        epochs = [{number: each for number, each in rank.items() if number < last} for rank in epochs]
    for number in dict.fromkeys(number for each in epochs for number in each):
        parts = [each.get(number, []) for each in epochs]
        first = next(part[0] for part in parts if part)
        if number not in reference:
            flaws.append(Flaw("unknown", trial, number, tuple(sorted({s for part in parts for s, _ in _rows(part)}))))
            continue
        due: Sequence[int] | None = [sample for sample, _ in reference[number]]
        if first.begin or first.order:
            due = None if first.begin else orders.get(first.order)
        rows = _rows(parts[0]) if len(ranks) == 1 else _united(parts, due or ())
        is_last = was_cut_off and len(ranks) == 1 and number == ranks[0][-1].epoch
        known = _known([number, number + 1] if first.begin else [number], reference)
        flaws += _check_epoch(trial, number, rows, due, known, may_lack_end=is_last)
        # An epoch has one order on all ranks. (After `begin`, the feed's next epoch has its own.)
        if not first.begin:
            odd = {sample for part in parts for each in part if each.order != first.order for sample, _ in each.rows}
            flaws += _flaws(trial, number, {"misplaced": odd})
    return flaws


def _known(epochs: Sequence[int], reference: Mapping[int, Sequence[Row]]) -> dict[int, set[str]]:
    """Return the digests that each sample may have in any of the epochs; empty sets if an epoch is unknown."""
    known: dict[int, set[str]] = {}
    for epoch in epochs:
        for sample, digest in reference.get(epoch, ()):
            known.setdefault(sample, set()).add(digest)
    return known if all(epoch in reference for epoch in epochs) else {sample: set() for sample in known}


def _rows(deliveries: Sequence[Delivery]) -> list[Row]:
    return [row for each in deliveries for row in each.rows]


def _united(parts: Sequence[Sequence[Delivery]], due: Sequence[int]) -> list[Row]:
    places = {sample: place for place, sample in enumerate(due)}
    rows: list[Row] = []
    for shares in zip_longest(*parts, fillvalue=Delivery(0, ())):
        rows += heapq.merge(*(each.rows for each in shares), key=lambda row: places.get(row[0], len(places)))
    return rows


def _check_epoch(
    trial: str,
    epoch: int,
    rows: Sequence[Row],
    due: Sequence[int] | None,
    known: Mapping[int, Collection[str]],
    *,
    may_lack_end: bool,
) -> list[Flaw]:
    """Check one epoch. ``due`` is None if the order is unknown; empty ``known`` digests allow any."""
    if may_lack_end:
        due = due[: len(rows)] if due is not None else [sample for sample, _ in rows]
    times = Counter(sample for sample, _ in rows)
    found: dict[FlawKind, set[int]] = {
        "missing": set(known if due is None else due) - times.keys(),
        "repeated": {sample for sample, count in times.items() if count > 1},
        "different": {sample for sample, digest in rows if known.get(sample) and digest not in known[sample]},
        "unknown": times.keys() - known.keys(),
    }
    # A missing or repeated sample shifts all later positions, which would be reported for the same mistake.
    if due is not None and not found["missing"] and not found["repeated"] and not found["unknown"]:
        found["misplaced"] = {there for (here, _), there in zip(rows, due, strict=True) if here != there}
    return _flaws(trial, epoch, found)


def _flaws(trial: str, epoch: int, found: Mapping[FlawKind, set[int]]) -> list[Flaw]:
    return [Flaw(kind, trial, epoch, tuple(sorted(samples))) for kind, samples in found.items() if samples]


def with_pipelines(
    ranks: Sequence[Sequence[Delivery]], references: Mapping[int, Mapping[int, Sequence[Row]]]
) -> dict[int, Sequence[Row]]:
    """Return the reference for a trial that may have other pipelines than the feed's, one in each epoch.

    ``references`` is pipeline -> reference for it.
    """
    pipelines = {delivery.epoch: delivery.pipeline for history in ranks for delivery in history}
    found: dict[int, Sequence[Row]] = {}
    for epoch in {epoch for reference in references.values() for epoch in reference}:
        # After an epoch of its own that began in the feed's last one, a trial has the pipeline of that one.
        pipeline = pipelines.get(epoch, pipelines.get(epoch - 1, 0))
        if epoch in references.get(pipeline, {}):
            found[epoch] = references[pipeline][epoch]
    return found


def orders_of(histories: Iterable[Sequence[Delivery]], samples: int) -> dict[str, list[int]]:
    """Return the sample orders of epochs that are not shuffled as a whole, each from the first trial that received it.

    ``histories`` are from trials in one process each; ``samples`` is the number of samples in an epoch.
    """
    orders: dict[str, list[int]] = {}
    for history in histories:
        for deliveries in by_epoch(history).values():
            order, ids = deliveries[0].order, [sample for sample, _ in _rows(deliveries)]
            if order and not deliveries[0].begin and len(ids) == samples:
                orders.setdefault(order, ids)
    return orders


def agreed(histories: Iterable[Sequence[Delivery]], samples: int) -> dict[int, list[Row]]:
    """Build a reference from the trials themselves, for runs without a fault-free reference.

    Each epoch is the first complete one of any trial, or otherwise the longest. Epochs shuffled as a whole are
    preferred.
    """
    epochs = [each for history in histories for each in by_epoch(history).items() if not each[1][0].begin]
    reference: dict[int, list[Row]] = {}
    for epoch, deliveries in sorted(epochs, key=lambda each: bool(each[1][0].order)):
        rows = _rows(deliveries)
        is_better = not deliveries[0].order or epoch not in reference
        if is_better and len(reference.get(epoch, ())) < min(len(rows), samples):
            reference[epoch] = rows[:samples]
    return reference
