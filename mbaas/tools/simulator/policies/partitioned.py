"""Policies that cache each sample on one worker.

The caching worker sends the sample to the others, trains on it (sharding, locality-aware loading), or prepares it for
all trials (mbaas), from encoded samples or from decoded ones if the time saved is worth the room.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from mbaas.base import units
from mbaas.model.balance import travelling_share
from mbaas.model.forms import TOLERANCE, FormPlan, SampleCosts, plan_forms
from mbaas.tools.simulator.policies.base import Policy
from mbaas.tools.simulator.system import Cores, StorageClass
from mbaas.tools.simulator.world import (
    NOWHERE,
    Codes,
    Flags,
    Floats,
    Owners,
    Samples,
    Traffic,
    World,
    fetch_seconds,
    write_seconds,
)


class Caching(Policy):
    """A policy that caches each sample in a storage class of one worker; uncached samples come from the PFS.

    Unless a policy assigns samples in another way, workers read from each other's caches.

    Attributes:
        memory_only: caches only in the first storage class, as the simulated system does.
        preloads: fills caches before training starts; otherwise by the reads of the first epoch.
        by_first_reader: the worker that reads a sample first caches it; otherwise its home.
    """

    memory_only: ClassVar[bool] = False
    preloads: ClassVar[bool] = False
    by_first_reader: ClassVar[bool] = False

    def classes(self, world: World) -> Sequence[StorageClass]:
        return world.classes[:1] if self.memory_only else world.classes

    def owned(self, world: World) -> tuple[Owners, Codes]:
        """Return the worker that may cache each sample, and the sample's class there: uint16[F + 1], int8[F + 1].

        A worker admits its samples until it is full. On homes, the real order of admission is random; here it is by id.
        """
        order = world.sampler_order(0) if self.by_first_reader else np.arange(world.samples)
        held = np.full(world.samples + 1, NOWHERE, dtype=np.int8)
        for worker in range(world.workers):
            samples = order[worker :: world.workers]
            held[samples] = world.admit(world.sizes[samples], self.classes(world))
        held[world.samples] = NOWHERE  # the padding sample, which may be admitted because it has no bytes
        return world.readers(0) if self.by_first_reader else world.homes, held

    def assigned(self, world: World, epoch: int, _owners: Owners, _held: Codes) -> tuple[Samples, Owners | None]:
        """Return the samples of an epoch, and the worker that reads each; None for worker q % N at position q."""
        return world.sampler_order(epoch), None

    def traffic(self, world: World) -> Iterator[Traffic]:
        owners, held = self.owned(world)
        for epoch in world.epochs:
            samples, workers = self.assigned(world, epoch, owners, held)
            if epoch == 0 and not self.preloads:
                yield world.from_pfs(samples, workers=workers)
            else:
                is_local = owners[samples] == (world.turn if workers is None else workers)
                yield world.traffic(samples, world.shared_tiers(held[samples], is_local), workers=workers)

    def preload_s(self, world: World) -> float:
        """Return the seconds until every worker has filled its classes from the PFS with all its threads."""
        if not self.preloads:
            return 0.0
        held = self.owned(world)[1] != NOWHERE
        nbytes = np.bincount(world.homes[held], weights=world.sizes[held], minlength=world.workers)
        machine = world.system.machine
        return float(nbytes.max() * machine.pfs_s_per_byte(world.tiers.readers) / machine.staging.threads)


class DeepioOrdered(Caching):
    name = "deepio_ordered"
    about = (
        "DeepIO (MASCOTS 2018) as NoPFS simulates it: each worker's memory holds a part of the dataset, and samples "
        "come from there in the given order."
    )
    memory_only = True


class Lbann(Caching):
    """The LBANN data store, which keeps all samples, in memory only."""

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
    by_first_reader = True


class LbannPreload(Lbann):
    name = "lbann_preload"
    about = "LBANN's data store, preloading mode: each worker reads its part into memory before training starts."
    preloads = True


class PartitionedMinio(Caching):
    name = "partitioned_minio"
    about = (
        "CoorDL's partitioned cache (VLDB 2021): each worker owns a part of the dataset and caches it as it is first "
        "read, never evicts, and gives it to the others."
    )


class Sharded(Caching):
    """A policy whose workers train only on their own part of the dataset."""

    def assigned(self, world: World, epoch: int, _owners: Owners, _held: Codes) -> tuple[Samples, None]:
        return world.by_home(epoch), None

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


class LocalityAware(Caching):
    name = "locality_aware"
    about = (
        "Locality-aware loading (2019): from every global minibatch each worker takes the samples it has cached; only "
        "what evens out their numbers travels."
    )
    by_first_reader = True

    def assigned(self, world: World, epoch: int, owners: Owners, held: Codes) -> tuple[Samples, Owners | None]:
        samples = world.sampler_order(epoch)
        if epoch == 0:  # caches are empty, so the sampler's assignment is as good as any
            return samples, None
        owned = np.where(held[samples] == NOWHERE, np.uint16(0), owners[samples] + np.uint16(1))
        return samples, assign_workers(owned.reshape(world.steps, -1), world)


def assign_workers(owned: Owners, world: World) -> Owners:
    """Assign each sample of each global minibatch to a worker: uint16[H B N].

    Each worker takes samples from its own cache, at most B. Workers with fewer get uncached samples, then the surplus
    of other workers. ``owned``, uint16[H, B N], is the worker that caches a sample, from 1; 0 if it is not cached.
    """
    workers, batch = world.workers, world.batch
    # All minibatches at once. Each row is sorted by owner, so a sample's rank within its owner's group shows whether
    # the owner has room for it. For bytes, NumPy's stable sort is a single-pass radix sort.
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
    # The gradient depends only on the set of samples in a global minibatch, so any worker may take the others.
    takers = np.where(moves, np.uint16(0), owner - np.uint16(1))
    lacks = batch - np.minimum(groups[:, 1:], batch)
    takers[moves] = np.repeat(np.tile(np.arange(workers, dtype=np.uint16), len(owned)), lacks.reshape(-1))
    result: Owners = np.empty_like(takers)
    np.put_along_axis(result, sorting.astype(np.intp), takers, axis=1)
    return result.reshape(-1)


class Mbaas(Caching):
    name = "mbaas"
    about = (
        "mbaas: each minibatch is fetched and prepared once for all trials; each sample by its home, from its home's "
        "MinIO cache, and only pixels travel (coordinated prep and partitioned cache of CoorDL, VLDB 2021)."
    )
    is_shared = True
    overlaps = True

    def assigned(self, world: World, epoch: int, owners: Owners, _held: Codes) -> tuple[Samples, Owners]:
        samples = world.sampler_order(epoch)
        return samples, owners[samples]  # homes also read in the first epoch; only pixels travel

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """Return the seconds of p_0 read-ahead threads, p_0 prep workers, and the transfer of pixels."""
        seconds = fetch_seconds(self.moved_bytes(world, traffic), tiers=world.tiers)
        seconds[..., -1] = self.prep_s(world, traffic)
        global_batch = world.batch * world.workers
        # The last step may be partial.
        full = np.minimum(world.samples - np.arange(world.steps) * global_batch, global_batch) / global_batch
        locality = world.system.training.locality
        share = travelling_share(world.workers, local_batch=world.batch, locality=locality)
        travelling_bytes = world.batch * share * self.staged_bytes(world)
        travel_s = travelling_bytes / world.system.machine.network_bytes_per_s
        seconds[..., world.tiers.pixels] = (full * travel_s)[:, None]
        seconds /= world.system.machine.staging.threads
        return seconds

    def moved_bytes(self, _world: World, traffic: Traffic) -> Floats:
        """Return the bytes that the read-ahead threads move from each tier: float64[H, N, tiers]."""
        return traffic.nbytes

    def prep_s(self, world: World, traffic: Traffic) -> Floats:
        """Return the thread-seconds of prep for each step: float64[H, N]."""
        return write_seconds(traffic.nbytes, machine=world.system.machine)

    def staged_bytes(self, world: World) -> float:
        return world.system.dataset.staged_bytes  # the staging buffer contains prepared samples


class MbaasDecoded(Mbaas):
    name = "mbaas_decoded"
    about = (
        "As mbaas, but the first two classes of a home keep samples decoded or encoded, in the shares with which an "
        "epoch is shortest (a linear programme); what is kept decoded is only transformed."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        plan = form_plan_of(world)
        if plan is None or not plan.decoded:
            yield from super().traffic(world)
            return
        held, decoded = classes_by_form(world, plan)
        for epoch in world.epochs:
            samples = world.sampler_order(epoch)
            homes = world.homes[samples]
            if epoch == 0:
                yield world.from_pfs(samples, workers=homes)
            else:
                # The PFS has no decoded samples, so they are read from the cache even if the PFS is faster.
                tiers = np.where(decoded, held, world.own_tiers(held))
                yield world.traffic(samples, tiers[samples], workers=homes, decoded=decoded[samples])

    def moved_bytes(self, world: World, traffic: Traffic) -> Floats:
        if traffic.decoded is None:
            return traffic.nbytes
        moved = traffic.nbytes - traffic.decoded
        moved[..., 1:] += (
            traffic.decoded[..., 1:] * (world.system.dataset.decoded_bytes or 0) / world.system.dataset.sample_bytes
        )
        return moved  # prep reads decoded samples in memory, the first class, without moving them

    def prep_s(self, world: World, traffic: Traffic) -> Floats:
        machine = world.system.machine
        if traffic.decoded is None:
            return write_seconds(traffic.nbytes, machine=machine)
        encoded_s = write_seconds(traffic.nbytes - traffic.decoded, machine=machine)
        decoded_s_per_byte = machine.write_s_per_byte(speedup=world.system.dataset.decoded_speedup)
        decoded_s: Floats = traffic.decoded.sum(axis=-1) * decoded_s_per_byte
        return encoded_s + decoded_s

    def cores_s(self, world: World, cores: Cores, traffic: Traffic) -> Floats:
        seconds = super().cores_s(world, cores, traffic)
        if traffic.decoded is None:
            return seconds
        decoded_cpu_s = cores.decoded_cpu_s
        if decoded_cpu_s is None:
            decoded_cpu_s = cores.prep_cpu_s / world.system.dataset.decoded_speedup
        saved_s = world.per_core(traffic.decoded.sum(axis=-1)) * (cores.prep_cpu_s - decoded_cpu_s)
        return seconds - self.passes(world) * saved_s

    def remark(self, world: World) -> str | None:
        plan = form_plan_of(world)
        if plan is None:
            return "nothing is said about decoded samples, so none are kept"
        if not plan.decoded:
            return "; ".join(plan.told) or "no room is worth decoded samples"
        return f"{units.percent(plan.decoded)} of the samples are kept decoded"


def form_plan_of(world: World) -> FormPlan | None:
    """Return the plan for each worker's cache; None without a cache, or if the size of decoded samples is unknown.

    The first storage class is the plan's memory, the second its disk.
    """
    dataset, machine, threads = world.system.dataset, world.system.machine, world.system.machine.staging.threads
    if dataset.decoded_bytes is None or not world.classes:
        return None
    memory, *slower = world.classes
    disk = slower[0] if slower else None
    costs = SampleCosts(
        encoded_bytes=dataset.sample_bytes,
        decoded_bytes=dataset.decoded_bytes,
        encoded_s=dataset.sample_bytes * machine.write_s_per_byte(),
        decoded_s=dataset.sample_bytes * machine.write_s_per_byte(speedup=dataset.decoded_speedup),
        # with all threads of all workers reading
        storage_s=dataset.sample_bytes * machine.pfs_s_per_byte(world.tiers.readers) / threads,
        # by all threads of this worker
        disk_bytes_per_s=threads / float(world.tiers.fetch_s_per_byte()[1]) if disk is not None else None,
    )
    return plan_forms(
        costs,
        samples=world.samples / world.workers,
        threads=threads,
        memory_bytes=memory.capacity_bytes,
        disk_bytes=disk.capacity_bytes if disk is not None else 0.0,
    )


def classes_by_form(world: World, plan: FormPlan) -> tuple[Codes, Flags]:
    """Return each sample's class on its home, and whether it is decoded: int8[F + 1], bool[F + 1].

    Every home fills its classes in order.
    """
    held, decoded = np.full(world.samples + 1, NOWHERE, dtype=np.int8), np.zeros(world.samples + 1, dtype=np.bool_)
    for home in range(world.workers):
        mine = np.arange(home, world.samples, world.workers)
        ends, start = np.cumsum(world.sizes[mine], dtype=np.float64), 0
        for number, is_decoded, share in (
            (0, True, plan.memory_decoded),
            (0, False, plan.memory_encoded),
            (1, True, plan.disk_decoded),
            (1, False, plan.disk_encoded),
        ):
            # The plan assumes equally many samples of mean size on each worker. Samples of other sizes fill the same
            # bytes.
            room = share * world.samples / world.workers * world.system.dataset.sample_bytes
            until = (ends[start - 1] if start else 0.0) + room
            stop = int(np.searchsorted(ends, until * (1 + TOLERANCE), side="right"))
            held[mine[start:stop]], decoded[mine[start:stop]] = number, is_decoded
            start = max(start, stop)
        # Classes after the second cache the rest encoded.
        rest = world.admit(world.sizes[mine[start:]], world.classes[2:])
        held[mine[start:]] = np.where(rest == NOWHERE, NOWHERE, rest + np.int8(2))
    return held, decoded
