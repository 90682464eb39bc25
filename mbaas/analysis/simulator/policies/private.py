"""Policies with a separate cache per worker; a distributed sampler assigns the samples."""

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
    def __init__(self, world: World) -> None:
        self._world = world
        self._held = np.full(world.samples + 1, NOWHERE, dtype=np.int8)
        self._used_bytes = 0.0
        # Nothing is evicted: once a sample does not fit, the cache stays full.
        self._full = not world.classes

    def read(self, samples: np.typing.NDArray[np.int32]) -> Codes:
        """Return the class of each sample before this read, and admit the missing ones: int8[n]."""
        held = self._held[samples]
        if not self._full:
            missed = samples[held == NOWHERE]
            admitted = self._world.admitted(self._world.sizes[missed], self._world.classes, used_bytes=self._used_bytes)
            self._held[missed] = admitted
            self._held[self._world.samples] = NOWHERE  # the padding sample of the last step
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
        # Cache k has the capacity of class k and all faster ones together. A sample in cache k but in no smaller cache
        # was read less recently than the contents of the faster classes, so it is in class k.
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
                for number, cache in reversed(list(enumerate(tiers))):  # the fastest last, to overwrite the others
                    hits = np.zeros(len(real), dtype=bool)
                    hits[real] = cache.read(samples[mine][real])
                    held[mine][hits] = number
            yield world.traffic(samples, world.own_tiers(held))

    def remark(self, world: World) -> str | None:
        if world.system.training.trials == 1:
            return None
        return "trials that read the same cache in different orders are taken to hit as often as one alone"
