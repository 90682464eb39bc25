"""Policies that use the future reads of each worker.

NoPFS caches the samples that a worker will read most often. Lobster caches the samples that it will read next.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mbaas.model.curves import ThroughputCurve
from mbaas.model.threads import TierBytes, split_threads
from mbaas.tools.simulator.policies.base import Policy
from mbaas.tools.simulator.world import NOWHERE, Codes, Floats, Tiers, Traffic, World, fetch_seconds, write_seconds


class Nopfs(Policy):
    name = "nopfs"
    about = (
        "NoPFS (SC 2021): every worker knows all access sequences, fills its classes, fastest first, with the samples "
        "it will read most often, and reads from wherever is fastest."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        yield world.from_pfs(world.sampler_order(0))
        if len(world.epochs) == 1:
            return
        held, choice = classes_by_worker(world), _fastest_of(world)
        best = _best(world, held)
        for epoch in world.epochs[1:]:
            samples = world.sampler_order(epoch)
            # `NOWHERE` is -1, which indexes the last row and column; `_fastest_of` stores its entries there.
            yield world.traffic(samples, choice[_own(world, held, samples), best[samples]])

    def remark(self, _world: World) -> str | None:
        return "caches are filled during the first epoch by threads of their own, which cost nothing here"


def classes_by_worker(world: World) -> NDArray[np.int8]:
    """Return each sample's class on each worker: int8[N, F + 1].

    Workers break ties between equally frequent samples differently, so that their caches overlap less.
    """
    # Reads of all epochs count, because a class is filled once and never changes, as in the paper.
    reads = reads_by_worker(world)
    held = np.full((world.workers, world.samples + 1), NOWHERE, dtype=np.int8)
    for worker in range(world.workers):
        # Without the shift, all workers would break ties the same way and cache the same samples.
        shift = worker * world.samples // world.workers
        rarely = np.roll(reads.max() - reads[worker], -shift)
        wanted = (np.argsort(rarely, kind="stable")[: np.count_nonzero(reads[worker])] + shift) % world.samples
        held[worker, wanted] = world.admit(world.sizes[wanted], world.classes)
    return held


def reads_by_worker(world: World) -> NDArray[np.uint8] | NDArray[np.uint16]:
    """Return the number of reads of each sample by each worker over all epochs: uint8 or uint16[N, F]."""
    # One of the largest arrays of a simulation, so it has one byte per worker and sample if that is enough.
    reads = np.zeros((world.workers, world.samples), dtype=np.uint8 if len(world.epochs) < 256 else np.uint16)
    everything = np.arange(world.samples)
    for epoch in world.epochs:
        reads[world.readers(epoch)[:-1], everything] += 1
    return reads


def _fastest_of(world: World) -> Codes:
    """Return the fastest tier by local class and best class on any worker, -1 for none: int8[own, best]."""
    cost, pfs, remote = world.tiers.fetch_s_per_byte(), world.tiers.pfs, world.tiers.remote
    classes = range(-1, len(world.classes))
    choice = np.empty((len(classes), len(classes)), dtype=np.int8)
    for own in classes:
        for best in classes:
            tiers = [own] * (own >= 0) + [remote + best] * (best >= 0) + [pfs]
            choice[own, best] = min(tiers, key=lambda tier: float(cost[tier]))
    return choice


class Lobster(Policy):
    name = "lobster"
    about = (
        "Lobster (ICPP 2022): a worker keeps what it will read itself in the next epoch, nearest first, then last "
        "copies for others; threads are split between fetching and preparing."
    )
    overlaps = True

    def traffic(self, world: World) -> Iterator[Traffic]:
        held = np.full((world.workers, world.samples + 1), NOWHERE, dtype=np.int8)
        for epoch in world.epochs:
            samples = world.sampler_order(epoch)
            own = _own(world, held, samples)
            # the worker's own classes first, then another worker's, then the PFS
            tiers = world.shared_tiers(np.where(own >= 0, own, _best(world, held)[samples]), own >= 0)
            yield world.traffic(samples, tiers)
            if epoch + 1 in world.epochs:  # nothing is read after the last epoch
                held = next_contents(world, held, epoch)

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        machine, passes = world.system.machine, self.passes(world)
        fetching, preparing = _split(world, traffic, passes=passes)
        tiers = Tiers(machine, readers=world.workers * fetching)
        seconds = fetch_seconds(traffic.nbytes, tiers=tiers) * (passes / fetching)
        seconds[..., -1] = write_seconds(traffic.nbytes, machine=machine) * (passes / preparing)
        return seconds

    def remark(self, _world: World) -> str | None:
        return "what to evict is decided once an epoch here, not at every step"


def next_contents(world: World, held: NDArray[np.int8], epoch: int) -> NDArray[np.int8]:
    """Return each sample's class on each worker after an epoch: int8[N, F + 1].

    From the samples that it just read or already caches, a worker first keeps the ones that it reads in the next epoch,
    nearest first (reuse distance). The remaining room is for last copies of other samples (reuse count): first on the
    worker that just read the sample, then on a worker that still caches it.
    """
    coming = world.sampler_order(epoch + 1)
    readers, next_readers = world.readers(epoch)[coming], world.turn
    wanted = np.full_like(held, NOWHERE)
    used_bytes = np.zeros(world.workers)
    anywhere = np.zeros(world.samples + 1, dtype=bool)

    # Samples are in the next epoch's order, so the nearest ones get the room.
    def keep(worker: int, chosen: NDArray[np.bool_]) -> None:
        samples = coming[chosen]
        codes = world.admit(world.sizes[samples], world.classes, used_bytes=float(used_bytes[worker]))
        taken = codes != NOWHERE
        wanted[worker, samples[taken]] = codes[taken]
        anywhere[samples[taken]] = True
        used_bytes[worker] += world.sizes[samples[taken]].sum(dtype=np.float64)

    real = coming < world.samples  # without the padding of the last step
    for worker in range(world.workers):
        has = (readers == worker) | (held[worker][coming] != NOWHERE)
        keep(worker, real & has & (next_readers == worker))
    # A last copy is worth keeping for other workers, because storage is slower than another worker's memory.
    for worker in range(world.workers):
        keep(worker, real & (readers == worker) & ~anywhere[coming])
    for worker in range(world.workers):
        keep(worker, real & (held[worker][coming] != NOWHERE) & ~anywhere[coming])
    return wanted


def _own(world: World, held: NDArray[np.int8], samples: NDArray[np.int32]) -> Codes:
    """Return each sample's class on the worker that reads it: int8[H B N]."""
    own = np.empty(len(samples), dtype=np.int8)
    for worker in range(world.workers):
        mine = slice(worker, None, world.workers)
        own[mine] = held[worker][samples[mine]]
    return own


def _best(world: World, held: NDArray[np.int8]) -> Codes:
    """Return each sample's fastest class on any worker: int8[F + 1]."""
    nowhere = np.int8(len(world.classes))  # above all classes, so that the minimum is the fastest class
    best = np.where(held < 0, nowhere, held).min(axis=0)
    found: Codes = np.where(best == nowhere, NOWHERE, best)
    return found


def _split(world: World, traffic: Traffic, *, passes: int) -> tuple[int, int]:
    """Return the fetch and prep threads, at least one each, by the rule of Lobster for a mean minibatch."""
    machine, pfs = world.system.machine, world.tiers.pfs
    minibatch = traffic.nbytes.mean(axis=(0, 1))
    cost = world.tiers.fetch_s_per_byte()
    # Cache throughput is proportional to threads. All workers share the PFS and read the same amount from it.
    curves = [ThroughputCurve.linear(1 / each) for each in cost[:pfs]] + [machine.storage.over(1 / world.workers)]
    split = split_threads(
        max(machine.staging.threads, 2),  # one each, even if the machine has a single thread
        prep=ThroughputCurve.linear(1 / machine.write_s_per_byte),
        samples=passes * float(minibatch.sum()),
        # not strict, because the tiers after the PFS are never read
        tiers=[TierBytes(passes * float(nbytes), curve) for nbytes, curve in zip(minibatch, curves, strict=False)],
        step_s=float(minibatch.sum()) / machine.compute_bytes_per_s,
    )
    return split.fetch, split.prep
