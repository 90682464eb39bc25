"""Effect of sharing: deliveries of prepared samples, and costs of loading compared with a DataLoader per trial.

Costs are CPU time, and money if the price of a CPU is set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from mbaas.base.units import count, counted, number, percent

HOUR_S = 3600.0

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


@dataclass(frozen=True)
class PipelineCosts:
    """A pipeline's part of the time of workers, 0 to 1, and the number of its samples delivered to its trials."""

    prep_share: float
    delivered_samples: int


@dataclass(frozen=True)
class LoadingCosts:
    """CPU time of a feed's processes so far, and the number of samples delivered to all trials.

    CPU-seconds count all threads of the feed's own processes, in user and system mode, since each process started; for
    a borrowed prep worker, since it started to work for this feed. They include samples prepared ahead and not
    delivered yet. The trials' processes and Ray's daemons are not included.

    Every delivered sample of a pipeline has the same cost, whichever trial received it. ``encoded_cpu_s`` is the part
    of ``prep_cpu_s`` for blocks of which no sample was already decoded, without the start of workers, for
    ``encoded_samples``. ``pipelines`` has the pipelines in use by fingerprint, if there are several; "" is the feed's
    own.
    """

    prep_cpu_s: float = 0.0
    cache_cpu_s: float = 0.0
    coordinator_cpu_s: float = 0.0
    delivered_samples: int = 0
    encoded_cpu_s: float = 0.0
    encoded_samples: int = 0
    cpu_price_per_h: float | None = None
    pipelines: Mapping[str, PipelineCosts] = field(default_factory=dict)

    @property
    def cpu_s(self) -> float:
        return self.prep_cpu_s + self.cache_cpu_s + self.coordinator_cpu_s

    @property
    def sample_cpu_s(self) -> float:
        """CPU-seconds for each delivered sample; 0 before the first."""
        return self.cpu_s / self.delivered_samples if self.delivered_samples else 0.0

    @property
    def alone_sample_cpu_s(self) -> float:
        """Lower bound of the CPU-seconds that a DataLoader in each trial would take for a sample; 0 if not known yet.

        It is the time of the feed's prep workers to decode and transform a sample. A DataLoader would also read the
        sample, and send it from its workers to the trial.
        """
        return self.encoded_cpu_s / self.encoded_samples if self.encoded_samples else 0.0

    @property
    def ratio(self) -> float:
        """Times as much CPU time as here that a DataLoader in each trial would take at least; 0 if not known yet."""
        return self.alone_sample_cpu_s / self.sample_cpu_s if self.sample_cpu_s else 0.0

    def pays_from(self, prepared_samples: int) -> int | None:
        """Return the fewest trials in step for which this feed takes less CPU time than a DataLoader for each.

        The CPU time for a prepared sample is the mean so far, whatever the number of trials. None if not known yet.
        """
        if not self.alone_sample_cpu_s or not prepared_samples:
            return None
        return math.floor(self.cpu_s / prepared_samples / self.alone_sample_cpu_s) + 1

    def cpu_s_of(self, samples: int, pipeline: str = "") -> float:
        """Return the CPU-seconds of a number of delivered samples of a pipeline."""
        return samples * self._sample_cpu_s_of(pipeline)

    def _sample_cpu_s_of(self, pipeline: str) -> float:
        own = self.pipelines.get(pipeline)
        if own is None or not own.delivered_samples or not self.delivered_samples:
            return self.sample_cpu_s
        # All samples share reads and decisions; only preparation differs.
        common_s = (self.cache_cpu_s + self.coordinator_cpu_s) / self.delivered_samples
        return common_s + self.prep_cpu_s * own.prep_share / own.delivered_samples

    def alone_cpu_s_of(self, samples: int) -> float:
        return samples * self.alone_sample_cpu_s

    def price(self, cpu_s: float) -> float | None:
        return None if self.cpu_price_per_h is None else cpu_s / HOUR_S * self.cpu_price_per_h
