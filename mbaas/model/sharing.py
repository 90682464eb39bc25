"""Deliveries of prepared samples to trials, and why some samples did not reach all trials."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from mbaas.base.units import count, counted, number, percent

FULL = 0.95
"""Sharing counts as complete if a sample reaches this fraction of the trials on average."""

MENTIONED = 0.01
"""Smallest fraction of the prepared samples, or of a trial's samples, that is mentioned as a reason."""


@dataclass(frozen=True)
class Repeats:
    """Samples that were prepared more than once, by cause.

    Attributes:
        lost: their memory was lost, for example with a node.
        dropped: staging memory was short, so they were dropped before all trials had them.
        passed: they were dropped after all trials had them, and a trial that was behind joined later.
    """

    lost: int = 0
    dropped: int = 0
    passed: int = 0

    def __add__(self, other: Repeats) -> Repeats:
        return Repeats(self.lost + other.lost, self.dropped + other.dropped, self.passed + other.passed)


@dataclass(frozen=True)
class Sharing:
    """Deliveries of prepared samples since the feed's start.

    Attributes:
        received: samples that each present trial has received, by name.
        prepared, delivered: samples prepared, repetitions included, and delivered to all trials, former ones too.
        ahead: prepared samples that no trial has received yet.
        repeats: samples prepared more than once.
        pipelines: number of pipelines in use.
    """

    received: Mapping[str, int]
    prepared: int
    delivered: int
    ahead: int
    repeats: Repeats
    pipelines: int

    @property
    def times(self) -> float:
        """Deliveries of a prepared sample; 0 before the first."""
        return self.delivered / self.prepared if self.prepared else 0.0

    @property
    def is_full(self) -> bool:
        """True if nearly every sample went to every present trial."""
        return self.times >= FULL * len(self.received)

    def reasons(self) -> list[str]:
        """Return the reasons why a sample was not delivered to every present trial, as clauses; none if it was."""
        return [] if self.is_full or not self.prepared else [*self._reasons()]

    def _reasons(self) -> Iterator[str]:
        if self.pipelines > 1:
            yield f"{self.pipelines} pipelines are in use, and minibatches are shared by trials with equal ones"
        repeats = self.repeats
        causes = (
            (repeats.passed, "again for trials that are behind the others"),
            (repeats.dropped, "again because staging memory was short"),
            (repeats.lost, "again after a loss of memory, such as a node's death"),
            (self.ahead, "ahead, for no trial yet"),
        )
        for samples, why in causes:
            if samples >= MENTIONED * self.prepared:
                yield f"{percent(samples / self.prepared)} were prepared {why}"
        most = max(self.received.values(), default=0)
        fewer = {name: samples for name, samples in self.received.items() if samples < (1 - MENTIONED) * most}
        if fewer:
            name = min(fewer, key=fewer.__getitem__)
            others = f", and {counted(len(fewer) - 1, 'other')} fewer than all" if len(fewer) > 1 else ""
            yield f"{name} joined later or is slower: it received {count(fewer[name])} of {count(most)} samples{others}"


def words(sharing: Sharing) -> str:
    """Return how many trials share, and the reasons if not all do: "2 trials, each sample 1.6 times: ..."."""
    times = f"each sample {number(sharing.times)} times"
    if len(sharing.received) < 2:
        return times
    why = sharing.reasons()
    return f"{times}, for {len(sharing.received):,} trials" + (f": {'; '.join(why)}" if why else "")
