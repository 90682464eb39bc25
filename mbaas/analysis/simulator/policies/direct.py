"""Policies without a cache."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mbaas.analysis.simulator.load import Load
from mbaas.analysis.simulator.model import Floats, write_seconds
from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.world import Traffic, World


class Perfect(Policy):
    name = "perfect"
    source = "Every minibatch is there before it is needed: training alone, the lower bound of all others (NoPFS)."

    def traffic(self, world: World) -> Iterator[Traffic]:
        for epoch in range(world.system.training.epochs):
            samples = world.dealt(epoch)
            yield world.traffic(samples, np.full(len(samples), world.places.staged, dtype=np.int8))

    def cores_s(self, _world: World, _load: Load, traffic: Traffic) -> Floats:
        """Nothing has to be made or handed over."""
        return np.zeros(traffic.nbytes.shape[:2])


class Naive(Policy):
    name = "naive"
    source = "One thread per trial reads from the PFS when training asks, and training waits (NoPFS)."
    prefetches = False

    def traffic(self, world: World) -> Iterator[Traffic]:
        for epoch in range(world.system.training.epochs):
            yield world.from_pfs(world.dealt(epoch))

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """A thread per trial, as far as there are threads; trials beyond that wait for each other."""
        machine, training = world.system.machine, world.system.training
        threads = min(training.trials, machine.staging.threads)
        seconds = traffic.nbytes * machine.pfs_s_per_byte(training.workers * threads)
        seconds[..., -1] = write_seconds(traffic.nbytes, machine=machine)
        seconds *= training.trials / threads
        return seconds


class StagingBuffer(Policy):
    name = "staging_buffer"
    source = "Threads read from the PFS in access order, ahead of training by what the staging buffer holds (NoPFS)."

    def traffic(self, world: World) -> Iterator[Traffic]:
        for epoch in range(world.system.training.epochs):
            yield world.from_pfs(world.dealt(epoch))
