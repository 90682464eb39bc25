"""Policies that change the order: a worker trains on the samples that it holds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from mbaas.allocation.bandwidth import StorageClass
from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.policies.partitioned import classes_at_home, preload_s
from mbaas.analysis.simulator.world import Traffic, World


class Sharded(Policy):
    """Each worker sweeps its own part of the dataset; what its classes do not hold comes from the PFS."""

    preloads: ClassVar[bool] = False

    @abstractmethod
    def classes(self, world: World) -> Sequence[StorageClass]:
        """That hold samples."""

    def traffic(self, world: World) -> Iterator[Traffic]:
        held = classes_at_home(world, self.classes(world))
        for epoch in range(world.system.training.epochs):
            samples = world.by_home(epoch)
            if epoch == 0 and not self.preloads:
                yield world.from_pfs(samples)
            else:
                yield world.traffic(samples, world.own_places(held[samples]))

    def remark(self, world: World) -> str | None:
        return "samples are shuffled within a worker only" if world.workers > 1 else None


class DeepioOptimistic(Sharded):
    name = "deepio_optimistic"
    source = (
        "DeepIO's opportunistic mode as NoPFS simulates it: as deepio_ordered, but a worker changes the order to train "
        "on what its own memory holds."
    )

    def classes(self, world: World) -> Sequence[StorageClass]:
        return world.classes[:1]


class ParallelStaging(Sharded):
    name = "parallel_staging"
    source = (
        "Sharding: before training starts each worker copies a part of the dataset to its own storage, and trains on "
        "that part alone (NoPFS)."
    )
    preloads = True

    def classes(self, world: World) -> Sequence[StorageClass]:
        return world.classes

    def preload_s(self, world: World) -> float:
        return preload_s(world, world.classes)
