"""Policies in which each sample is cached on one worker.

A worker that needs a sample asks there; or the worker that has it trains on it (sharding, locality-aware loading), or
prepares it for all (this project).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from mbaas import units
from mbaas.allocation.bandwidth import StorageClass
from mbaas.analysis.simulator.model import Floats, fetch_seconds, write_seconds
from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.world import NOWHERE, Codes, Owners, Traffic, World


def classes_at_home(world: World, classes: Sequence[StorageClass]) -> Codes:
    """Find the class in which the home of each sample has it: int8[F + 1].

    A home admits its samples until it is full; which come first is chance, and here it is the lower ids.
    """
    held = np.full(world.samples + 1, NOWHERE, dtype=np.int8)
    for home in range(world.workers):
        held[home : world.samples : world.workers] = world.admitted(
            world.sizes[home : world.samples : world.workers], classes
        )
    return held


def classes_at_first_readers(world: World, classes: Sequence[StorageClass]) -> Codes:
    """Find the class in which the worker that reads a sample in the first epoch keeps it: int8[F + 1]."""
    held = np.full(world.samples + 1, NOWHERE, dtype=np.int8)
    for worker in range(world.workers):
        samples = world.dealt(0)[worker :: world.workers]
        held[samples] = world.admitted(world.sizes[samples], classes)
    held[world.samples] = NOWHERE  # the sample that fills up: it has no bytes, so it always finds room
    return held


class Caching(Policy):
    """A policy that keeps each sample in a class of one worker.

    Attributes:
        memory_only: it caches in the first storage class alone; the system that it stands for knows no other.
        preloads: caches are filled before training starts; otherwise by what the first epoch reads.
    """

    memory_only: ClassVar[bool] = False
    preloads: ClassVar[bool] = False

    def classes(self, world: World) -> Sequence[StorageClass]:
        """Return the classes that hold samples."""
        return world.classes[:1] if self.memory_only else world.classes

    def preload_s(self, world: World) -> float:
        """Return the seconds in which every worker, with all its threads, reads what its classes will hold."""
        if not self.preloads:
            return 0.0
        held = classes_at_home(world, self.classes(world)) != NOWHERE
        nbytes = np.bincount(world.homes[held], weights=world.sizes[held], minlength=world.workers)
        machine = world.system.machine
        return float(nbytes.max() * machine.pfs_s_per_byte(world.tiers.readers) / machine.staging.threads)


class Partitioned(Caching):
    """A policy in which workers give each other what they hold; what nobody holds comes from the PFS."""

    def owned(self, world: World) -> tuple[Owners, Codes]:
        """Say who may hold each sample, and in which class it is held: its home, evenly spread, if not overridden."""
        return world.homes, classes_at_home(world, self.classes(world))

    def traffic(self, world: World) -> Iterator[Traffic]:
        owners, held = self.owned(world)
        for epoch in world.epochs:
            samples = world.dealt(epoch)
            if epoch == 0 and not self.preloads:
                yield world.from_pfs(samples)
            else:
                yield world.traffic(samples, world.shared_tiers(held[samples], owners[samples] == world.turn))


class DeepioOrdered(Partitioned):
    name = "deepio_ordered"
    about = (
        "DeepIO (MASCOTS 2018) as NoPFS simulates it: each worker's memory holds a part of the dataset, and samples "
        "come from there in the given order."
    )
    memory_only = True


class Lbann(Partitioned):
    """LBANN's data store: samples are kept in memory alone, all of them."""

    memory_only = True

    def remark(self, world: World) -> str | None:
        room_bytes = world.workers * sum(each.capacity_bytes for each in self.classes(world))
        nbytes = world.system.dataset.nbytes
        if nbytes <= room_bytes:
            return None
        return (
            f"LBANN itself needs the dataset ({units.size(nbytes)}) to fit the memory of all workers "
            f"({units.size(room_bytes)}); here the rest comes from the PFS"
        )


class LbannDynamic(Lbann):
    name = "lbann_dynamic"
    about = (
        "LBANN's data store, dynamic mode, as NoPFS simulates it: the worker that reads a sample first keeps it, and "
        "gives it to the others from then on."
    )

    def owned(self, world: World) -> tuple[Owners, Codes]:
        return world.readers(0), classes_at_first_readers(world, self.classes(world))


class LbannPreload(Lbann):
    name = "lbann_preload"
    about = "LBANN's data store, preloading mode: each worker reads its part into memory before training starts."
    preloads = True


class PartitionedMinio(Partitioned):
    name = "partitioned_minio"
    about = (
        "CoorDL's partitioned cache (VLDB 2021): each worker owns a part of the dataset and caches it as it is first "
        "read, never evicts, and gives it to the others."
    )


class Sharded(Caching):
    """A policy in which each worker trains on its own part; what its classes do not hold comes from the PFS."""

    def traffic(self, world: World) -> Iterator[Traffic]:
        held = classes_at_home(world, self.classes(world))
        for epoch in world.epochs:
            samples = world.by_home(epoch)
            if epoch == 0 and not self.preloads:
                yield world.from_pfs(samples)
            else:
                yield world.traffic(samples, world.own_tiers(held[samples]))

    def remark(self, world: World) -> str | None:
        return "samples are shuffled within a worker only" if world.workers > 1 else None


class DeepioOptimistic(Sharded):
    name = "deepio_optimistic"
    about = (
        "DeepIO's opportunistic mode as NoPFS simulates it: as deepio_ordered, but a worker changes the order to train "
        "on what its own memory holds."
    )
    memory_only = True


class ParallelStaging(Sharded):
    name = "parallel_staging"
    about = (
        "Sharding: before training starts each worker copies a part of the dataset to its own storage, and trains on "
        "that part alone (NoPFS)."
    )
    preloads = True


class LocalityAware(Policy):
    name = "locality_aware"
    about = (
        "Locality-aware loading (2019): from every global minibatch each worker takes the samples it has cached; only "
        "what evens out their numbers travels."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        owners, held = world.readers(0), classes_at_first_readers(world, world.classes)
        yield world.from_pfs(world.dealt(0))  # nobody has anything yet, so the sampler's order is as good as any
        for epoch in world.epochs[1:]:
            samples = world.dealt(epoch)
            owned = np.where(held[samples] == NOWHERE, np.uint16(0), owners[samples] + np.uint16(1))
            workers = assigned(owned.reshape(world.steps, -1), world)
            tiers = world.shared_tiers(held[samples], owners[samples] == workers)
            yield world.traffic(samples, tiers, workers=workers)


def assigned(owned: Owners, world: World) -> Owners:
    """Assign each sample of each global minibatch to a worker: uint16[H B N].

    A worker keeps as many of its own as its minibatch holds. Samples that nobody holds fill what workers lack, then
    what others have too much of.

    Args:
        owned: uint16[H, B N], the owner of each sample, from 1; 0 where nobody holds it.
        world: for N and B.
    """
    workers, batch = world.workers, world.batch
    # All minibatches at once: each row is sorted by owner, so that a sample's rank within its owner's group says
    # whether the owner has room for it. NumPy's stable sort of bytes is a radix sort of a single pass.
    small = owned.astype(np.uint8) if workers < 255 else owned
    sorting = np.argsort(small, axis=1, kind="stable").astype(np.int32)
    rows = np.arange(len(owned), dtype=np.int64)[:, None]
    groups = np.bincount((rows * (workers + 1) + owned).reshape(-1), minlength=len(owned) * (workers + 1)).reshape(
        len(owned), workers + 1
    )
    starts = np.cumsum(groups, axis=1) - groups
    owner = np.take_along_axis(owned, sorting, axis=1)
    rank = np.arange(owned.shape[1], dtype=np.int32) - np.take_along_axis(
        starts.astype(np.int32), owner.astype(np.intp), axis=1
    )
    moves = (owner == 0) | (rank >= batch)
    # Only the set of samples of a global minibatch matters to the gradient, so anybody may take what is left over.
    takers = np.where(moves, np.uint16(0), owner - np.uint16(1))
    lacks = batch - np.minimum(groups[:, 1:], batch)
    takers[moves] = np.repeat(np.tile(np.arange(workers, dtype=np.uint16), len(owned)), lacks.reshape(-1))
    result: Owners = np.empty_like(takers)
    np.put_along_axis(result, sorting.astype(np.intp), takers, axis=1)
    return result.reshape(-1)


class Mbaas(Policy):
    name = "mbaas"
    about = (
        "mbaas: each minibatch is fetched and prepared once for all trials; each sample by its home, from its home's "
        "MinIO cache, and only pixels travel (coordinated prep and partitioned cache of CoorDL, VLDB 2021)."
    )
    is_shared = True
    overlaps = True

    def traffic(self, world: World) -> Iterator[Traffic]:
        held = classes_at_home(world, world.classes)
        for epoch in world.epochs:
            samples = world.dealt(epoch)
            homes = world.homes[samples]
            if epoch == 0:
                yield world.from_pfs(samples, workers=homes)  # already then homes read, and only pixels travel
            else:
                yield world.traffic(samples, world.own_tiers(held[samples]), workers=homes)

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """Return the seconds of p_0 threads that read ahead, p_0 workers that prepare, and pixels that travel."""
        seconds = fetch_seconds(self.moved_bytes(world, traffic), tiers=world.tiers)
        seconds[..., -1] = self.prep_s(world, traffic)
        # on average: each worker is home of 1 / N of the samples of its minibatch; the last step may not be full
        global_batch = world.batch * world.workers
        full = np.minimum(world.samples - np.arange(world.steps) * global_batch, global_batch) / global_batch
        travelling_bytes = world.batch * (world.workers - 1) / world.workers * self.staged_bytes(world)
        travel_s = travelling_bytes / world.system.machine.network_bytes_per_s
        seconds[..., world.tiers.pixels] = (full * travel_s)[:, None]
        seconds /= world.system.machine.staging.threads
        return seconds

    def moved_bytes(self, _world: World, traffic: Traffic) -> Floats:
        """Return the bytes that threads which read move from each tier: float64[H, N, tiers]."""
        return traffic.nbytes

    def prep_s(self, world: World, traffic: Traffic) -> Floats:
        """Return the thread-seconds of preparing for a step: float64[H, N]."""
        return write_seconds(traffic.nbytes, machine=world.system.machine)

    def staged_bytes(self, world: World) -> float:
        return world.system.dataset.staged_bytes  # what waits for trials is prepared
