"""What a policy is, and the policies without a cache.

A policy says from where each sample is read, with which threads, and how far ahead.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from mbaas.analysis.simulator.model import Floats, Load, fetch_seconds, write_seconds
from mbaas.analysis.simulator.world import Traffic, World


class Policy(ABC):
    """A way to load data.

    Attributes:
        name: in files, commands and results.
        about: one sentence that says what it does, and where it is from.
        is_shared: trials share one pass over the data; otherwise each reads and prepares for itself, with the same
            threads.
        prefetches: reads while training goes on.
        overlaps: other threads prepare than fetch; otherwise each thread does both for its sample.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    is_shared: ClassVar[bool] = False
    prefetches: ClassVar[bool] = True
    overlaps: ClassVar[bool] = False

    @abstractmethod
    def traffic(self, world: World) -> Iterator[Traffic]:
        """Say what is read, epoch by epoch."""

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """Return the seconds that reading for a step takes, by step, worker and tier: float64[H, N, tiers].

        The last tier is preparing and writing to the staging buffer. Here p_0 threads read samples side by side, and
        every trial needs them for its own pass over the data.
        """
        machine = world.system.machine
        write_s = write_seconds(traffic.nbytes, machine=machine)
        # a thread that prepares does not ask the PFS for anything meanwhile
        seconds = fetch_seconds(traffic.nbytes, tiers=world.tiers, other_s=float(write_s.sum()))
        seconds[..., -1] = write_s  # the tier `staged`, where nothing is fetched
        seconds *= self.passes(world) / machine.staging.threads
        return seconds

    def cores_s(self, world: World, load: Load, traffic: Traffic) -> Floats:
        """Return the seconds that all cores of a worker's machine need for a step: float64[H, N].

        Where reading goes on beside training they have both to do.
        """
        making_s = self.passes(world) * load.making_s(traffic.nbytes, tiers=world.tiers)
        taking_s = load.delivering_s(traffic.nbytes)
        if self.prefetches:  # otherwise training follows reading, and `simulate` counts it by itself
            taking_s = taking_s + load.training_s(traffic.nbytes)
        return making_s + taking_s[:, None]

    def passes(self, world: World) -> int:
        """Return how often a worker reads and prepares what one trial sees."""
        return 1 if self.is_shared else world.system.training.trials

    def ahead(self, world: World) -> int:
        """Return how many minibatches of a trial the staging buffer holds, at least one."""
        system = world.system
        # a buffer without limit holds all minibatches that there are; infinity is no number of them
        most = system.training.epochs * system.steps
        minibatch_bytes = self.staged_bytes(world) * system.training.batch * self.passes(world)
        return max(1, int(min(system.machine.staging.capacity_bytes / minibatch_bytes, most)))

    def staged_bytes(self, world: World) -> float:
        """Return the size of a sample in the staging buffer."""
        # as in the paper, whose samples are as large prepared as raw: only policies of this project stage pixels
        return world.system.dataset.sample_bytes

    def preload_s(self, _world: World) -> float:
        """Return the seconds that the slowest worker reads from the PFS before training starts."""
        return 0.0

    def remark(self, _world: World) -> str | None:
        """Say in a clause what the result leaves open, where there is something."""
        return None


class Perfect(Policy):
    name = "perfect"
    about = "Every minibatch is there before it is needed: training alone, the lower bound of all others (NoPFS)."

    def traffic(self, world: World) -> Iterator[Traffic]:
        for epoch in world.epochs:
            samples = world.dealt(epoch)
            yield world.traffic(samples, np.full(len(samples), world.tiers.staged, dtype=np.int8))

    def cores_s(self, _world: World, _load: Load, traffic: Traffic) -> Floats:
        """Return nothing: no minibatch has to be made or handed over."""
        return np.zeros(traffic.nbytes.shape[:2])


class StagingBuffer(Policy):
    name = "staging_buffer"
    about = "Threads read from the PFS in access order, ahead of training by what the staging buffer holds (NoPFS)."

    def traffic(self, world: World) -> Iterator[Traffic]:
        return (world.from_pfs(world.dealt(epoch)) for epoch in world.epochs)


class Naive(StagingBuffer):
    name = "naive"
    about = "One thread per trial reads from the PFS when training asks, and training waits (NoPFS)."
    prefetches = False

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """Return the seconds of a thread per trial, as far as there are threads; more trials wait for each other."""
        machine, training = world.system.machine, world.system.training
        # the PFS sees one reader for each trial of each worker, no others: nobody reads ahead
        threads = min(training.trials, machine.staging.threads)
        seconds = traffic.nbytes * machine.pfs_s_per_byte(training.workers * threads)
        seconds[..., -1] = write_seconds(traffic.nbytes, machine=machine)
        seconds *= training.trials / threads
        return seconds
