"""Base class of policies, and the policies without a cache or with a separate cache per worker.

A policy determines the tier that each sample is read from, the threads that read, and the read-ahead. A distributed
sampler assigns the samples to workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from mbaas.model.page_cache import PageCache
from mbaas.tools.simulator.system import Cores
from mbaas.tools.simulator.world import NOWHERE, Floats, Traffic, World, fetch_seconds, write_seconds


class Policy(ABC):
    """A way to load data.

    Attributes:
        name: identifier in files, commands and results.
        about: one-sentence description with its source.
        is_shared: all trials share one pass over the data; otherwise each trial has a pass of its own, on the same
            threads.
        prefetches: reads during training.
        overlaps: separate threads fetch and prepare; otherwise each thread does both for its sample.
        adapts: the threads depend on the length of a training step.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    is_shared: ClassVar[bool] = False
    prefetches: ClassVar[bool] = True
    overlaps: ClassVar[bool] = False
    adapts: ClassVar[bool] = False

    @abstractmethod
    def traffic(self, world: World) -> Iterator[Traffic]:
        """Yield the traffic of each epoch."""

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """Return the seconds of reading for each step, by worker and tier: float64[H, N, tiers].

        The last tier is prep and writing to the staging buffer. By default, p_0 threads of each worker read in parallel
        and divide their time among the passes.
        """
        machine = world.system.machine
        write_s = write_seconds(traffic.nbytes, machine=machine)
        # A thread does not read from the PFS while it prepares.
        seconds = fetch_seconds(traffic.nbytes, tiers=world.tiers, other_s=float(write_s.sum()))
        seconds[..., -1] = write_s  # tier `staged`, which has no fetches
        seconds *= self.passes(world) / machine.staging.threads
        return seconds

    def cores_s(self, world: World, cores: Cores, traffic: Traffic) -> Floats:
        """Return the seconds of each step on all cores of a worker's machine together: float64[H, N].

        If the policy prefetches, training runs on the same cores and is included.
        """
        # Pixels from other workers were prepared, and counted, there. Only reading from the PFS costs CPU time.
        prepared = world.per_core(traffic.nbytes[..., : world.tiers.staged].sum(axis=-1))
        read = world.per_core(traffic.nbytes[..., world.tiers.pfs])
        making_s = prepared * (cores.prep_cpu_s + cores.staging_cpu_s) + read * cores.read_cpu_s
        # Without prefetching, training follows reading, and `simulate` adds it separately.
        taken_cpu_s = cores.delivery_cpu_s + (cores.step_cpu_s if self.prefetches else 0.0)
        return self.passes(world) * making_s + (world.taken_per_core(traffic) * taken_cpu_s)[:, None]

    def passes(self, world: World) -> int:
        """Return how often a worker reads and prepares each minibatch: once, or once per trial."""
        return 1 if self.is_shared else world.system.training.trials

    def ahead(self, world: World) -> int:
        """Return the number of minibatches per trial that fit into the staging buffer, at least one."""
        system = world.system
        # An unlimited buffer holds all minibatches; int() cannot convert infinity.
        most = system.training.epochs * system.steps
        minibatch_bytes = self.staged_bytes(world) * system.training.batch * self.passes(world)
        return max(1, int(min(system.machine.staging.capacity_bytes / minibatch_bytes, most)))

    def staged_bytes(self, world: World) -> float:
        """Return the mean bytes of a sample in the staging buffer."""
        # In the paper, prepared samples have their raw size. Only the policies of this project stage pixels.
        return world.system.dataset.sample_bytes

    def preload_s(self, _world: World) -> float:
        """Return the seconds that reading from the PFS before training takes on the slowest worker."""
        return 0.0

    def remark(self, _world: World) -> str | None:
        """Return a limitation of the result or a note on it as one clause, or None."""
        return None


class Perfect(Policy):
    name = "perfect"
    about = "Every minibatch is there before it is needed: training alone, the lower bound of all others (NoPFS)."

    def traffic(self, world: World) -> Iterator[Traffic]:
        for epoch in world.epochs:
            samples = world.sampler_order(epoch)
            yield world.traffic(samples, np.full(len(samples), world.tiers.staged, dtype=np.int8))

    def cores_s(self, _world: World, _cores: Cores, traffic: Traffic) -> Floats:
        """Return zeros, because minibatches need no prep and no delivery."""
        return np.zeros(traffic.nbytes.shape[:2])


class StagingBuffer(Policy):
    name = "staging_buffer"
    about = "Threads read from the PFS in access order, ahead of training by what the staging buffer holds (NoPFS)."

    def traffic(self, world: World) -> Iterator[Traffic]:
        return (world.from_pfs(world.sampler_order(epoch)) for epoch in world.epochs)


class Naive(StagingBuffer):
    name = "naive"
    about = "One thread per trial reads from the PFS when training asks, and training waits (NoPFS)."
    prefetches = False

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """Return the seconds with one thread per trial; with fewer threads than trials, trials wait for each other."""
        machine, training = world.system.machine, world.system.training
        threads = min(training.trials, machine.staging.threads)
        if world.system.model == "published":
            # Counts all threads as readers, and no write(k), which is for a staging buffer.
            seconds = traffic.nbytes * machine.pfs_s_per_byte(world.tiers.readers)
        else:
            # Without read-ahead, the PFS has at most one reader per trial and worker.
            seconds = traffic.nbytes * machine.pfs_s_per_byte(training.workers * threads)
            seconds[..., -1] = write_seconds(traffic.nbytes, machine=machine)
        seconds *= training.trials / threads
        return seconds


class Minio(Policy):
    name = "minio"
    about = (
        "CoorDL's MinIO cache (VLDB 2021), one per worker: keeps samples as they are first read, until it is full, and "
        "never evicts."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        # Classes on each worker. Nothing is evicted: once a sample does not fit, the cache stays full.
        kept = np.full((world.workers, world.samples + 1), NOWHERE, dtype=np.int8)
        used_bytes, is_full = [0.0] * world.workers, [not world.classes] * world.workers
        for epoch in world.epochs:
            samples = world.sampler_order(epoch)
            held = np.empty(len(samples), dtype=np.int8)
            for worker in range(world.workers):
                read = samples[worker :: world.workers]
                found = held[worker :: world.workers] = kept[worker, read]
                if is_full[worker]:
                    continue
                missed = read[found == NOWHERE]
                admitted = world.admit(world.sizes[missed], world.classes, used_bytes=used_bytes[worker])
                kept[worker, missed] = admitted
                kept[worker, world.samples] = NOWHERE  # the padding sample of the last step
                fits = missed[admitted != NOWHERE]
                used_bytes[worker] += float(world.sizes[fits].sum(dtype=np.float64))
                is_full[worker] = len(fits) < len(missed)
            yield world.traffic(samples, world.own_tiers(held))


class PageCachePolicy(Policy):
    name = "page_cache"
    about = (
        "The page cache of Linux with its two lists, one per worker, as large as the fastest class and without the "
        "others; samples are files."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        memory_bytes = world.classes[0].capacity_bytes if world.classes else 0.0
        caches = [PageCache(capacity_bytes=memory_bytes, sizes=world.sizes) for _ in range(world.workers)]
        for epoch in world.epochs:
            samples = world.sampler_order(epoch)
            held = np.full(len(samples), NOWHERE, dtype=np.int8)
            for worker, cache in enumerate(caches):
                mine = slice(worker, None, world.workers)
                real = samples[mine] < world.samples
                hits = np.zeros(len(real), dtype=bool)
                hits[real] = cache.read(samples[mine][real])
                held[mine][hits] = 0  # the fastest class
            yield world.traffic(samples, world.own_tiers(held))

    def remark(self, world: World) -> str | None:
        if world.system.training.trials == 1:
            return None
        return "trials with the same page cache hit more often than the single trial that is simulated"
