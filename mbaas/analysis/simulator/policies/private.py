"""Policies in which each worker caches for itself, and reads what a distributed sampler gives it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mbaas.analysis.simulator.caches import Lru
from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.world import NOWHERE, Codes, Traffic, World


class Minio(Policy):
    name = "minio"
    about = (
        "CoorDL's MinIO cache (VLDB 2021), one per worker: keeps samples as they are first read, until it is full, and "
        "never evicts."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        caches = [_Minio(world) for _ in range(world.workers)]
        for epoch in world.epochs:
            samples = world.dealt(epoch)
            held = np.empty(len(samples), dtype=np.int8)
            for worker, cache in enumerate(caches):
                held[worker :: world.workers] = cache.read(samples[worker :: world.workers])
            yield world.traffic(samples, world.own_tiers(held))


class _Minio:
    """A cache of one worker; once a sample found no room it is full for good."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._held = np.full(world.samples + 1, NOWHERE, dtype=np.int8)
        self._used_bytes = 0.0
        self._full = not world.classes

    def read(self, samples: np.typing.NDArray[np.int32]) -> Codes:
        """Find the class in which each sample is; then admit those that are in none."""
        held = self._held[samples]
        if not self._full:
            missed = samples[held == NOWHERE]
            admitted = self._world.admitted(self._world.sizes[missed], self._world.classes, used_bytes=self._used_bytes)
            self._held[missed] = admitted
            self._held[self._world.samples] = NOWHERE  # the sample that fills up the last step
            kept = missed[admitted != NOWHERE]
            self._used_bytes += float(self._world.sizes[kept].sum(dtype=np.float64))
            self._full = len(kept) < len(missed)
        return held


class LruPolicy(Policy):
    name = "lru"
    about = (
        "A cache per worker that evicts what was not read for longest, as a page cache does; faster classes hold what "
        "was read last."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        # A cache of the first k classes together, for each k: what is in the k-th and in no smaller one was read less
        # lately than what the faster classes hold, so it lies in class k.
        capacities = np.cumsum([each.capacity_bytes for each in world.classes])
        caches = [
            [Lru(capacity_bytes=float(capacity), sizes=world.sizes) for capacity in capacities]
            for _ in range(world.workers)
        ]
        for epoch in world.epochs:
            samples = world.dealt(epoch)
            held = np.full(len(samples), NOWHERE, dtype=np.int8)
            for worker, tiers in enumerate(caches):
                mine = slice(worker, None, world.workers)
                real = samples[mine] < world.samples
                for number, cache in reversed(list(enumerate(tiers))):  # the fastest last: it overwrites the others
                    hits = np.zeros(len(real), dtype=bool)
                    hits[real] = cache.read(samples[mine][real])
                    held[mine][hits] = number
            yield world.traffic(samples, world.own_tiers(held))

    def remark(self, world: World) -> str | None:
        if world.system.training.trials == 1:
            return None
        return "trials that read the same cache in different orders are taken to hit as often as one alone"
