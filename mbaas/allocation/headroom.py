"""Decides how many prep workers a feed has if nobody says, and what each reserves, so that trials find room.

Feeds of a cluster share its CPUs but one, which is kept for a trial: each takes half of what those before it left. GPUs
are the trials': a worker that prepares on one reserves nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec import Struct

TRIAL_CPUS = 1
"""CPUs that no default takes: what Ray Tune gives to a trial that asks for nothing else."""

GRAIN = 10_000
"""Ray counts parts of a CPU in ten thousandths."""


class PrepResources(Struct, frozen=True):
    """Prep workers, and the CPUs that each of them reserves: 1, a part of one that it shares with others, or several,
    with a thread on each.
    """

    workers: int
    cpus_per_worker: float = 1.0
    threads: int = 1

    @property
    def cpus(self) -> float:
        """CPUs that all of them reserve together."""
        return self.workers * self.cpus_per_worker


class GpuRoom(Struct, frozen=True, kw_only=True):
    """GPUs on which a feed may prepare.

    Attributes:
        count: how many there are.
        workers: that may share each.
        cpus: of a node that has GPUs, for each of these.
    """

    count: int
    workers: int
    cpus: float


def default_prep(
    *, cpus: float, claimed_cpus: float = 0.0, gpus: GpuRoom | None = None, also_on_cpus: bool = False
) -> PrepResources:
    """Return the prep workers of a feed of which nobody said how many it is to have.

    Args:
        cpus: of the whole cluster.
        claimed_cpus: those that the workers of other feeds reserve.
        gpus: on which the feed prepares; None: it prepares on CPUs.
        also_on_cpus: whether workers on GPUs prepare on CPUs, too.

    Example:
        Of 8 CPUs a first feed takes half of 7, rounded up: 4. A second one takes half of 3, that is 2, a third one half
        of 1: one worker that reserves half a CPU. 1.5 CPUs are left to trials. Of 2 CPUs the first feed takes half of
        one, and the second a quarter.
    """
    half = (cpus - claimed_cpus - TRIAL_CPUS) / 2
    if half < 1:
        # A worker that reserves a part of a CPU, or nothing, may use as much of it as one that reserves all: it only
        # has others beside it, which is better than a search that never starts.
        return PrepResources(1, max(0, math.floor(half * GRAIN)) / GRAIN)
    workers = math.ceil(half)
    if gpus is None:
        return PrepResources(workers)
    # The CPUs of nodes without a GPU are of no use to them. Those with one keep half of theirs for trials.
    room = max(1, math.floor(gpus.cpus / 2))
    per_gpu = min(gpus.workers, room)
    few = max(1, min(workers, gpus.count * per_gpu))
    each = max(1, min(workers // few, room // per_gpu)) if also_on_cpus else 1
    return PrepResources(few, each, threads=each)


def node_for_part(part: float, free_cpus: Mapping[str, float]) -> str | None:
    """Return the node for a worker that reserves a part of a CPU: one where a CPU is shared already, and has room.

    Parts of feeds on several nodes would else leave none of them a whole CPU for a trial, though together they do.

    Args:
        part: of a CPU, in [0, 1).
        free_cpus: node -> CPUs that nobody has reserved there.

    Returns:
        The node whose shared CPU the worker fills best; None if no CPU is shared yet, or none has room.
    """
    rests = {node: round(free % 1 * GRAIN) for node, free in free_cpus.items()}
    fitting = [(rest, node) for node, rest in rests.items() if rest and rest >= round(part * GRAIN) > 0]
    return min(fitting, default=(0, None))[1]
