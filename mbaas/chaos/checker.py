"""Says what is wrong with what trials got: missing, repeated, different in bytes, or in another order.

It is fed with values that were read from files, and knows nothing of mbaas: a bug there cannot hide itself here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

FlawKind = Literal["missing", "repeated", "different", "misplaced", "unknown"]

NAMED = 8
"""A sentence names at most this many samples."""

Row = tuple[int, str]
"""A sample's id, and a digest of its bytes as the trial got them."""


@dataclass(frozen=True)
class Delivery:
    """One minibatch, as a trial wrote it down.

    Attributes:
        epoch: the feed's number of the epoch.
        rows: its samples, in order; none: a trial went through an epoch and got no minibatch at all.
    """

    epoch: int
    rows: tuple[Row, ...]


@dataclass(frozen=True, repr=False)
class Flaw:
    """What is wrong with samples that a trial got in one epoch.

    Attributes:
        kind: "missing": due, and not there; "repeated": there more than once; "different": its bytes are others than
            those of the reference; "misplaced": at another place than in the reference; "unknown": of no such sample or
            epoch does the reference know.
        trial, epoch: whose, and when.
        samples: their ids, sorted.
    """

    kind: FlawKind
    trial: str
    epoch: int
    samples: tuple[int, ...]

    def __str__(self) -> str:
        named = ", ".join(map(str, self.samples[:NAMED])) + (", ..." if len(self.samples) > NAMED else "")
        return f"{self.trial}, epoch {self.epoch}: {len(self.samples)} samples {self.kind}: {named}"

    def __repr__(self) -> str:  # thousands of ids would hide everything else that a failed run prints
        return f"Flaw({self})"


def by_epoch(history: Sequence[Delivery]) -> dict[int, list[Row]]:
    """Put the samples of each epoch in one row; epochs stand in the order in which they were begun."""
    epochs: dict[int, list[Row]] = {}
    for delivery in filter(lambda each: each.rows, history):
        epochs.setdefault(delivery.epoch, []).extend(delivery.rows)
    return epochs


def check(
    trial: str, history: Sequence[Delivery], reference: Mapping[int, Sequence[Row]], *, was_cut_off: bool
) -> list[Flaw]:
    """Compare what a trial got with what it had to get.

    Args:
        trial: its name, for flaws.
        history: its minibatches, in order.
        reference: of each epoch, all samples in order.
        was_cut_off: the trial was ended in the middle, so its last epoch may lack its end.
    """
    epochs = by_epoch(history)
    whole = {sample for rows in reference.values() for sample, _ in rows}
    flaws = [Flaw("missing", trial, delivery.epoch, tuple(sorted(whole))) for delivery in history if not delivery.rows]
    for number, rows in epochs.items():
        if number not in reference:
            flaws.append(Flaw("unknown", trial, number, tuple(sorted(sample for sample, _ in rows))))
            continue
        due = reference[number]
        # Only of its last epoch: earlier ones were finished, and must be whole.
        if was_cut_off and number == history[-1].epoch:
            due = due[: len(rows)]
        flaws += _check_epoch(trial, number, rows, due, dict(reference[number]))
    return flaws


def _check_epoch(
    trial: str, epoch: int, rows: Sequence[Row], due: Sequence[Row], known: Mapping[int, str]
) -> list[Flaw]:
    times = Counter(sample for sample, _ in rows)
    wanted = {sample for sample, _ in due}
    found: dict[FlawKind, set[int]] = {
        "missing": wanted - times.keys(),
        "repeated": {sample for sample, count in times.items() if count > 1},
        "different": {sample for sample, digest in rows if known.get(sample, digest) != digest},
        "unknown": times.keys() - known.keys(),
    }
    # Where samples are missing or repeated all later places are shifted: they would be named as well, for one mistake.
    if not found["missing"] and not found["repeated"] and not found["unknown"]:
        pairs = zip(rows, due, strict=True)
        found["misplaced"] = {there for (here, _), (there, _) in pairs if here != there}
    return [Flaw(kind, trial, epoch, tuple(sorted(samples))) for kind, samples in found.items() if samples]


def agreed(histories: Mapping[str, Sequence[Delivery]], samples: int) -> dict[int, Sequence[Row]]:
    """Make a reference of what trials got themselves, where there was no run without faults.

    Of each epoch it is the first whole one that a trial got; else the longest.

    Args:
        histories: of the trials.
        samples: number of samples in an epoch.
    """
    reference: dict[int, Sequence[Row]] = {}
    for history in histories.values():
        for epoch, rows in by_epoch(history).items():
            if len(reference.get(epoch, ())) < min(len(rows), samples):
                reference[epoch] = rows[:samples]
    return reference
