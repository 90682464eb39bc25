"""Default number of prep workers of a feed and their CPU reservations, which leave room for trials.

The feeds of a cluster share all CPUs but one, which is left for a trial. Each feed takes half of the CPUs left by
earlier ones. GPUs belong to trials: a worker that prepares on a GPU reserves no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

TRIAL_CPUS = 1
"""CPUs left free by every default: Ray Tune's default for a trial."""

GRAIN = 10_000
"""Ray counts fractions of a CPU in ten-thousandths."""


class PrepResources(Struct, frozen=True):
    """Prep workers and the CPUs that each reserves: 1, a shared fraction of one, or several with one thread each."""

    workers: int
    cpus_per_worker: float = 1.0
    threads: int = 1

    @property
    def cpus(self) -> float:
        """CPUs reserved by all workers together."""
        return self.workers * self.cpus_per_worker


class GpuRoom(Struct, frozen=True, kw_only=True):
    """GPUs available for prep: their number, workers that may share one, and CPUs per GPU on nodes with GPUs."""

    count: int
    workers: int
    cpus: float


def default_prep(
    *, cpus: float, claimed_cpus: float = 0.0, gpus: GpuRoom | None = None, also_on_cpus: bool = False
) -> PrepResources:
    """Return the default prep workers of a feed, given the CPUs of the cluster and those claimed by other feeds.

    With ``gpus``, workers prepare on GPUs, and with ``also_on_cpus`` on CPUs as well.

    Example:
        On 8 CPUs, the first feed takes half of 7, rounded up: 4. The second takes half of 3, rounded up: 2. The third
        takes half of 1: one worker that reserves half a CPU. 1.5 CPUs are left to trials. On 2 CPUs, the first feed
        takes half a CPU and the second a quarter.
    """
    half = (cpus - claimed_cpus - TRIAL_CPUS) / 2
    if half < 1:
        # A worker with a fractional reservation, or none, may still use a whole CPU. It competes with others for the
        # CPU, which is better than a search that never starts.
        return PrepResources(1, max(0, math.floor(half * GRAIN)) / GRAIN)
    workers = math.ceil(half)
    if gpus is None:
        return PrepResources(workers)
    # CPUs of nodes without a GPU are useless to GPU workers. Nodes with GPUs keep half of their CPUs for trials.
    room = max(1, math.floor(gpus.cpus / 2))
    per_gpu = min(gpus.workers, room)
    few = max(1, min(workers, gpus.count * per_gpu))
    each = max(1, min(workers // few, room // per_gpu)) if also_on_cpus else 1
    return PrepResources(few, each, threads=each)


def node_for_part(part: float, free_cpus: Mapping[str, float]) -> str | None:
    """Return the node whose shared CPU the worker fills best; None if no CPU is shared yet, or none has room.

    Otherwise the fractions of several feeds, spread over nodes, could leave no node a whole CPU for a trial. ``part``
    is the fraction of a CPU that the worker reserves, in [0, 1), and ``free_cpus`` the unreserved CPUs by node.
    """
    rests = {node: round(free % 1 * GRAIN) for node, free in free_cpus.items()}
    fitting = [(rest, node) for node, rest in rests.items() if rest and rest >= round(part * GRAIN) > 0]
    return min(fitting, default=(0, None))[1]
