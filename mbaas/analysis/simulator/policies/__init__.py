"""The policies, by name, in the order of the paper; then those that this project adds."""

from __future__ import annotations

from mbaas.analysis.simulator.policies.base import Policy
from mbaas.analysis.simulator.policies.direct import Naive, Perfect, StagingBuffer
from mbaas.analysis.simulator.policies.lobster import Lobster
from mbaas.analysis.simulator.policies.locality import LocalityAware
from mbaas.analysis.simulator.policies.nopfs import Nopfs
from mbaas.analysis.simulator.policies.partitioned import DeepioOrdered, LbannDynamic, LbannPreload, PartitionedMinio
from mbaas.analysis.simulator.policies.private import LruPolicy, Minio
from mbaas.analysis.simulator.policies.service import Mbaas
from mbaas.analysis.simulator.policies.sharded import DeepioOptimistic, ParallelStaging

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
        LruPolicy,
        Minio,
        PartitionedMinio,
        Lobster,
        Mbaas,
    )
}

__all__ = ["POLICIES", "Policy"]
