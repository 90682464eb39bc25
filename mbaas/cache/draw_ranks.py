"""Ranks samples that are drawn by weight, so that caches hold the most frequently drawn ones. Pure.

A cached sample saves its bytes once per draw, so per cached byte it saves its expected number of draws. A node
therefore ranks its samples by that number. It fills its memory, and then its disks, in this order. NoPFS ranks samples
by access frequency (Dryden et al., "Clairvoyant Prefetching for Distributed Machine Learning I/O", SC 2021).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mbaas.samples.order import Ids

NOWHERE = -1
"""Class of samples that are not to be cached."""


class DrawRanks:
    """A node's samples, ranked by expected draws, the most first; ties by id.

    Args:
        draws: float64[samples], expected draws of each sample in an epoch.
        lengths: int64[samples], bytes of each sample.
        is_home: bool[samples], samples whose home is this node. Others are not ranked.
    """

    def __init__(self, draws: NDArray[np.float64], lengths: NDArray[np.int64], is_home: NDArray[np.bool_]) -> None:
        ranked = np.flatnonzero(is_home & (lengths > 0))
        ranked = ranked[np.argsort(-draws[ranked], kind="stable")]
        self._ends = np.concatenate([[0], np.cumsum(lengths[ranked])])  # bytes of the first k samples
        self._rank = np.full(len(draws), len(ranked), np.int64)
        self._rank[ranked] = np.arange(len(ranked))

    def first(self, nbytes: float, after: int = 0) -> int:
        """Return the end of the run of ranks from ``after`` that fits into ``nbytes``."""
        return max(after, int(np.searchsorted(self._ends, self._ends[after] + nbytes, side="right")) - 1)

    def in_memory(self, budget_bytes: int, decoded_bytes: int, each_decoded_bytes: float) -> tuple[int, int]:
        """Return how many of the first samples to cache decoded, and how many in either form.

        ``decoded_bytes`` of the budget are for decoded samples of ``each_decoded_bytes``.
        """
        decoded = int(decoded_bytes // each_decoded_bytes) if each_decoded_bytes else 0
        decoded = min(decoded, len(self._ends) - 1)
        return decoded, self.first(budget_bytes - decoded * each_decoded_bytes, decoded)

    def among_first(self, sample_ids: Ids, count: int) -> NDArray[np.bool_]:
        """Return which samples are among the first ``count`` ones: bool[n]."""
        return self._rank[sample_ids] < count

    def classes(self, sample_ids: Ids, after: int, capacities: Sequence[float]) -> NDArray[np.int64]:
        """Divide the samples after the first ``after`` among classes with these bytes, each filled before the next.

        Returns:
            int64[n], index of each sample's class; `NOWHERE` for the first ones, and those beyond the last class.
        """
        ends = [after]
        for nbytes in capacities:
            ends.append(self.first(nbytes, ends[-1]))
        found = np.searchsorted(ends, self._rank[sample_ids], side="right") - 1
        return np.where(found < len(capacities), found, NOWHERE)
