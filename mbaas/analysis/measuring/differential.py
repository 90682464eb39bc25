"""Splits the time of an epoch by the differential method, and checks what loaders say of themselves.

Three runs of the same workload (DS-Analyzer, VLDB 2021): on synthetic minibatches, with all data in memory, and with
caches and storage as they are. What the second takes longer than the first is prep stall, what the third takes longer
than the second is fetch stall. A loader attributes its waits while it runs, by whether prep was waiting for bytes; the
two should agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mbaas.analysis.measuring.service import ServiceRun, Workload, run_service
from mbaas.analysis.quantity import Quantity, measured, spanning
from mbaas.analysis.rates import Rates

EPOCHS = 5


@dataclass(frozen=True, kw_only=True)
class Split:
    """An epoch of one trial, on a part of the dataset.

    Attributes:
        samples: of that part.
        compute_s, prep_stall_s, fetch_stall_s: by the differential method; their values add up to the epoch's.
        live_prep_stall_s, live_fetch_stall_s: what the loaders said.
        epoch_s: of the last run.
    """

    samples: int
    epoch_s: Quantity
    compute_s: Quantity
    prep_stall_s: Quantity
    fetch_stall_s: Quantity
    live_prep_stall_s: Quantity
    live_fetch_stall_s: Quantity

    @property
    def disagreement(self) -> float:
        """The larger difference between both methods, as a share of the epoch."""
        pairs = (
            (self.prep_stall_s, self.live_prep_stall_s),
            (self.fetch_stall_s, self.live_fetch_stall_s),
        )
        return max(abs(one.value - other.value) for one, other in pairs) / self.epoch_s.value

    def to_json(self) -> dict[str, Any]:
        """The fields, quantities as `Quantity.to_json`, and ``disagreement``."""
        plain = {name: value.to_json() if isinstance(value, Quantity) else value for name, value in vars(self).items()}
        return {**plain, "disagreement": self.disagreement}


def split_epoch(
    workload: Workload,
    rates: Rates,
    *,
    trials: int,
    prep_workers: int,
    cache_share: float,
    disk_share: float = 0.0,
) -> Split:
    """Runs the workload with all data in memory, and with a cache for ``cache_share`` of it, a disk tier for
    ``disk_share``, and cold storage.

    The synthetic run is G's: every trial has its step for itself.
    """
    options: dict[str, Any] = {
        "sample_bytes": rates.pixel_bytes,
        "trials": trials,
        "prep_workers": prep_workers,
        "epochs": EPOCHS,
    }
    size = workload.dataset.total_bytes
    cached = run_service(workload, cache_bytes=size, warm_up=2, **options)
    real = run_service(
        workload,
        cache_bytes=round(cache_share * size),
        disk_bytes=round(disk_share * size),
        cold=True,
        warm_up=1,
        **options,
    )
    return split_of(len(workload.dataset), rates.step, cached, real)


def split_of(samples: int, step: Quantity, cached: ServiceRun, real: ServiceRun) -> Split:
    """The arithmetic of it."""
    synthetic_s = step.inverse(unit="s").scaled(samples, unit="s")
    cached_s, real_s = _epoch_s(cached), _epoch_s(real)
    return Split(
        samples=samples,
        epoch_s=real_s,
        compute_s=synthetic_s,
        prep_stall_s=_more(cached_s, synthetic_s),
        fetch_stall_s=_more(real_s, cached_s),
        live_prep_stall_s=_seen(real, lambda run: run.wait_s - run.fetch_stall_s),
        live_fetch_stall_s=_seen(real, lambda run: run.fetch_stall_s),
    )


def _epoch_s(run: ServiceRun) -> Quantity:
    """The slowest trial's time for an epoch."""
    return measured([max(trial.seconds for trial in trials) for trials in run.epochs], unit="s")


def _more(later: Quantity, earlier: Quantity) -> Quantity:
    """How much longer one run took; never less than nothing."""
    ends = (later.value - earlier.value, later.low - earlier.high, later.high - earlier.low)
    return spanning(*(max(0.0, end) for end in ends), unit="s")


def _seen(run: ServiceRun, part: Any) -> Quantity:
    """What loaders attributed to a part, the mean over trials."""
    return measured([max(0.0, sum(map(part, trials)) / len(trials)) for trials in run.epochs], unit="s")
