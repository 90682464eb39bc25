"""Policies by name: the NoPFS paper's in its order, then this project's additions."""

from __future__ import annotations

from mbaas.tools.simulator.policies.base import Minio, Naive, PageCachePolicy, Perfect, Policy, StagingBuffer
from mbaas.tools.simulator.policies.clairvoyant import Lobster, Nopfs
from mbaas.tools.simulator.policies.partitioned import (
    DeepioOptimistic,
    DeepioOrdered,
    LbannDynamic,
    LbannPreload,
    LocalityAware,
    Mbaas,
    MbaasDecoded,
    ParallelStaging,
    PartitionedMinio,
)

POLICIES: dict[str, Policy] = {
    kind.name: kind()
    for kind in (
        Perfect,
        Naive,
        StagingBuffer,
        DeepioOrdered,
        DeepioOptimistic,
        ParallelStaging,
        LbannDynamic,
        LbannPreload,
        LocalityAware,
        Nopfs,
        PageCachePolicy,
        Minio,
        PartitionedMinio,
        Lobster,
        Mbaas,
        MbaasDecoded,
    )
}

__all__ = ["POLICIES", "Policy"]
