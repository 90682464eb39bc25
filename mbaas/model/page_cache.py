"""The page cache of Linux with its two lists, for samples that are read whole in random orders.

New pages enter the inactive list. A page that is read again there moves to the active list. Reclaim evicts the oldest
inactive pages. When it also scans the active list, the oldest active pages return to the inactive list. The kernel's
functions and the rules that `PageCache` takes from them (Linux 6.18):

==========================================  ============================================================================
``folio_mark_accessed`` (mm/swap.c)         The second read of an inactive page activates it. Reads of an active page
                                            only mark it, so later one read in the inactive list activates it again.
``filemap_read`` (mm/filemap.c)             Read-ahead does not mark pages, and reading a file in pieces marks each page
                                            once. So reading a whole sample is one access.
``workingset_eviction``,                    Evictions and activations are counted. An evicted page remembers the count.
``workingset_refault`` (mm/workingset.c)    If it is read again and the count has grown by at most the size of the
                                            active list, it enters the active list.
``inactive_is_low`` (mm/vmscan.c)           The active list is protected while active / inactive is at most
                                            sqrt(10 x GiB of cache); at most 1 below 1 GiB.
``prepare_scan_control`` (mm/vmscan.c)      It is never protected if a page has entered it that way since the last
                                            reclaim: the contents of the cache are changing.
``get_scan_count``, ``shrink_lruvec``       Reclaim scans the inactive list until 32 pages are free. It scans the same
(mm/vmscan.c)                               share of the active list, unless that is protected.
==========================================  ============================================================================

Left out: dirty and mapped pages, swap, anonymous memory that competes with files, several NUMA nodes, the limit on
remembered evictions, and the multi-generational LRU (``CONFIG_LRU_GEN``). A sample is evicted whole. Read-ahead across
samples that share a file is left out, too. It reads bytes that are never used, so such files have fewer hits.

The model was compared with measurements (`python -m benchmarks page-cache`); `docs/simulate.md` has the errors.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from typing import Any

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096

RECLAIM_BYTES = 32 * PAGE_BYTES
"""Bytes that are evicted at a time in a memory cgroup (``SWAP_CLUSTER_MAX`` pages)."""

GIB_PAGES = 2**30 // PAGE_BYTES


class PageCache:
    """A page cache of samples. ``sizes`` are bytes, number[F]; each sample occupies whole pages.

    ``capacity_bytes`` is the memory for file pages. ``reclaim_bytes`` is evicted at a time: 128 KiB in a cgroup that
    has reached its limit. On a machine without a limit, kswapd evicts about 0.1 % of the memory at a time.
    """

    def __init__(self, *, capacity_bytes: float, sizes: NDArray[Any], reclaim_bytes: int = RECLAIM_BYTES) -> None:
        # All caches larger than the data are the same, and int() cannot convert infinity.
        self._pages = array("i", np.ceil(np.asarray(sizes) / PAGE_BYTES).astype(np.intc).tobytes())
        self._capacity = int(min(capacity_bytes / PAGE_BYTES, sum(self._pages)))
        self._reclaim_pages = max(1, reclaim_bytes // PAGE_BYTES)
        # Each cached sample is in exactly one list, oldest first; the pages of both never exceed the capacity.
        self._inactive: OrderedDict[int, None] = OrderedDict()
        self._active: OrderedDict[int, None] = OrderedDict()
        self._inactive_pages = self._active_pages = 0
        self._is_marked = bytearray(len(self._pages))  # read once since it entered the cache or its list
        self._age = 0  # pages evicted or activated so far
        self._evicted_at = array("q", [-1]) * len(self._pages)  # age at the last eviction, -1 for none
        self._is_changing = False  # a sample was activated as it was read again, since the last reclaim
        self._scanned = 0.0  # pages of the active list that were scanned, but do not make up its oldest sample yet

    @property
    def cached_bytes(self) -> int:
        return (self._inactive_pages + self._active_pages) * PAGE_BYTES

    @property
    def active_bytes(self) -> int:
        """Bytes in the active list."""
        return self._active_pages * PAGE_BYTES

    def read(self, samples: NDArray[Any]) -> NDArray[np.bool_]:
        """Read samples in order; return which were in the cache: bool[n]."""
        # Local names, because this loop runs millions of times.
        active, inactive, is_marked = self._active, self._inactive, self._is_marked
        hits = bytearray(len(samples))
        for number, sample in enumerate(samples.tolist()):
            if sample in active:
                is_marked[sample] = hits[number] = True
            elif sample not in inactive:
                self._add(sample)
            elif is_marked[sample]:
                hits[number] = True
                is_marked[sample] = False
                del inactive[sample]
                self._inactive_pages -= self._pages[sample]
                self._activate(sample)
            else:
                is_marked[sample] = hits[number] = True
        return np.frombuffer(hits, dtype=np.bool_)

    def _activate(self, sample: int) -> None:
        self._active[sample] = None
        self._active_pages += self._pages[sample]
        self._age += self._pages[sample]

    def _add(self, sample: int) -> None:
        pages, evicted_at = self._pages[sample], self._evicted_at[sample]
        is_activated = evicted_at >= 0 and self._age - evicted_at <= self._active_pages
        while self._inactive_pages + self._active_pages + pages > self._capacity:
            if not self._inactive_pages + self._active_pages:
                return  # the sample is larger than the cache
            self._reclaim()
            self._is_changing = False
        self._is_changing |= is_activated
        self._is_marked[sample] = True
        if is_activated:
            self._activate(sample)
        else:
            self._inactive[sample] = None
            self._inactive_pages += pages

    def _reclaim(self) -> None:
        gib = (self._inactive_pages + self._active_pages) // GIB_PAGES
        ratio = math.isqrt(10 * gib) if gib else 1
        scans_active = self._is_changing or self._inactive_pages * ratio < self._active_pages
        active_share = self._active_pages / max(self._inactive_pages, self._reclaim_pages)
        free = 0
        while free < self._reclaim_pages and self._inactive:
            sample, _ = self._inactive.popitem(last=False)
            self._evicted_at[sample] = self._age
            self._age += self._pages[sample]
            self._inactive_pages -= self._pages[sample]
            free += self._pages[sample]
        if scans_active:
            self._scanned += max(free, self._reclaim_pages) * active_share
            self._deactivate()

    def _deactivate(self) -> None:
        while self._active:
            sample = next(iter(self._active))
            if self._scanned < self._pages[sample]:
                return
            self._scanned -= self._pages[sample]
            del self._active[sample]
            self._active_pages -= self._pages[sample]
            self._inactive[sample] = None
            self._inactive_pages += self._pages[sample]


def page_cache_hits(share: float, *, trials: float = 1) -> float:
    """Return the page cache's hit rate in steady epochs of K trials with fresh random orders of the same samples.

    ``share`` is the page cache's share of the dataset, x. The result is x + 1.6 / (K + 1) (1 - x) ln(1 - x).

    For one trial, strict LRU hits x + (1 - x) ln(1 - x). Take a sample at position u of one epoch and v of the next.
    The share of distinct samples in between is 1 - u (1 - v), and the sample is still cached if this is below x. No
    cache hits more than x. The two lists avoid a fifth of LRU's loss. More trials read a sample again sooner. The
    factor 1.6 / (K + 1) is fitted to `PageCache`. Errors are below 0.04 for 1 to 8 trials and samples of 110 kB in a
    memory cgroup. If a reclaim evicts many samples (small samples, or kswapd), hits are up to 0.06 lower.
    """
    if share >= 1:
        return 1.0
    return share + 1.6 / (trials + 1) * (1 - share) * math.log1p(-share)  # log1p: precise for tiny caches


def first_epoch_hits(share: float, *, trials: float) -> float:
    """Return the page cache's hit rate while it is empty at first; within 0.06 of `PageCache`.

    The first read of each sample, one in ``trials``, finds nothing of an earlier epoch.
    """
    return page_cache_hits(share, trials=trials) - page_cache_hits(share) / trials
