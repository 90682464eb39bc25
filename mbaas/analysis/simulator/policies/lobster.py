"""Lobster: eviction by what comes next, and threads split between fetching and preparing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mbaas.allocation.threads import Source, split_threads
from mbaas.allocation.throughput import ThroughputCurve
from mbaas.analysis.simulator.model import Floats, Places, fetch_seconds, write_seconds
from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.world import NOWHERE, Codes, Traffic, World


class Lobster(Policy):
    name = "lobster"
    source = (
        "Lobster (ICPP 2022): a worker keeps what it will read itself in the next epoch, nearest first, then last "
        "copies for others; threads are split between fetching and preparing."
    )
    overlaps = True

    def traffic(self, world: World) -> Iterator[Traffic]:
        held = np.full((world.workers, world.samples + 1), NOWHERE, dtype=np.int8)
        for epoch in range(world.system.training.epochs):
            samples = world.dealt(epoch)
            yield world.traffic(samples, _places(world, held, samples))
            if epoch + 1 < world.system.training.epochs:
                held = kept(world, held, epoch)

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        machine, sweeps = world.system.machine, self.sweeps(world)
        fetching, preparing = _split(world, traffic, sweeps=sweeps)
        places = Places(machine, readers=world.workers * fetching)
        seconds = fetch_seconds(traffic.nbytes, places=places) * (sweeps / fetching)
        seconds[..., -1] = write_seconds(traffic.nbytes, machine=machine) * (sweeps / preparing)
        return seconds

    def remark(self, _world: World) -> str | None:
        return "what to evict is decided once an epoch here, not at every step"


def kept(world: World, held: NDArray[np.int8], epoch: int) -> NDArray[np.int8]:
    """What each worker holds after an epoch: int8[N, F + 1].

    Reuse distance: only samples that the worker reads in the next epoch, the nearest first. Reuse count: the others
    only as last copies, with the room that is left: first where they were read last, then where they still lie.
    """
    coming = world.dealt(epoch + 1)
    readers, next_readers = world.readers(epoch)[coming], world.turn
    wanted = np.full_like(held, NOWHERE)
    used_bytes = np.zeros(world.workers)
    anywhere = np.zeros(world.samples + 1, dtype=bool)

    def keep(worker: int, chosen: NDArray[np.bool_]) -> None:
        samples = coming[chosen]
        codes = world.placed(world.sizes[samples], world.classes, used_bytes=float(used_bytes[worker]))
        taken = codes != NOWHERE
        wanted[worker, samples[taken]] = codes[taken]
        anywhere[samples[taken]] = True
        used_bytes[worker] += world.sizes[samples[taken]].sum(dtype=np.float64)

    real = coming < world.samples
    for worker in range(world.workers):
        has = (readers == worker) | (held[worker][coming] != NOWHERE)
        keep(worker, real & has & (next_readers == worker))
    for worker in range(world.workers):
        keep(worker, real & (readers == worker) & ~anywhere[coming])
    for worker in range(world.workers):
        keep(worker, real & (held[worker][coming] != NOWHERE) & ~anywhere[coming])
    return wanted


def _places(world: World, held: NDArray[np.int8], samples: NDArray[np.int32]) -> Codes:
    """Own memory, else another worker's, else the PFS."""
    nowhere = np.int8(len(world.classes))
    best = np.where(held < 0, nowhere, held).min(axis=0)
    own = np.empty(len(samples), dtype=np.int8)
    for worker in range(world.workers):
        mine = slice(worker, None, world.workers)
        own[mine] = held[worker][samples[mine]]
    anywhere = np.where(best == nowhere, NOWHERE, best)[samples]
    return world.shared_places(np.where(own >= 0, own, anywhere), own >= 0)


def _split(world: World, traffic: Traffic, *, sweeps: int) -> tuple[int, int]:
    """Threads that fetch and that prepare, at least one each, by Lobster's rule for an epoch's average minibatch."""
    machine, pfs = world.system.machine, world.places.pfs
    minibatch = traffic.nbytes.mean(axis=(0, 1))
    cost = world.places.fetch_s_per_byte()
    curves = [ThroughputCurve.linear(1 / each) for each in cost[:pfs]] + [machine.storage.shared_by(world.workers)]
    split = split_threads(
        max(machine.staging.threads, 2),
        prep=ThroughputCurve.linear(1 / machine.write_s_per_byte),
        samples=sweeps * float(minibatch.sum()),
        sources=[Source(sweeps * float(nbytes), curve) for nbytes, curve in zip(minibatch, curves, strict=False)],
        step_s=float(minibatch.sum()) / machine.compute_bytes_per_s,
    )
    return split.fetch, split.prep
