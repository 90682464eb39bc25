"""Which dataset is kept in memory, which on local disks, and how much of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mbaas.analysis.plan.jobs import Samples


@dataclass(frozen=True)
class Kept:
    """Bytes of a dataset that each node keeps, and the shares of the dataset that all nodes keep together."""

    memory_bytes: int
    disk_bytes: int
    memory_share: float
    disk_share: float

    @property
    def stored_share(self) -> float:
        """What has to come from storage in every epoch."""
        return max(0.0, 1 - self.memory_share - self.disk_share)


def place(
    datasets: Sequence[tuple[Samples, float]], *, nodes: int, memory_bytes: int, disk_bytes: int
) -> dict[str, Kept]:
    """Fills memory, then disks, with the datasets whose bytes are read most often.

    A byte that is kept saves one byte from storage in every epoch of every job, so it is worth the epochs per second
    of its dataset: all jobs on it together, for they share what is kept. All bytes of a dataset are worth the same.
    Filling the faster place with the more valuable bytes saves most (greedy is optimal where parts of a dataset can be
    kept, as here). Each node keeps its part of a dataset, 1 / ``nodes``.

    Args:
        datasets: each with the epochs per second that jobs would make over it if fetch were no limit.
        memory_bytes, disk_bytes: of a node.

    Returns:
        By name of the dataset.
    """
    kept = {}
    for dataset, _ in sorted(datasets, key=lambda pair: -pair[1]):
        part_bytes = math.ceil(dataset.dataset_bytes / nodes)
        in_memory = min(part_bytes, memory_bytes)
        on_disk = min(part_bytes - in_memory, disk_bytes)
        memory_bytes, disk_bytes = memory_bytes - in_memory, disk_bytes - on_disk
        memory_share = min(1.0, in_memory * nodes / dataset.dataset_bytes)
        disk_share = min(1 - memory_share, on_disk * nodes / dataset.dataset_bytes)
        kept[dataset.name] = Kept(in_memory, on_disk, memory_share, disk_share)
    return kept


def even_shares(needs: Mapping[str, float], capacity: float) -> dict[str, float]:
    """Shares a capacity: everybody gets what it needs if that fits, and what is left in proportion to the needs.

    Otherwise small needs are met, and the others get the same each (max-min fairness: nobody can get more without
    somebody with less losing some).
    """
    whole = sum(needs.values())
    if 0 < whole <= capacity:
        return {name: need * (capacity / whole) for name, need in needs.items()}
    shares: dict[str, float] = {}
    for left, (name, need) in zip(
        range(len(needs), 0, -1), sorted(needs.items(), key=lambda item: item[1]), strict=True
    ):
        shares[name] = min(need, capacity / left)
        capacity -= shares[name]
    return shares
