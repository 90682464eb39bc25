"""What a policy is: from where it reads each sample, with which threads, how far ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from mbaas.analysis.simulator.load import Load
from mbaas.analysis.simulator.model import Floats, fetch_seconds, write_seconds
from mbaas.analysis.simulator.world import Traffic, World


class Policy(ABC):
    """A way to load data.

    Attributes:
        name: in files, commands and results.
        source: one sentence that says what it does, and where it is from.
        shares: trials share one sweep; otherwise each reads and prepares for itself, with the same threads.
        prefetches: reads while training goes on.
        overlaps: other threads prepare than fetch; otherwise each thread does both for its sample.
    """

    name: ClassVar[str]
    source: ClassVar[str]
    shares: ClassVar[bool] = False
    prefetches: ClassVar[bool] = True
    overlaps: ClassVar[bool] = False

    @abstractmethod
    def traffic(self, world: World) -> Iterator[Traffic]:
        """What is read, epoch by epoch."""

    def read_s(self, world: World, traffic: Traffic) -> Floats:
        """Seconds by step, worker and place that reading for the step takes: float64[H, N, places].

        The last place is preparing and writing to the staging buffer. Here p_0 threads read samples side by side, and
        every trial needs them for its own sweep.
        """
        machine = world.system.machine
        write_s = write_seconds(traffic.nbytes, machine=machine)
        seconds = fetch_seconds(traffic.nbytes, places=world.places, other_s=float(write_s.sum()))
        seconds[..., -1] = write_s
        seconds *= self.sweeps(world) / machine.staging.threads
        return seconds

    def cores_s(self, world: World, load: Load, traffic: Traffic) -> Floats:
        """Seconds by step and worker that all cores of the worker's machine need for the step: float64[H, N].

        Where reading goes on beside training they have both to do.
        """
        making_s = self.sweeps(world) * load.making_s(traffic.nbytes, places=world.places)
        taking_s = load.delivering_s(traffic.nbytes)
        if self.prefetches:
            taking_s = taking_s + load.training_s(traffic.nbytes)
        return making_s + taking_s[:, None]

    def sweeps(self, world: World) -> int:
        """How often a worker reads and prepares what one trial sees."""
        return 1 if self.shares else world.system.training.trials

    def ahead(self, world: World) -> int:
        """Minibatches of a trial that the staging buffer holds, at least one."""
        system = world.system
        most = system.training.epochs * system.steps
        minibatch_bytes = self.staged_bytes(world) * system.training.batch * self.sweeps(world)
        return max(1, int(min(system.machine.staging.capacity_bytes / minibatch_bytes, most)))

    def staged_bytes(self, world: World) -> float:
        """Of a sample in the staging buffer."""
        return world.system.dataset.sample_bytes

    def preload_s(self, _world: World) -> float:
        """Seconds that the slowest worker reads from the PFS before training starts."""
        return 0.0

    def remark(self, _world: World) -> str | None:
        """A clause on what the result leaves open, where there is something."""
        return None
