"""The cache: raw samples in the object store, read from storage once.

`CacheNode` is the actor, one to a machine; `CacheReader` (or `SlabViews` alone) is how a process of that
machine reads from it. `Planner` decides, and knows nothing of Ray, clocks or threads.
"""

from mbaas.cache.directory import PLACE, Directory, Places
from mbaas.cache.node import CacheNode
from mbaas.cache.planner import Planner
from mbaas.cache.policy import MinIO
from mbaas.cache.reader import CacheReader, Fetched, Held, SlabViews
from mbaas.cache.slab import Load, Rows
from mbaas.cache.stats import CacheStats, EpochCounts

__all__ = [
    "PLACE",
    "CacheNode",
    "CacheReader",
    "CacheStats",
    "Directory",
    "EpochCounts",
    "Fetched",
    "Held",
    "Load",
    "MinIO",
    "Places",
    "Planner",
    "Rows",
    "SlabViews",
]
