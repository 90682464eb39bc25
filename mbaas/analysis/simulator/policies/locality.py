"""Locality-aware loading."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.policies.partitioned import classes_at_first_readers
from mbaas.analysis.simulator.world import NOWHERE, Owners, Traffic, World


class LocalityAware(Policy):
    name = "locality_aware"
    source = (
        "Locality-aware loading (2019): from every global minibatch each worker takes the samples it has cached; only "
        "what evens out their numbers travels."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        owners, held = world.readers(0), classes_at_first_readers(world, world.classes)
        yield world.from_pfs(world.dealt(0))
        for epoch in range(1, world.system.training.epochs):
            samples = world.dealt(epoch)
            owned = np.where(held[samples] == NOWHERE, np.uint16(0), owners[samples] + np.uint16(1))
            workers = assigned(owned.reshape(world.steps, -1), world)
            places = world.shared_places(held[samples], owners[samples] == workers)
            yield world.traffic(samples, places, workers=workers)


def assigned(owned: Owners, world: World) -> Owners:
    """The worker that takes each sample of each global minibatch: uint16[H B N].

    A worker keeps as many of its own as its minibatch holds. Samples that nobody holds fill what workers lack, then
    what others have too much of.

    Args:
        owned: uint16[H, B N], the owner of each sample, from 1; 0 where nobody holds it.
        world: for N and B.
    """
    workers, batch = world.workers, world.batch
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
    takers = np.where(moves, np.uint16(0), owner - np.uint16(1))
    lacks = batch - np.minimum(groups[:, 1:], batch)
    takers[moves] = np.repeat(np.tile(np.arange(workers, dtype=np.uint16), len(owned)), lacks.reshape(-1))
    result: Owners = np.empty_like(takers)
    np.put_along_axis(result, sorting.astype(np.intp), takers, axis=1)
    return result.reshape(-1)
