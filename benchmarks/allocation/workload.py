"""Jobs of a workload: when they arrive, how fast they train, and how fast their samples are prepared.

A-Dloader ("A Data-Loader Tunable Knob to Shorten GPU Idleness", 2022) lets eight image classifiers share 18 workers.
The shapes are the same here: small networks that need many workers, and large ones that need less than one. The rates
are of this order for 224 x 224 images on one GPU, not those of the paper's machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mbaas.model.curves import ThroughputCurve

WORKER_PER_S = 280.0
"""Images/s that one worker decodes, crops and flips."""

CONTENTION = ThroughputCurve(((6.0, 6.0), (12.0, 9.0)), 0.0)
"""Workers' worth of prep against a job's workers: A-Dloader's three stages. A seventh worker adds half of the first."""

GAP_S = 90.0
"""Mean time between two arrivals of eight jobs on `POOL` workers; more jobs arrive faster, on more workers."""

POOL = 18
"""Workers of eight jobs, as in the paper."""


@dataclass(frozen=True, kw_only=True)
class TrainingRun:
    """One job of a workload.

    Attributes:
        arrives_s: seconds from the start of the workload.
        samples: samples to train on.
        step_per_s: samples/s of training that never waits.
        prep: samples/s of prep against workers.
        fetch_per_s: samples/s that its storage delivers.
    """

    name: str
    arrives_s: float
    samples: float
    step_per_s: float
    prep: ThroughputCurve
    fetch_per_s: float = math.inf

    @property
    def needed(self) -> float:
        """Workers at which loading is as fast as training or fetch (d')."""
        return self.prep.workers_for(min(self.step_per_s, self.fetch_per_s))

    @property
    def least_s(self) -> float:
        """Seconds of the job if it never waits for prep."""
        return self.samples / min(self.step_per_s, self.fetch_per_s)

    def rate_per_s(self, workers: float) -> float:
        """Return the samples/s that it trains with so many workers."""
        return min(self.step_per_s, self.fetch_per_s, self.prep.rate(workers))


@dataclass(frozen=True)
class Kind:
    """A network: samples/s of its training, minutes of a job that never waits, and samples/s of storage."""

    name: str
    step_per_s: float
    minutes: float
    fetch_per_s: float = math.inf


KINDS = (
    Kind("alexnet", 2400, 8),
    Kind("resnet152", 180, 14),
    Kind("shufflenet", 1500, 9),
    Kind("vgg16", 260, 12),
    Kind("resnet18", 1400, 8),
    Kind("mobilenet", 1100, 10, fetch_per_s=800),
    Kind("densenet", 350, 10),
    Kind("resnet50", 420, 12),
)
"""The needs are 11.1, 0.6, 5.4, 0.9, 5.0, 2.9 (storage delivers no more), 1.3 and 1.5 workers: 29 in all."""


def workload(jobs: int, *, seed: int) -> list[TrainingRun]:
    """Return the jobs, by arrival. Every eight have all kinds, in another order each time."""
    random = np.random.default_rng(seed)
    kinds = [KINDS[i] for _ in range(math.ceil(jobs / len(KINDS))) for i in random.permutation(len(KINDS))]
    gap_s = GAP_S * len(KINDS) / jobs
    arrives_s = np.cumsum(random.exponential(gap_s, jobs)) - gap_s
    return [
        TrainingRun(
            name=f"{number:02d}-{kind.name}",
            arrives_s=max(0.0, float(at)),
            samples=kind.step_per_s * kind.minutes * 60 * float(random.uniform(0.7, 1.3)),
            step_per_s=kind.step_per_s,
            prep=CONTENTION.scaled(WORKER_PER_S),
            fetch_per_s=kind.fetch_per_s,
        )
        for number, (kind, at) in enumerate(zip(kinds[:jobs], arrives_s, strict=True))
    ]


def at_once(jobs: int, *, seed: int) -> list[TrainingRun]:
    """Return jobs of `workload` that arrive at the same moment and do not end."""
    return [replace(run, arrives_s=0.0, samples=math.inf) for run in workload(jobs, seed=seed)]


def pool_of(jobs: int) -> int:
    """Return the workers of a workload, in proportion to its jobs."""
    return POOL * jobs // len(KINDS)
