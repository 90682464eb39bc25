"""Policies that use the future reads of each worker.

NoPFS caches the samples that a worker will read most often. Lobster caches the samples that it will read next.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mbaas.model.curves import ThroughputCurve
from mbaas.model.threads import TierBytes, split_threads
from mbaas.tools.simulator.policies.base import Policy
from mbaas.tools.simulator.world import (
    NOWHERE,
    Codes,
    Flags,
    Floats,
    Ints,
    Owners,
    Samples,
    Traffic,
    World,
    fetch_seconds,
    write_seconds,
)


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
        "Lobster (ICPP 2022): a worker keeps the samples that it will read itself in the next epoch, nearest first, "
        "and last copies for others; threads are split between fetching and preparing."
    )
    overlaps = True
    adapts = True

    def traffic(self, world: World) -> Iterator[Traffic]:
        held = Contents.empty(world)
        for epoch in world.epochs:
            samples, after = world.sampler_order(epoch), held
            if epoch + 1 in world.epochs:  # nothing is read after the last epoch
                held, after = lobster_contents(world, held, epoch)
            # the worker's own classes, another worker's, or the PFS
            yield world.traffic(samples, world.shared_tiers(held.classes[samples], held.holders[samples] == world.turn))
            held = after

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        machine, passes = world.system.machine, self.passes(world)
        fetching, preparing = _split(world, traffic, passes=passes)
        tiers = replace(world.tiers, readers=world.workers * fetching)
        seconds = fetch_seconds(traffic.nbytes, tiers=tiers) * (passes / fetching)
        seconds[..., -1] = write_seconds(traffic.nbytes, machine=machine) * (passes / preparing)
        return seconds

    def remark(self, _world: World) -> str | None:
        return "last copies get only the room that a worker's own samples leave at all times of an epoch"


@dataclass(frozen=True)
class Contents:
    """Contents of Lobster's caches at the start of an epoch.

    Attributes:
        classes: class of each sample on its holder, `NOWHERE` if no worker holds it: int8[F + 1].
        holders: worker that holds it, if any: uint16[F + 1].
        reused: its holder reads it in this epoch and kept it for that; otherwise it is a last copy: bool[F + 1].
    """

    classes: Codes
    holders: Owners
    reused: Flags

    @classmethod
    def empty(cls, world: World) -> Contents:
        shape = world.samples + 1
        return cls(np.full(shape, NOWHERE), np.zeros(shape, np.uint16), np.zeros(shape, np.bool_))

    @property
    def last_copies(self) -> Flags:
        return (self.classes != NOWHERE) & ~self.reused


def lobster_contents(world: World, held: Contents, epoch: int) -> tuple[Contents, Contents]:
    """Return the contents that stay for the reads of an epoch, and the contents after it.

    In iteration h of I, a worker keeps a sample that it just read only if its own next read is at most 2 I - h
    iterations away, in the next epoch (reuse distance). While it is full, the sample with the furthest next read
    leaves. Other samples stay only as last copies (reuse count), in the room that reused ones never need during the
    epoch. As a sample is read once an epoch, one copy is enough.
    """
    samples, coming = world.sampler_order(epoch), world.sampler_order(epoch + 1)
    next_reads = np.empty(world.samples + 1, dtype=np.int64)
    next_reads[coming] = np.arange(len(coming))
    again: Flags = (next_reads[samples] % world.workers == world.turn) & (samples < world.samples)
    stays, after, peaks = replace(held, classes=held.classes.copy()), Contents.empty(world), []
    for worker in range(world.workers):
        reads, is_reused = samples[worker :: world.workers], again[worker :: world.workers]
        after.classes[reads[is_reused]], peak_bytes = _reuses(world, held, reads, is_reused, next_reads)
        after.holders[reads[is_reused]], after.reused[reads[is_reused]] = worker, True
        # A worker that now needs more room for its own reads drops last copies, from the slowest class.
        copies = np.flatnonzero(held.last_copies & (held.holders == worker))
        copies = copies[np.argsort(held.classes[copies], kind="stable")]
        stays.classes[copies] = world.admit(world.sizes[copies], world.classes, used_bytes=peak_bytes)
        peaks.append(peak_bytes)
    _keep_last_copies(world, stays, after, samples, again, peaks)
    return stays, after


def _reuses(world: World, held: Contents, reads: Samples, is_reused: Flags, next_reads: Ints) -> tuple[Codes, float]:
    """Return the class of each reused sample after a worker's reads, and the most bytes held for its own reads."""
    sizes, room_bytes = world.sizes[reads].astype(np.float64), _room_bytes(world)
    # Samples that were kept for these reads leave one by one.
    old_bytes = np.where(held.reused[reads] & (held.classes[reads] != NOWHERE), sizes, 0)
    unread_bytes = old_bytes.sum() - np.cumsum(old_bytes)
    used_bytes = unread_bytes + np.cumsum(np.where(is_reused, sizes, 0))
    reused = np.flatnonzero(is_reused)
    nexts = next_reads[reads[reused]]
    kept = np.flatnonzero(nearest(nexts, sizes[reused], rooms=room_bytes - unread_bytes[reused]))
    kept = kept[np.argsort(nexts[kept])]  # the nearest in the fastest class
    codes = np.full(len(reused), NOWHERE)
    codes[kept] = world.admit(sizes[reused[kept]], world.classes)
    return codes, min(room_bytes, max(float(used_bytes.max()), float(old_bytes.sum())))


def nearest(next_reads: Ints, sizes: Floats, *, rooms: Floats) -> Flags:
    """Return which samples stay in a cache that drops the furthest next read while it is too full: bool[n].

    Samples come one by one. ``rooms`` are the bytes that the cache has for them when each comes.
    """
    stays = np.ones(len(next_reads), dtype=np.bool_)
    if (np.cumsum(sizes) <= rooms).all():
        return stays
    furthest: list[tuple[int, int, float]] = []
    used_bytes = 0.0
    arrivals = zip((-next_reads).tolist(), sizes.tolist(), rooms.tolist(), strict=True)
    for number, (closeness, nbytes, room_bytes) in enumerate(arrivals):
        heapq.heappush(furthest, (closeness, number, nbytes))
        used_bytes += nbytes
        while furthest and used_bytes > room_bytes:
            _, gone, gone_bytes = heapq.heappop(furthest)
            used_bytes -= gone_bytes
            stays[gone] = False
    return stays


def _room_bytes(world: World) -> float:
    return sum(each.capacity_bytes for each in world.classes)


def _keep_last_copies(
    world: World, stays: Contents, after: Contents, samples: Samples, again: Flags, peaks: Sequence[float]
) -> None:
    """Add last copies to the contents after an epoch: first the present ones, then samples that no worker held."""
    last_copies, moves = stays.last_copies, np.zeros(world.samples + 1, dtype=np.bool_)
    moves[samples[again]] = True  # its reader holds it from now on
    real = samples < world.samples
    for worker, peak_bytes in enumerate(peaks):
        mine = last_copies & (stays.holders == worker)
        # Copies that move leave their room when they are read.
        reads = np.flatnonzero(real & (mine[samples] | ((world.turn == worker) & ~last_copies[samples] & ~again)))
        ids = samples[reads]
        sizes, is_old = world.sizes[ids].astype(np.float64), mine[ids]
        free_bytes = _room_bytes(world) - peak_bytes - sizes[is_old].sum()
        rooms = free_bytes + np.cumsum(np.where(is_old & moves[ids], sizes, 0))
        # Samples without room are not admitted; their bytes are the running maximum of the excess.
        missing = np.maximum.accumulate(np.maximum(np.cumsum(np.where(is_old, 0, sizes)) - rooms, 0))
        admitted = ~is_old & (np.diff(missing, prepend=0) <= 0)
        old = ids[is_old & ~moves[ids]]
        kept = np.concatenate([old[np.argsort(stays.classes[old], kind="stable")], ids[admitted]])
        after.classes[kept] = world.admit(world.sizes[kept], world.classes, used_bytes=peak_bytes)
        after.holders[kept] = worker


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
        prep=ThroughputCurve.linear(1 / machine.write_s_per_byte()),
        samples=passes * float(minibatch.sum()),
        # not strict, because the tiers after the PFS are never read
        tiers=[TierBytes(passes * float(nbytes), curve) for nbytes, curve in zip(minibatch, curves, strict=False)],
        step_s=float(minibatch.sum()) / machine.compute_bytes_per_s,
    )
    return split.fetch, split.prep
