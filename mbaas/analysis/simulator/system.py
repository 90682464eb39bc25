"""A machine, a dataset and how it is trained: what is simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mbaas.allocation.bandwidth import Staging, StorageClass
from mbaas.allocation.throughput import ThroughputCurve
from mbaas.analysis.simulator.machine import Cores, Machine
from mbaas.analysis.simulator.workload import DatasetShape, Training


@dataclass(frozen=True, kw_only=True)
class System:
    """All inputs of a simulation.

    Attributes:
        name: of the preset or file; for titles.
        machine: of each worker.
        dataset: how many samples, how large.
        training: workers, minibatch, epochs, trials, seed.
        policies: names of those to simulate; empty for all.
    """

    name: str
    machine: Machine
    dataset: DatasetShape
    training: Training
    policies: tuple[str, ...] = ()

    @property
    def minibatch_bytes(self) -> float:
        """Raw bytes of one worker's minibatch, on average."""
        return self.training.batch * self.dataset.sample_bytes

    @property
    def steps(self) -> int:
        """Minibatches of an epoch."""
        return -(-self.dataset.samples // (self.training.workers * self.training.batch))


def system_of(
    name: str,
    *,
    samples: int,
    sample_bytes: float,
    batch: int,
    train_samples_per_s: float,
    prep_samples_per_s: float,
    storage_samples_per_s: float,
    storage_readers: int | None = None,
    prep_workers: int = 1,
    cache_samples_per_s: float = math.inf,
    cache_bytes: float = 0.0,
    disk_samples_per_s: float | None = None,
    disk_bytes: float = 0.0,
    network_bytes_per_s: float = math.inf,
    staging_bytes: float = math.inf,
    pixel_bytes: float | None = None,
    cores: Cores | None = None,
    workers: int = 1,
    trials: int = 1,
    epochs: int = 1,
    seed: int = 0,
    policies: tuple[str, ...] = (),
) -> System:
    """A system from measured rates (DS-Analyzer's G, P, S and C), as of a running feed.

    Args:
        name: of the feed.
        samples: of the dataset.
        sample_bytes: mean size of a raw sample.
        batch: samples of a minibatch on one worker.
        train_samples_per_s: G of one trial on one worker, data at hand.
        prep_samples_per_s: P of one worker's machine, all its prep workers together, from memory.
        storage_samples_per_s: S of all workers together, cold, nothing else to do.
        storage_readers: readers that it takes to reach S; None for all prep workers of all machines.
        prep_workers: of one worker's machine.
        cache_samples_per_s: C of one worker's machine, its prep workers together.
        cache_bytes: raw bytes that one worker's machine may cache.
        disk_samples_per_s: what the disk of one worker's machine gives, all prep workers together; None: there is none.
        disk_bytes: raw bytes that it may keep besides.
        network_bytes_per_s: between two machines.
        staging_bytes: for prepared minibatches of one machine.
        pixel_bytes: of a prepared sample; None for the raw size.
        cores: of one worker's machine, and what a sample costs them; None: there are enough.
        workers: machines; each has an accelerator for each trial.
        trials: that run at a time.
        epochs: to simulate.
        seed: of the order.
        policies: to simulate; empty for all.

    Raises:
        ConfigError: a rate or a number that cannot be.
    """
    cache_bytes_per_s = min(cache_samples_per_s * sample_bytes, MEMORY_BYTES_PER_S)
    cache = StorageClass(
        name="ram",
        capacity_bytes=cache_bytes,
        threads=prep_workers,
        read=ThroughputCurve.through({prep_workers: cache_bytes_per_s}),
    )
    classes = [cache]
    if disk_samples_per_s is not None and disk_bytes:
        read = ThroughputCurve.through({prep_workers: disk_samples_per_s * sample_bytes})
        classes.append(StorageClass(name="disk", capacity_bytes=disk_bytes, threads=prep_workers, read=read))
    machine = Machine(
        compute_bytes_per_s=train_samples_per_s * sample_bytes,
        prep_bytes_per_s=prep_samples_per_s * sample_bytes / prep_workers,
        network_bytes_per_s=network_bytes_per_s,
        storage=ThroughputCurve.through(
            {storage_readers or workers * prep_workers: storage_samples_per_s * sample_bytes}
        ),
        staging=Staging(capacity_bytes=staging_bytes, threads=prep_workers),
        classes=tuple(classes),
        cores=cores,
    )
    dataset = DatasetShape(samples=samples, sample_bytes=sample_bytes, pixel_bytes=pixel_bytes)
    training = Training(workers=workers, batch=batch, epochs=epochs, trials=trials, seed=seed)
    return System(name=name, machine=machine, dataset=dataset, training=training, policies=policies)


MEMORY_BYTES_PER_S = 1e12
"""What a cache whose rate nobody measured is taken to give."""
