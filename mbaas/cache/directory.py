"""The directory: which node keeps which sample, in which slab, where."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mbaas.order import Ids

PLACE = np.dtype([("offset", np.int64), ("length", np.int64), ("slab", np.int32), ("node", np.int16)], align=True)
"""Where a sample lies: `offset` in bytes from the start of `slab`, 0 if it is kept nowhere."""

Places = NDArray[np.void]
"""An array of `PLACE`: its columns are `places["slab"]` and so on."""


@dataclass
class Directory:
    """Sample -> (node, slab, offset, length), as arrays over all samples of the dataset.

    Only full slabs are published. An entry never changes once it is written, but a sample that moves to another node is
    withdrawn; its bytes stay until all of its slab are.

    Attributes:
        num_samples: samples of the dataset.
        version: slabs published so far; grows by one with each.
        samples: samples that are kept somewhere.
        nbytes: bytes of all of them.
        slab_bytes: (node, slab) -> bytes of that slab, withdrawn samples included.
    """

    num_samples: int
    version: int = 0
    samples: int = 0
    nbytes: int = 0
    slab_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
    _live: dict[tuple[int, int], int] = field(default_factory=dict)  # samples of each slab that were not withdrawn
    _places: Places = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # One record, not four columns: a sample costs one cache miss. Zeros take no memory until written to.
        self._places = np.zeros(self.num_samples, PLACE)

    def publish(
        self,
        slab: int,
        sample_ids: Ids,
        *,
        offsets: NDArray[np.int64],
        lengths: NDArray[np.int64],
        node: int = 0,
    ) -> None:
        """Enters the samples of a full slab (number > 0); none of them may be kept already."""
        places = np.zeros(len(sample_ids), PLACE)
        places["offset"], places["length"], places["slab"], places["node"] = offsets, lengths, slab, node
        self._places[sample_ids] = places
        self.slab_bytes[node, slab] = int(lengths.sum())
        self._live[node, slab] = len(sample_ids)
        self.nbytes += int(lengths.sum())
        self.samples += len(sample_ids)
        self.version += 1

    def withdraw(self, sample_ids: Ids, *, node: int = 0) -> dict[int, int]:
        """Takes samples that are kept here out. Returns the slabs that hold none any more, and their bytes."""
        places = self._places[sample_ids]
        assert (places["slab"] > 0).all(), "a sample is withdrawn that is not kept"
        self._places[sample_ids] = np.zeros((), PLACE)
        self.samples -= len(sample_ids)
        self.nbytes -= int(places["length"].sum())
        self.version += 1
        emptied = {}
        slabs, counts = np.unique(places["slab"], return_counts=True)
        for slab, count in zip(slabs.tolist(), counts.tolist(), strict=True):
            self._live[node, slab] -= count
            if not self._live[node, slab]:
                del self._live[node, slab]
                emptied[slab] = self.slab_bytes.pop((node, slab))
        return emptied

    @property
    def slab_total(self) -> int:
        """Bytes of all slabs, withdrawn samples included."""
        return sum(self.slab_bytes.values())

    def slabs(self, sample_ids: Ids) -> NDArray[np.int32]:
        """The slab of each sample, 0 where it is kept nowhere: int32[n]."""
        return self._places["slab"][sample_ids]

    def lookup(self, sample_ids: Ids) -> Places:
        """Where each of the samples lies: PLACE[n]."""
        return self._places[sample_ids]

    def cached_ids(self) -> Ids:
        """The samples that are kept, ascending: int64[samples]."""
        return np.flatnonzero(self._places["slab"])

    def validate(self) -> None:
        """Checks every entry against the totals.

        Raises:
            AssertionError: a sum is wrong, or two samples of a slab overlap.
        """
        kept = self.cached_ids()
        places = self.lookup(kept)
        assert len(kept) == self.samples == sum(self._live.values()), (len(kept), self.samples)
        assert self.nbytes == int(places["length"].sum()) <= self.slab_total, (self.nbytes, self.slab_bytes)
        places = places[np.lexsort((places["offset"], places["slab"], places["node"]))]
        same = (np.diff(places["slab"]) == 0) & (np.diff(places["node"]) == 0)
        ends = places["offset"] + places["length"]
        assert (ends[:-1][same] <= places["offset"][1:][same]).all(), "samples of a slab overlap"
        slabs = list(zip(places["node"].tolist(), places["slab"].tolist(), strict=True))
        assert set(slabs) == set(self.slab_bytes) == set(self._live), (slabs, self.slab_bytes)
        for slab, end in zip(slabs, ends.tolist(), strict=True):
            assert end <= self.slab_bytes[slab], "a sample lies beyond its slab"
