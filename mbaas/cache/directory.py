"""What a node keeps: the byte budget that admits samples, and the directory of where each of them lies."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.messages import Amount
from mbaas.order import Ids

LOCATION = np.dtype([("offset", np.int64), ("length", np.int64), ("slab", np.int32), ("decoded", np.bool_)], align=True)
"""Where a sample lies: `offset` in bytes from the start of `slab`; slab 0 if it is not kept. `decoded` if it is kept as
the pipeline's prefix makes it (`mbaas.prep.decoded`), and not as storage has it.
"""

Locations = NDArray[np.void]
"""An array of `LOCATION`: its columns are `locations["slab"]` and so on."""


class MinIO:
    """The byte budget of the samples that a cache keeps: admit until full, never evict.

    On fresh random orders no policy does better: every sample comes once an epoch, so an epoch's hits can never exceed
    what lay in the cache at its start, and MinIO reaches exactly that (Mohan et al., "Analyzing and Mitigating Data
    Stalls in DNN Training", VLDB 2021).

    Attributes:
        budget_bytes: the most that all admitted samples together may hold.
        used_bytes: what they hold; in [0, budget_bytes].
    """

    def __init__(self, budget_bytes: int) -> None:
        """
        Raises:
            ConfigError: the budget is negative.
        """
        if budget_bytes < 0:
            raise ConfigError(f"cache_bytes must be at least 0, got {budget_bytes}")
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """What is left of the budget."""
        return self.budget_bytes - self.used_bytes

    def admit(self, lengths: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Take samples one after the other, each if it still fits, and charge them to the budget.

        An empty sample is never admitted: there is nothing to keep.

        Args:
            lengths: int64[n], bytes of each sample.

        Returns:
            bool[n], true where the sample was admitted.
        """
        admitted = fitting(lengths, self.free_bytes)
        self.used_bytes += int(lengths[admitted].sum())
        return admitted

    def take(self, nbytes: int) -> None:
        """Charge bytes that were found to fit."""
        self.used_bytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """Free the bytes of samples that were admitted, and that could not be read or have moved to another node."""
        self.used_bytes -= nbytes


def fitting(lengths: NDArray[np.int64], free_bytes: int) -> NDArray[np.bool_]:
    """Choose samples one after the other, each if it fits what those before it left: bool[n]; no empty one.

    Args:
        lengths: int64[n], bytes of each sample.
        free_bytes: what there is room for.
    """
    # Until the cache is nearly full all of them fit, and none is looked at alone. Then each is taken that still
    # fits: images differ in size, and a small one may fill what a large one left.
    fits: NDArray[np.bool_] = (lengths > 0) & (lengths <= free_bytes)
    if int(lengths[fits].sum()) > free_bytes:
        for row in np.flatnonzero(fits).tolist():
            fits[row] = lengths[row] <= free_bytes
            free_bytes -= int(lengths[row]) if fits[row] else 0
    return fits


def among(sample_ids: Ids, members: Container[int]) -> NDArray[np.bool_]:
    """Tell which samples are members of a collection that is no array: bool[n]."""
    return np.array([i in members for i in sample_ids.tolist()], np.bool_)


@dataclass
class Directory:
    """The samples that this node keeps, and where they lie: an array over all samples of the dataset.

    Only full slabs are published. An entry never changes once it is written, but a sample that moves to another node is
    withdrawn; its bytes stay until all of its slab are.

    Attributes:
        num_samples: samples of the dataset.
        samples: how many are kept.
        nbytes: bytes of all of them.
        decoded: how many of them are kept decoded, and the bytes of these.
        slab_bytes: slab -> its bytes, withdrawn samples included.
    """

    num_samples: int
    samples: int = 0
    nbytes: int = 0
    decoded: Amount = field(default_factory=Amount)
    slab_bytes: dict[int, int] = field(default_factory=dict)
    _live: dict[int, int] = field(default_factory=dict)  # samples of each slab that were not withdrawn
    _locations: Locations = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # One record, not three columns: a sample costs one cache miss. Zeros take no memory until written to.
        self._locations = np.zeros(self.num_samples, LOCATION)

    def publish(
        self,
        slab: int,
        sample_ids: Ids,
        *,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        decoded: bool = False,
    ) -> None:
        """Enter the samples of a full slab (number > 0); none of them may be kept already."""
        locations = np.zeros(len(sample_ids), LOCATION)
        locations["offset"], locations["length"], locations["slab"] = offsets, lengths, slab
        locations["decoded"] = decoded
        self._locations[sample_ids] = locations
        self.slab_bytes[slab] = int(lengths.sum())
        self._live[slab] = len(sample_ids)
        self.nbytes += int(lengths.sum())
        self.samples += len(sample_ids)
        if decoded:
            self.decoded += Amount(len(sample_ids), int(lengths.sum()))

    def withdraw(self, sample_ids: Ids) -> dict[int, int]:
        """Take out samples that are kept, and return the slabs that hold none any more, with their bytes."""
        locations = self._locations[sample_ids]
        assert (locations["slab"] > 0).all(), "a sample is withdrawn that is not kept"
        self._locations[sample_ids] = np.zeros((), LOCATION)
        self.samples -= len(sample_ids)
        self.nbytes -= int(locations["length"].sum())
        if self.decoded.samples:
            lengths = locations["length"][locations["decoded"]]
            self.decoded += Amount(-len(lengths), -int(lengths.sum()))
        emptied = {}
        slabs, counts = np.unique(locations["slab"], return_counts=True)
        for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True):
            self._live[slab] -= count
            if not self._live[slab]:
                del self._live[slab]
                emptied[slab] = self.slab_bytes.pop(slab)
        return emptied

    @property
    def slab_total(self) -> int:
        """Bytes of all slabs, withdrawn samples included."""
        return sum(self.slab_bytes.values())

    def slabs(self, sample_ids: Ids) -> NDArray[np.int32]:
        """Look up the slab of each sample, 0 where it is not kept: int32[n]."""
        return self._locations["slab"][sample_ids]

    def samples_in(self, slab: int) -> Ids:
        """List the samples of a slab that were not withdrawn, ascending: int64[k]. It looks at all samples."""
        return np.flatnonzero(self._locations["slab"] == slab)

    def live_samples(self, slab: int) -> int:
        """Count the samples of a slab that were not withdrawn."""
        return self._live[slab]

    def lookup(self, sample_ids: Ids) -> Locations:
        """Look up the locations of samples: LOCATION[n]."""
        return self._locations[sample_ids]

    def cached_ids(self) -> Ids:
        """List the samples that are kept, ascending: int64[samples]."""
        return np.flatnonzero(self._locations["slab"])

    def decoded_ids(self) -> Ids:
        """List the samples that are kept decoded, ascending: int64[k]."""
        return np.flatnonzero(self._locations["decoded"])

    def validate(self) -> None:
        """Check every entry against the totals.

        Raises:
            AssertionError: a sum is wrong, or two samples of a slab overlap.
        """
        kept = self.cached_ids()
        locations = self.lookup(kept)
        assert len(kept) == self.samples == sum(self._live.values()), (len(kept), self.samples)
        assert self.nbytes == int(locations["length"].sum()) <= self.slab_total, (self.nbytes, self.slab_bytes)
        lengths = locations["length"][locations["decoded"]]
        assert self.decoded == Amount(len(lengths), int(lengths.sum())), self.decoded
        # In the order in which they lie: then only neighbours can overlap.
        locations = locations[np.lexsort((locations["offset"], locations["slab"]))]
        same = np.diff(locations["slab"]) == 0
        ends = locations["offset"] + locations["length"]
        assert (ends[:-1][same] <= locations["offset"][1:][same]).all(), "samples of a slab overlap"
        slabs = locations["slab"].tolist()
        assert set(slabs) == set(self.slab_bytes) == set(self._live), (slabs, self.slab_bytes)
        for slab, end in zip(slabs, ends.tolist(), strict=True):
            assert end <= self.slab_bytes[slab], "a sample lies beyond its slab"
