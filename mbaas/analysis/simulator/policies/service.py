"""This project: one service for all trials."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mbaas.analysis.simulator.model import Floats, fetch_seconds, write_seconds
from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.policies.partitioned import classes_at_home
from mbaas.analysis.simulator.world import Traffic, World


class Mbaas(Policy):
    name = "mbaas"
    source = (
        "mbaas: each minibatch is fetched and prepared once for all trials; each sample by its home, from its home's "
        "MinIO cache, and only pixels travel (coordinated prep and partitioned cache of CoorDL, VLDB 2021)."
    )
    shares = True
    overlaps = True

    def traffic(self, world: World) -> Iterator[Traffic]:
        held = classes_at_home(world, world.classes)
        for epoch in range(world.system.training.epochs):
            samples = world.dealt(epoch)
            homes = world.homes[samples]
            if epoch == 0:
                yield world.from_pfs(samples, workers=homes)
            else:
                yield world.traffic(samples, world.own_places(held[samples]), workers=homes)

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """A cache node's p_0 threads read ahead, p_0 workers prepare; then pixels come from other homes, on average."""
        seconds = fetch_seconds(traffic.nbytes, places=world.places)
        seconds[..., -1] = write_seconds(traffic.nbytes, machine=world.system.machine)
        global_batch = world.batch * world.workers
        full = np.minimum(world.samples - np.arange(world.steps) * global_batch, global_batch) / global_batch
        travelling_bytes = world.batch * (world.workers - 1) / world.workers * self.staged_bytes(world)
        travel_s = travelling_bytes / world.system.machine.network_bytes_per_s
        seconds[..., world.places.pixels] = (full * travel_s)[:, None]
        seconds /= world.system.machine.staging.threads
        return seconds

    def staged_bytes(self, world: World) -> float:
        return world.system.dataset.staged_bytes
