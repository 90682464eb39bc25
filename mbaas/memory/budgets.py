"""Memory budgets for a feed's cache and prepared minibatches, within each node's object store.

Ray does not reject objects, it spills them to disk; so budgets are fixed before any object is created.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mbaas.base.units import percent, size
from mbaas.errors import ConfigError

STORE_SHARE = 0.7
"""Fraction of a node's object store for caches, staging and copies in use together; Ray spills at 0.8."""

MAX_SAMPLE_BYTES = 2**30
"""Upper bound on the bytes of an encoded sample. The largest image that is prepared, 100 million pixels, takes 800 MB
even uncompressed with four channels of 16 bits. A larger file is damaged, sparse, or an attack."""

DEFAULT_STAGING_SHARE = 0.15
"""Upper bound of the default staging budget, as a fraction of the smallest object store."""


@dataclass(frozen=True)
class MemoryClaim:
    """A feed's claim on each node's object store, in bytes.

    Attributes:
        cache_bytes: upper bound on cached samples; less if the store is too small.
        staging_bytes: for prepared minibatches, which may be stored on any node.
    """

    cache_bytes: int
    staging_bytes: int


def free_bytes(store_bytes: int, claims: Iterable[MemoryClaim]) -> int:
    """Return the bytes of an object store that feeds leave free, below 0 if their staging does not fit; ``claims`` in
    starting order.
    """
    free = int(store_bytes * STORE_SHARE)
    # In starting order: each feed computes this separately, and all must get the same sizes.
    for claim in claims:
        free -= claim.staging_bytes
        # Staging first and in full, the cache from the rest: prep cannot work without staging, and a small cache is
        # only slower.
        free -= max(0, min(claim.cache_bytes, free))
    return free


def cache_budget(store_bytes: int, claim: MemoryClaim, earlier: Iterable[MemoryClaim]) -> int:
    """Return the bytes of a feed's cache on a node: its claim, or less if earlier feeds leave less."""
    return max(0, min(claim.cache_bytes, free_bytes(store_bytes, earlier) - claim.staging_bytes))


def staging_room(store_bytes: int, earlier: Iterable[MemoryClaim]) -> int:
    """Return the bytes on a node that earlier feeds leave for this feed's prepared minibatches.

    A node added after the start may have less than all of its staging. Nothing is prepared there while other nodes can
    (`mbaas.core.cluster.homes`), because Ray would spill it.
    """
    return max(0, free_bytes(store_bytes, earlier))


def largest_sample(stores: Collection[int]) -> int:
    """Return the upper bound on an encoded sample in bytes: the unbudgeted part of the smallest store of a preparing
    node.

    One number for all nodes, because the node that reads a sample must not decide whether it is bad.
    """
    return min(MAX_SAMPLE_BYTES, round((1 - STORE_SHARE) * min(stores, default=0)))


def default_cache(dataset_bytes: int, free: int, *, grows: bool) -> int:
    """Return the default cache budget; with decoded samples (``grows``), the upper bound for `sized_cache`.

    ``free`` bytes are available next to the feed's staging.
    """
    needed = max(0, min(dataset_bytes, free))
    # Later feeds get the other half: encoded samples in memory save more time per byte than decoded ones.
    return max(needed, free // 2) if grows else needed


def sized_cache(default: int, encoded_bytes: float, decoded_bytes: float) -> int:
    """Return the cache budget from the measured sizes of all samples: encoded, and decoded (0 if none are)."""
    return math.ceil(min(default, max(encoded_bytes, decoded_bytes)))


def default_staging(store_bytes: int, wanted: int) -> int:
    """Return the default staging budget in bytes.

    Args:
        store_bytes: of the smallest object store.
        wanted: see `mbaas.core.layout.wanted_staging`.
    """
    return min(wanted, int(store_bytes * DEFAULT_STAGING_SHARE))


def memory_budgets(
    *,
    cache_bytes: int | None,
    staging_bytes: int | None,
    wanted_staging: int,
    dataset_bytes: int,
    grows: bool,
    stores: Collection[int],
    smallest_store: int,
    earlier: Sequence[MemoryClaim],
) -> tuple[int, int]:
    """Return the budgets of cache and staging, with defaults filled in; both in bytes, on each node.

    Staging must fit on every node that prepares. The cache must fit on the largest; `cache_budget` reduces it on
    others.

    Args:
        cache_bytes, staging_bytes: the user's values, or None.
        stores: bytes of the object stores of the nodes that may prepare.
        smallest_store: of the whole cluster: consumers also read on nodes that do not prepare.
        earlier: claims of the running feeds, the oldest first.

    Raises:
        ConfigError: the user's values and the other feeds together exceed `STORE_SHARE` of the object stores.
    """
    smallest, largest = min(stores, default=0), max(stores, default=0)
    staging = staging_bytes
    if staging is None:
        free = free_bytes(smallest, earlier)
        # At least 1, the option's lower bound; the fit is checked below.
        staging = max(1, min(default_staging(smallest_store, wanted_staging), free))
    cache = cache_bytes
    if cache is None:
        cache = default_cache(dataset_bytes, free_bytes(largest, earlier) - staging, grows=grows)
    named = f"staging_bytes ({size(staging)})"
    _check_fits(f"cache_bytes ({size(cache)}) and {named} must together", cache + staging, largest, earlier)
    _check_fits(f"{named} must", staging, smallest, earlier)
    return cache, staging


def _check_fits(what: str, nbytes: int, store: int, earlier: Sequence[MemoryClaim]) -> None:
    free = free_bytes(store, earlier)
    if nbytes > free:
        others = int(store * STORE_SHARE) - free
        raise ConfigError(
            f"{what} stay within {size(max(0, free))}: {percent(STORE_SHARE)} of a node's object store "
            f"({size(store)}) less {size(others)} of other feeds"
        )
