"""Policies in which each sample is cached on one worker, and whoever needs it asks there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np

from mbaas.allocation.bandwidth import StorageClass
from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.world import NOWHERE, Codes, Owners, Traffic, World


def classes_at_home(world: World, classes: Sequence[StorageClass]) -> Codes:
    """The class in which the home of each sample has it, int8[F + 1].

    A home admits its samples until it is full; which come first is chance, and here it is the lower ids.
    """
    held = np.full(world.samples + 1, NOWHERE, dtype=np.int8)
    for home in range(world.workers):
        held[home : world.samples : world.workers] = world.placed(
            world.sizes[home : world.samples : world.workers], classes
        )
    return held


def classes_at_first_readers(world: World, classes: Sequence[StorageClass]) -> Codes:
    """The class in which the worker that reads a sample in the first epoch keeps it, int8[F + 1]."""
    held = np.full(world.samples + 1, NOWHERE, dtype=np.int8)
    for worker in range(world.workers):
        samples = world.dealt(0)[worker :: world.workers]
        held[samples] = world.placed(world.sizes[samples], classes)
    held[world.samples] = NOWHERE
    return held


class Partitioned(Policy):
    """The first epoch reads from the PFS, the others from the owner's memory what fits there."""

    preloads = False

    @abstractmethod
    def classes(self, world: World) -> Sequence[StorageClass]:
        """That hold samples."""

    @abstractmethod
    def owned(self, world: World) -> tuple[Owners, Codes]:
        """Who may hold each sample, and in which class it is held."""

    def traffic(self, world: World) -> Iterator[Traffic]:
        owners, held = self.owned(world)
        for epoch in range(world.system.training.epochs):
            samples = world.dealt(epoch)
            if epoch == 0 and not self.preloads:
                yield world.from_pfs(samples)
            else:
                yield world.traffic(samples, world.shared_places(held[samples], owners[samples] == world.turn))


class AtHome(Partitioned):
    """Samples are spread evenly over the workers before anything is read."""

    def owned(self, world: World) -> tuple[Owners, Codes]:
        return world.homes, classes_at_home(world, self.classes(world))


class FirstClassOnly(Partitioned):
    """Caches in memory alone: in the first storage class."""

    def classes(self, world: World) -> Sequence[StorageClass]:
        return world.classes[:1]


class DeepioOrdered(AtHome, FirstClassOnly):
    name = "deepio_ordered"
    source = (
        "DeepIO (MASCOTS 2018) as NoPFS simulates it: each worker's memory holds a part of the dataset, and samples "
        "come from there in the given order."
    )


class LbannDynamic(FirstClassOnly):
    name = "lbann_dynamic"
    source = (
        "LBANN's data store, dynamic mode, as NoPFS simulates it: who reads a sample first keeps it in memory, and "
        "gives it to the others from then on."
    )

    def owned(self, world: World) -> tuple[Owners, Codes]:
        return world.readers(0), classes_at_first_readers(world, self.classes(world))

    def remark(self, world: World) -> str | None:
        return _memory_remark(world)


class LbannPreload(AtHome, FirstClassOnly):
    name = "lbann_preload"
    source = "LBANN's data store, preloading mode: each worker reads its part into memory before training starts."
    preloads = True

    def preload_s(self, world: World) -> float:
        return preload_s(world, self.classes(world))

    def remark(self, world: World) -> str | None:
        return _memory_remark(world)


class PartitionedMinio(AtHome):
    name = "partitioned_minio"
    source = (
        "CoorDL's partitioned cache (VLDB 2021): each worker owns a part of the dataset and caches it as it is first "
        "read, never evicts, and gives it to the others."
    )

    def classes(self, world: World) -> Sequence[StorageClass]:
        return world.classes


def preload_s(world: World, classes: Sequence[StorageClass]) -> float:
    """Seconds in which every worker, with all its threads, reads what its classes hold from the PFS."""
    held = classes_at_home(world, classes) != NOWHERE
    nbytes = np.bincount(world.homes[held], weights=world.sizes[held], minlength=world.workers)
    machine = world.system.machine
    return float(nbytes.max() * machine.pfs_s_per_byte(world.places.readers) / machine.staging.threads)


def _memory_remark(world: World) -> str | None:
    room_bytes = world.workers * sum(each.capacity_bytes for each in world.classes[:1])
    nbytes = world.system.dataset.nbytes
    if nbytes <= room_bytes:
        return None
    return (
        f"LBANN itself needs the dataset ({nbytes / 1e9:.4g} GB) to fit the memory of all workers "
        f"({room_bytes / 1e9:.4g} GB); here the rest comes from the PFS"
    )
