"""NoPFS: clairvoyant prefetching."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.world import NOWHERE, Codes, Traffic, World


class Nopfs(Policy):
    name = "nopfs"
    source = (
        "NoPFS (SC 2021): every worker knows all access sequences, fills its classes, fastest first, with the samples "
        "it will read most often, and reads from wherever is fastest."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        yield world.from_pfs(world.dealt(0))
        epochs = world.system.training.epochs
        if epochs == 1:
            return
        held = held_by_workers(world)
        best = np.where(held < 0, np.int8(len(world.classes)), held).min(axis=0)
        best[best == len(world.classes)] = NOWHERE
        choice = _fastest_of(world)
        for epoch in range(1, epochs):
            samples = world.dealt(epoch)
            own = np.empty(len(samples), dtype=np.int8)
            for worker in range(world.workers):
                mine = slice(worker, None, world.workers)
                own[mine] = held[worker][samples[mine]]
            yield world.traffic(samples, choice[own, best[samples]])

    def remark(self, _world: World) -> str | None:
        return "caches are filled during the first epoch by threads of their own, which cost nothing here"


def held_by_workers(world: World) -> NDArray[np.int8]:
    """The class in which each worker keeps each sample: int8[N, F + 1].

    Among samples that it reads equally often, workers begin at different ones, so that they overlap less.
    """
    reads = reads_by_workers(world)
    held = np.full((world.workers, world.samples + 1), NOWHERE, dtype=np.int8)
    for worker in range(world.workers):
        shift = worker * world.samples // world.workers
        rarely = np.roll(reads.max() - reads[worker], -shift)
        wanted = (np.argsort(rarely, kind="stable")[: np.count_nonzero(reads[worker])] + shift) % world.samples
        held[worker, wanted] = world.placed(world.sizes[wanted], world.classes)
    return held


def reads_by_workers(world: World) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """How often each worker reads each sample in all epochs: uint8 or uint16[N, F]."""
    epochs = world.system.training.epochs
    reads = np.zeros((world.workers, world.samples), dtype=np.uint8 if epochs < 256 else np.uint16)
    everything = np.arange(world.samples)
    for epoch in range(epochs):
        reads[world.readers(epoch)[:-1], everything] += 1
    return reads


def _fastest_of(world: World) -> Codes:
    """Where to read from, by own class and the best class of all workers, -1 for none: int8[own, best]."""
    cost, pfs, remote = world.places.fetch_s_per_byte(), world.places.pfs, world.places.remote
    classes = range(-1, len(world.classes))
    choice = np.empty((len(classes), len(classes)), dtype=np.int8)
    for own in classes:
        for best in classes:
            places = [own] * (own >= 0) + [remote + best] * (best >= 0) + [pfs]
            choice[own, best] = min(places, key=lambda place: float(cost[place]))
    return choice
