"""Grants memory: what the cache and the prepared minibatches of a feed may take of each node's object store.

Ray refuses no object, it spills: so what may be used is granted before anything is made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from mbaas.errors import ConfigError
from mbaas.units import percent, size

STORE_SHARE = 0.7
"""The share of a node's object store below which caches, staging and copies in use stay together; Ray spills at 0.8."""

MAX_SAMPLE_BYTES = 2**30
"""The most bytes of an encoded sample. An image of the most pixels that are prepared, 100 million, takes 800 MB even if
it is not compressed and has 16 bits in each of four channels: a file of more is damaged, sparse, or an attack.
"""

DEFAULT_STAGING_SHARE = 0.15
"""The most that the default staging budget takes of the smallest object store."""


@dataclass(frozen=True)
class MemoryClaim:
    """What a feed may take of a node's object store, in bytes.

    Attributes:
        cache_bytes: the most for samples in caches; less where the store is too small for that.
        staging_bytes: for prepared minibatches, which may lie on any node.
    """

    cache_bytes: int
    staging_bytes: int


def free_bytes(store_bytes: int, claims: Iterable[MemoryClaim]) -> int:
    """Return what feeds leave of a node's object store; below 0 if even their staging does not fit.

    Args:
        store_bytes: of the node.
        claims: of the feeds, in the order in which they came.
    """
    free = int(store_bytes * STORE_SHARE)
    # In the order in which feeds came: each computes this by itself, and all must come to the same sizes.
    for claim in claims:
        free -= claim.staging_bytes
        # Staging first and whole, the cache from the rest: prep cannot work without staging, and a small cache is only
        # slower.
        free -= max(0, min(claim.cache_bytes, free))
    return free


def cache_budget(store_bytes: int, claim: MemoryClaim, earlier: Iterable[MemoryClaim]) -> int:
    """Return the bytes that a feed's cache may have on a node: what it claims, as far as those before it leave that."""
    return max(0, min(claim.cache_bytes, free_bytes(store_bytes, earlier) - claim.staging_bytes))


def staging_room(store_bytes: int, earlier: Iterable[MemoryClaim]) -> int:
    """Return the bytes that a node's object store has room for of a feed's prepared minibatches, beside earlier feeds.

    Nodes that were there when the feed was served have room for all of its staging. One that came later may have less:
    then nothing may be prepared there while others can (`mbaas.core.homes`), or Ray would spill it.
    """
    return max(0, free_bytes(store_bytes, earlier))


def largest_sample(stores: Collection[int]) -> int:
    """Return the most bytes that an encoded sample may have: what the smallest store leaves beside the budgets.

    One number for all nodes: which samples are bad must not depend on the node that reads them.

    Args:
        stores: bytes of the object stores of the nodes that may prepare.
    """
    return min(MAX_SAMPLE_BYTES, round((1 - STORE_SHARE) * min(stores, default=0)))


def default_cache(dataset_bytes: int, free: int, *, grows: bool) -> int:
    """Return the default budget of the cache: with decoded samples, the bound of what `sized_cache` returns.

    Args:
        dataset_bytes: bytes of all encoded samples.
        free: bytes available next to the feed's staging.
        grows: whether samples may be kept decoded, which takes more room.
    """
    needed = max(0, min(dataset_bytes, free))
    # Later feeds get the other half: encoded samples in memory save more time per byte than decoded ones.
    return max(needed, free // 2) if grows else needed


def sized_cache(default: int, dataset_bytes: int, decoded_bytes: float) -> int:
    """Return the budget of the cache once the size of decoded samples has been measured.

    Args:
        default: from `default_cache`.
        dataset_bytes: bytes of all encoded samples.
        decoded_bytes: bytes of all decoded samples; 0 if none are to be kept.
    """
    return min(default, max(dataset_bytes, math.ceil(decoded_bytes)))


def default_staging(store_bytes: int, wanted: int) -> int:
    """Return the bytes that a feed stages if nothing is said.

    Args:
        store_bytes: of the smallest object store.
        wanted: what the feed's workers need, see `mbaas.core.layout.wanted_staging`.
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

    Staging must fit every node that prepares. The cache has to fit the largest: `cache_budget` gives others less.

    Args:
        cache_bytes, staging_bytes: what the user said, or None.
        wanted_staging: see `default_staging`.
        dataset_bytes, grows: see `default_cache`.
        stores: bytes of the object stores of the nodes that may prepare.
        smallest_store: bytes of the smallest one of the cluster: consumers read on nodes that do not prepare, too.
        earlier: what the feeds that run already may take, in the order in which they came.

    Raises:
        ConfigError: what was said does not fit, together with other feeds, in `STORE_SHARE` of the object stores.
    """
    smallest, largest = min(stores, default=0), max(stores, default=0)
    staging = staging_bytes
    if staging is None:
        free = free_bytes(smallest, earlier)
        # At least 1, as the option must be; whether it fits is checked below.
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
