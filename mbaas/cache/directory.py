"""The samples cached on a node: the byte budget and the ranks that admit them, and the directory of their locations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mbaas.samples.fields import bounds_of
from mbaas.samples.order import Ids
from mbaas.samples.placement import ENCODED
from mbaas.wire.samples import Amount

LOCATION = np.dtype([("offset", np.int64), ("length", np.int64), ("slab", np.int32), ("form", np.int32)], align=True)
"""Location of a sample: `offset` in bytes within `slab` (0: not cached), `form` as in `mbaas.samples.placement`."""

Locations = NDArray[np.void]
"""An array of `LOCATION`, with columns such as `locations["slab"]`."""


class MinIO:
    """The byte budget of the cached samples: admit until full, never evict.

    No policy does better on fresh random orders: each sample occurs once an epoch, so an epoch's hits cannot exceed the
    samples cached at its start (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training", VLDB 2021).
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0  # in [0, budget_bytes]; falls when samples cannot be read or are no longer cached

    @property
    def free_bytes(self) -> int:
        return self.budget_bytes - self.used_bytes

    def admit(self, lengths: NDArray[np.int64], reserved_bytes: int = 0) -> NDArray[np.bool_]:
        """Admit non-empty samples in order, each if it still fits, and charge them: bytes int64[n] -> bool[n].

        ``reserved_bytes`` stay free.
        """
        admitted = fitting(lengths, self.free_bytes - reserved_bytes)
        self.used_bytes += int(lengths[admitted].sum())
        return admitted


def fitting(lengths: NDArray[np.int64], free_bytes: int) -> NDArray[np.bool_]:
    """Choose non-empty samples in order, each if it fits into the bytes left: bytes int64[n] -> bool[n]."""
    # Fast path: until the cache is nearly full, all samples fit. After that one at a time, because sizes differ and a
    # small sample may fill the gap that a large one left.
    fits: NDArray[np.bool_] = (lengths > 0) & (lengths <= free_bytes)
    if int(lengths[fits].sum()) > free_bytes:
        for row in np.flatnonzero(fits).tolist():
            fits[row] = lengths[row] <= free_bytes
            free_bytes -= int(lengths[row]) if fits[row] else 0
    return fits


def member_mask(sample_ids: Ids, members: Collection[int]) -> NDArray[np.bool_]:
    """Return which samples are in a collection that is not an array: bool[n]."""
    if not members:  # the usual case, without a lookup per sample
        return np.zeros(len(sample_ids), np.bool_)
    return np.array([i in members for i in sample_ids.tolist()], np.bool_)


class DrawRanks:
    """A node's samples, ranked by expected draws, the most first; ties by id.

    A cached sample saves its bytes once per draw, so per cached byte it saves its expected number of draws. A node
    fills its memory, and then its disks, in this order. NoPFS ranks samples by access frequency (Dryden et al.,
    "Clairvoyant Prefetching for Distributed Machine Learning I/O", SC 2021).

    Args:
        draws: float64[samples], expected draws of each sample in an epoch.
        lengths: int64[samples], bytes of each sample.
        is_home: bool[samples], samples whose home is this node. Others are not ranked.
    """

    def __init__(self, draws: NDArray[np.float64], lengths: NDArray[np.int64], is_home: NDArray[np.bool_]) -> None:
        ranked = np.flatnonzero(is_home & (lengths > 0))
        ranked = ranked[np.argsort(-draws[ranked], kind="stable")]
        self._ends = bounds_of(lengths[ranked])  # bytes of the first k samples
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
            int64[n], index of each sample's class; -1 for the first ones, and those beyond the last class.
        """
        ends = [after]
        for nbytes in capacities:
            ends.append(self.first(nbytes, ends[-1]))
        found = np.searchsorted(ends, self._rank[sample_ids], side="right") - 1
        return np.where(found < len(capacities), found, -1)


@dataclass
class Directory:
    """The cached samples and their locations: an array over all samples of the dataset.

    Only full slabs are published. The bytes of a withdrawn sample stay until its whole slab is withdrawn, or until the
    rest of the slab is copied elsewhere.
    """

    num_samples: int
    # samples, nbytes: number of cached samples, and their bytes
    samples: int = 0
    nbytes: int = 0
    by_form: dict[int, Amount] = field(default_factory=dict)  # form -> the subset that is cached decoded in it
    slab_bytes: dict[int, int] = field(default_factory=dict)  # slab -> bytes, including withdrawn samples
    # slab -> bytes of withdrawn samples, for slabs that have any
    withdrawn_bytes: dict[int, int] = field(default_factory=dict)
    _live: dict[int, int] = field(default_factory=dict)  # slab -> samples that were not withdrawn
    _locations: Locations = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # One record, not three columns: one cache miss per sample. Zeros take no memory until written to.
        self._locations = np.zeros(self.num_samples, LOCATION)

    def publish(
        self,
        slab: int,
        sample_ids: Ids,
        *,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        form: int = ENCODED,
        slab_bytes: int | None = None,
    ) -> None:
        """Add the samples of a full slab (number > 0). None of the samples may be cached already.

        ``slab_bytes`` is the slab's size if it holds more than these samples.
        """
        locations = np.zeros(len(sample_ids), LOCATION)
        locations["offset"], locations["length"], locations["slab"] = offsets, lengths, slab
        locations["form"] = form
        self._locations[sample_ids] = locations
        nbytes = int(lengths.sum())
        self.slab_bytes[slab] = nbytes if slab_bytes is None else slab_bytes
        self._waste(slab, self.slab_bytes[slab] - nbytes)
        self._live[slab] = len(sample_ids)
        self.nbytes += nbytes
        self.samples += len(sample_ids)
        self._add(form, Amount(len(sample_ids), nbytes))

    def withdraw(self, sample_ids: Ids) -> dict[int, int]:
        """Remove cached samples. Return the slabs that are empty now, with their bytes."""
        locations = self._locations[sample_ids]
        assert (locations["slab"] > 0).all(), "a sample is withdrawn that is not kept"
        self._locations[sample_ids] = np.zeros((), LOCATION)
        self.samples -= len(sample_ids)
        self.nbytes -= int(locations["length"].sum())
        for form in [*self.by_form]:
            lengths = locations["length"][locations["form"] == form]
            self._add(form, Amount(-len(lengths), -int(lengths.sum())))
        emptied = {}
        slabs, index, counts = np.unique(locations["slab"], return_inverse=True, return_counts=True)
        sizes = np.bincount(index, locations["length"], len(slabs)).astype(np.int64)
        for slab, count, nbytes in zip(slabs.tolist(), counts.tolist(), sizes.tolist(), strict=True):
            self._live[slab] -= count
            self._waste(slab, nbytes)
            if not self._live[slab]:
                del self._live[slab]
                self.withdrawn_bytes.pop(slab, None)
                emptied[slab] = self.slab_bytes.pop(slab)
        return emptied

    def _add(self, form: int, amount: Amount) -> None:
        if form == ENCODED:
            return
        self.by_form[form] = self.by_form.get(form, Amount()) + amount
        if not self.by_form[form].samples:
            del self.by_form[form]

    @property
    def decoded(self) -> Amount:
        """The samples cached decoded, in all forms."""
        return sum(self.by_form.values(), Amount())

    def _waste(self, slab: int, nbytes: int) -> None:
        if nbytes:
            self.withdrawn_bytes[slab] = self.withdrawn_bytes.get(slab, 0) + nbytes

    @property
    def slab_total(self) -> int:
        """Bytes of all slabs, including withdrawn samples."""
        return sum(self.slab_bytes.values())

    def slabs(self, sample_ids: Ids) -> NDArray[np.int32]:
        """Return the slab of each sample, 0 if it is not cached: int32[n]."""
        return self._locations["slab"][sample_ids]

    def samples_in(self, *slabs: int) -> Ids:
        """Return the samples of slabs that were not withdrawn, ascending: int64[k]. Takes O(dataset) time."""
        return np.flatnonzero(np.isin(self._locations["slab"], slabs))

    def live_samples(self, slab: int) -> int:
        """Return the number of a slab's samples that were not withdrawn."""
        return self._live[slab]

    def lookup(self, sample_ids: Ids) -> Locations:
        return self._locations[sample_ids]

    def cached_ids(self) -> Ids:
        """Return the cached samples, ascending: int64[samples]."""
        return np.flatnonzero(self._locations["slab"])

    def decoded_ids(self) -> Ids:
        """Return the samples that are cached decoded, ascending: int64[k]."""
        return np.flatnonzero(self._locations["form"])

    def validate(self) -> None:
        """Raise AssertionError if a sum is wrong, or if two samples of a slab overlap."""
        kept = self.cached_ids()
        locations = self.lookup(kept)
        assert len(kept) == self.samples == sum(self._live.values()), (len(kept), self.samples)
        assert self.nbytes == int(locations["length"].sum()) <= self.slab_total, (self.nbytes, self.slab_bytes)
        for form in {*np.unique(locations["form"]).tolist(), *self.by_form} - {ENCODED}:
            lengths = locations["length"][locations["form"] == form]
            assert self.by_form.get(form) == Amount(len(lengths), int(lengths.sum())), (form, self.by_form)
        # Sorted by position, so that only neighbours can overlap.
        locations = locations[np.lexsort((locations["offset"], locations["slab"]))]
        same = np.diff(locations["slab"]) == 0
        ends = locations["offset"] + locations["length"]
        assert (ends[:-1][same] <= locations["offset"][1:][same]).all(), "samples of a slab overlap"
        slabs = locations["slab"].tolist()
        assert set(slabs) == set(self.slab_bytes) == set(self._live), (slabs, self.slab_bytes)
        assert sum(self.withdrawn_bytes.values()) == self.slab_total - self.nbytes, self.withdrawn_bytes
        assert self.withdrawn_bytes.keys() <= self.slab_bytes.keys(), self.withdrawn_bytes
        for slab, end in zip(slabs, ends.tolist(), strict=True):
            assert end <= self.slab_bytes[slab], "a sample lies beyond its slab"
