"""What a feed's samples cost: CPU time, and money if the price of a CPU is known, for a trial beside a DataLoader."""

from __future__ import annotations

from dataclasses import dataclass

HOUR_S = 3600.0


@dataclass(frozen=True)
class LoadingCosts:
    """What the processes of a feed took so far, and for how many samples.

    CPU-seconds are those of all threads of the feed's own processes, in user and system mode, since each of them began;
    of a borrowed prep worker since it began to work for this feed. They include what is made ahead for trials and was
    not delivered yet. Trials' own processes and Ray's daemons are not in them.

    Every delivered sample costs the same, whichever trial it was delivered to: ``cpu_s`` / ``delivered_samples``.

    Attributes:
        prep_cpu_s, cache_cpu_s, coordinator_cpu_s: CPU-seconds by who took them.
        delivered_samples: samples that trials were given, summed over trials.
        encoded_cpu_s, encoded_samples: the part of ``prep_cpu_s`` that was for blocks of which nothing had been decoded
            before, without what workers took to start, and the samples of these.
        cpu_price_per_h: price of a CPU for an hour, in any currency; None: nobody said.
    """

    prep_cpu_s: float = 0.0
    cache_cpu_s: float = 0.0
    coordinator_cpu_s: float = 0.0
    delivered_samples: int = 0
    encoded_cpu_s: float = 0.0
    encoded_samples: int = 0
    cpu_price_per_h: float | None = None

    @property
    def cpu_s(self) -> float:
        """CPU-seconds of all of the feed's processes."""
        return self.prep_cpu_s + self.cache_cpu_s + self.coordinator_cpu_s

    @property
    def sample_cpu_s(self) -> float:
        """CPU-seconds for each delivered sample; 0 before the first."""
        return self.cpu_s / self.delivered_samples if self.delivered_samples else 0.0

    @property
    def alone_sample_cpu_s(self) -> float:
        """CPU-seconds that a DataLoader in each trial would take for a sample, at least; 0 while that is not known.

        They are those of the feed's prep workers for a sample that they decode and transform: such a DataLoader does so
        with each sample that it delivers. It would also read it, and hand it from its own workers to the trial.
        """
        return self.encoded_cpu_s / self.encoded_samples if self.encoded_samples else 0.0

    def cpu_hours(self, samples: int) -> float:
        """Return the CPU-hours for ``samples`` that were delivered."""
        return samples * self.sample_cpu_s / HOUR_S

    def alone_cpu_hours(self, samples: int) -> float:
        """Return the CPU-hours that a DataLoader would take for ``samples``, at least; see `alone_sample_cpu_s`."""
        return samples * self.alone_sample_cpu_s / HOUR_S

    def price(self, cpu_hours: float) -> float | None:
        """Return what CPU-hours cost; None if the price of a CPU is not known."""
        return None if self.cpu_price_per_h is None else cpu_hours * self.cpu_price_per_h
