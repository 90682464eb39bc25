"""Costs of loading: CPU time, and money if the price of a CPU is set, compared with a DataLoader per trial."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

HOUR_S = 3600.0


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
        # All samples share what is read and decided; only preparation differs.
        common_s = (self.cache_cpu_s + self.coordinator_cpu_s) / self.delivered_samples
        return common_s + self.prep_cpu_s * own.prep_share / own.delivered_samples

    def alone_cpu_s_of(self, samples: int) -> float:
        return samples * self.alone_sample_cpu_s

    def price(self, cpu_s: float) -> float | None:
        return None if self.cpu_price_per_h is None else cpu_s / HOUR_S * self.cpu_price_per_h
