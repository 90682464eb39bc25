"""The Prometheus metrics of a feed, exported by ``ray.util.metrics``.

Ray adds the prefix ``ray_`` to the names, the suffix ``_total`` to the names of counters, and ``_bucket``, ``_count``
and ``_sum`` to those of histograms. Every series has the tag
``feed``. The descriptions below contain the unit and the meaning of high and low values; Ray exports them as help text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import Any

from msgspec import Struct
from ray.util.metrics import Counter, Gauge, Histogram

_SUFFIXES = {"counter": "_total", "gauge": "", "histogram": "_bucket"}


class Metric(Struct, frozen=True):
    """One metric: its name, "counter", "gauge" or "histogram", and its meaning."""

    name: str
    kind: str
    description: str

    @property
    def exported(self) -> str:
        """Its Prometheus name at Ray's endpoint."""
        return f"ray_{self.name}{_SUFFIXES[self.kind]}"


_COUNTERS = {
    "mbaas_samples_prepared": (
        "Samples that prep workers decoded and transformed. Its rate is the prep rate; near samples_delivered / "
        "consumers when sharing works, far above when consumers are out of step."
    ),
    "mbaas_samples_delivered": (
        "Samples handed to trials, summed over trials. Divided by samples_prepared, it is the number of "
        "trials that each prepared sample served: high is good, 1 means no sharing."
    ),
    "mbaas_fetch_stall_seconds": (
        "Seconds that trials waited for data while prep waited for bytes, summed over trials. High: more cache, "
        "faster storage or more read-ahead would help. Low: storage keeps up."
    ),
    "mbaas_prep_stall_seconds": (
        "Seconds that trials waited for data while prep was computing, summed over trials. High: more prep workers or "
        "a GPU engine would help. Low: prep keeps up."
    ),
    "mbaas_peer_stall_seconds": (
        "Seconds that trials waited for data while prep was idle because of other trials, summed over trials: a "
        "slower one must not fall behind, or another group has the staging memory. High: workers would not help; "
        "trials of like speed in one feed, or more staging_bytes, would."
    ),
    "mbaas_rank_steps": "Training steps of data-parallel trials for which the waits for data of all ranks are known.",
    "mbaas_uneven_rank_steps": (
        "Steps of mbaas_rank_steps whose waits for data differed between ranks by more than 10 % of the step. All "
        "ranks wait for the slowest, so a high share costs time; 0 is best."
    ),
    "mbaas_cache_hits": (
        "Samples whose bytes came from the memory of the node that prepared them. Other nodes' memory and disk tiers "
        "are in mbaas_remote_bytes and mbaas_disk_bytes. High against misses is good."
    ),
    "mbaas_cache_misses": (
        "Samples whose raw bytes were read from storage. After the first epoch low means that the cache holds the "
        "dataset."
    ),
    "mbaas_decoded_samples": (
        "Samples that came decoded from a cache, in memory or on disk, and were not decoded again. A high share of "
        "all prepared samples is good; a low one after the first epochs means that memory is short."
    ),
    "mbaas_cache_hit_bytes": "Bytes of samples that came from the memory of the node that prepared them.",
    "mbaas_remote_bytes": (
        "Bytes of raw samples that crossed nodes: an idle node took over work, or samples moved to a new home. High "
        "in each epoch: nodes differ in speed."
    ),
    "mbaas_disk_bytes": "Bytes of raw samples that came from disk tiers.",
    "mbaas_storage_bytes": "Bytes of raw samples that were read from storage. High costs time.",
    "mbaas_cpu_seconds": (
        "CPU-seconds that the feed's prep workers, caches and coordinators took. Its rate is the number of CPUs "
        "at work for it. Divided by samples_delivered, it is the cost of a sample, which falls as more trials share or "
        "more samples are cached decoded."
    ),
    "mbaas_internal_errors": (
        "Bugs in mbaas that the feed met and survived; the logs of its coordinators have the tracebacks. If not 0, "
        "please report it."
    ),
    "mbaas_coordinator_restarts": (
        "Times that the feed's coordinator died and came back: killed, or because of a bug, which is in its log."
    ),
}

_GAUGES = {
    "mbaas_staged_bytes": (
        "Bytes of minibatches that are staged or being made. At the budget: prep is ahead, trials are the bottleneck. "
        "Near 0: trials take minibatches as fast as prep makes them."
    ),
    "mbaas_prediction_error": (
        "The last predicted epoch time against the epoch that followed (mbaas simulate policies --from-feed): 0.05 "
        "was 5 % too long. Far from 0: do not trust the model here."
    ),
    "mbaas_inexact_epochs": (
        "Epochs of trials whose ledger does not match: samples were missing or repeated. Anything but 0 is a bug of "
        "mbaas; `mbaas ledger NAME` says which."
    ),
    "mbaas_prep_workers": "Prep workers that are up. Fewer than asked for: one is being replaced.",
    "mbaas_prep_worker_samples_per_second": (
        "Samples a second that one worker prepares while it prepares, mean over workers. Falls when cores are shared "
        "with something else."
    ),
}

_HISTOGRAMS = {
    "mbaas_minibatch_wait_seconds": (
        "Minibatches by the time that their consumers waited for each. Nearly all below 0.001 is good; a few long "
        "waits are hiccups, many point to prep or storage. Its sum is not exact, unlike the stall counters."
    ),
}

METRICS = tuple(
    Metric(name, kind, meaning)
    for kind, metrics in (("counter", _COUNTERS), ("gauge", _GAUGES), ("histogram", _HISTOGRAMS))
    for name, meaning in metrics.items()
)
"""Every metric of a feed."""


class FeedMetrics:
    """The metrics of one feed, in the process of its coordinator.

    Ray's counters and histograms only take increments, so each gets the difference to the last update.
    ``wait_bounds_s`` are the upper bounds of the classes of waits, in seconds; there is one more class.
    """

    def __init__(self, feed: str, wait_bounds_s: Sequence[float]) -> None:
        self._counters = {m.name: _made(Counter, m, feed) for m in METRICS if m.kind == "counter"}
        self._gauges = {m.name: _made(Gauge, m, feed) for m in METRICS if m.kind == "gauge"}
        self._waits = _made(Histogram, next(m for m in METRICS if m.kind == "histogram"), feed, wait_bounds_s)
        # An observation is a number: the class's upper bound, or one above the last.
        self._wait_classes = [*wait_bounds_s, 2 * wait_bounds_s[-1]]
        self._last: dict[str, float] = {}
        self._last_waits = [0] * len(self._wait_classes)

    def update(self, values: Mapping[str, float], waits: Sequence[int]) -> None:
        """Set the series.

        Args:
            values: name of the metric -> value; for a counter, the total since the feed started.
            waits: number of waits in each class since the feed started.
        """
        for name, value in values.items():
            if name in self._gauges:
                self._gauges[name].set(value)
            else:
                self._count(name, value)
        for wait_s, count, last in zip(self._wait_classes, waits, self._last_waits, strict=True):
            for _ in repeat(None, count - last):
                self._waits.observe(wait_s)
        self._last_waits = [*waits]

    def _count(self, name: str, value: float) -> None:
        grown = value - self._last.get(name, 0.0)
        if grown > 0:  # a Prometheus counter never falls
            self._counters[name].inc(grown)
            self._last[name] = value


def _made(kind: Any, metric: Metric, feed: str, bounds: Sequence[float] | None = None) -> Any:
    more = {} if bounds is None else {"boundaries": [*bounds]}
    series = kind(metric.name, metric.description, tag_keys=("feed",), **more)
    series.set_default_tags({"feed": feed})
    return series
