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

    Only full slabs are published, and an entry never changes once it is written, so whoever holds an older
    version holds a smaller truth, never a wrong one.

    Attributes:
        num_samples: samples of the dataset.
        version: slabs published so far; grows by one with each.
        samples: samples that are kept somewhere.
        nbytes: bytes of all of them.
        slab_bytes: (node, slab) -> bytes of that slab: the sum of the lengths of its samples.
    """

    num_samples: int
    version: int = 0
    samples: int = 0
    nbytes: int = 0
    slab_bytes: dict[tuple[int, int], int] = field(default_factory=dict)
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
        self.nbytes += int(lengths.sum())
        self.samples += len(sample_ids)
        self.version += 1

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
            AssertionError: a sum is wrong, or the samples of a slab do not fill it end to end.
        """
        kept = self.cached_ids()
        assert len(kept) == self.samples, (len(kept), self.samples)
        assert self.nbytes == sum(self.slab_bytes.values()), (self.nbytes, self.slab_bytes)
        places = self.lookup(kept)
        places = places[np.lexsort((places["offset"], places["slab"], places["node"]))]
        first = np.flatnonzero(np.diff(places["slab"], prepend=0) | np.diff(places["node"], prepend=0))
        slabs = list(zip(places["node"][first].tolist(), places["slab"][first].tolist(), strict=True))
        assert set(slabs) == set(self.slab_bytes), (slabs, self.slab_bytes)
        sizes = [self.slab_bytes[slab] for slab in slabs]
        starts = np.repeat(np.cumsum(sizes) - sizes, np.diff(first, append=len(places)))
        ends = np.cumsum(places["length"])
        assert (starts + places["offset"] == ends - places["length"]).all(), "a gap or an overlap in a slab"
        assert ends[-1:].sum() == self.nbytes, "a slab that its samples do not fill"
