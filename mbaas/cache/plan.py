"""One scheduled share of a block: what becomes of each of its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mbaas.cache.directory import Places
from mbaas.cache.slab import Failures, Load, Origin, Rows, pack
from mbaas.messages import Amount, FetchCounts
from mbaas.order import Ids
from mbaas.placement import PartRequest


@dataclass(eq=False)
class BlockPlan:
    """A share of a block that is being fetched, or read ahead.

    Attributes:
        wanted: which share of which block.
        sample_ids: int64[n].
        lengths: int64[n], bytes.
        hit: bool[n]; each row is either a hit or lies in exactly one of `loads`.
        slab: int64[n], the slab that is read for the row.
        offset: int64[n], bytes, where the row lies in that slab.
        origin: int8[n], `Origin` of each row that is no hit.
        loads: the slabs that are read for this block.
        fetches: fetches that wait for it; 0 means that it is read ahead.
        errors: row -> why its sample could not be read, always from a read made for this very block.
        failure: what kept one of its slabs from being filled at all, if anything did.
    """

    request: PartRequest
    sample_ids: Ids
    lengths: NDArray[np.int64]
    hit: NDArray[np.bool_] = field(init=False)
    slab: NDArray[np.int64] = field(init=False)
    offset: NDArray[np.int64] = field(init=False)
    origin: NDArray[np.int8] = field(init=False)
    loads: list[Load] = field(default_factory=list)
    fetches: int = 0
    errors: dict[int, str] = field(default_factory=dict)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.hit = np.ones(len(self.sample_ids), dtype=np.bool_)
        self.slab, self.offset = np.zeros((2, len(self.sample_ids)), dtype=np.int64)
        self.origin = np.zeros(len(self.sample_ids), np.int8)

    def transient_slabs(self) -> list[int]:
        return [load.slab for load in self.loads if not load.permanent]

    def add(self, load: Load) -> None:
        """The rows of `load` are no hits: they are fetched for this block."""
        self.hit[load.rows] = False
        self.slab[load.rows] = load.slab
        self.loads.append(load)

    def landed(self, load: Load, failures: Failures, origins: NDArray[np.int8]) -> None:
        """One of `loads` is full."""
        self.origin[load.rows] = origins
        kept = load.kept(failures)
        self.offset[load.rows[kept]] = pack(load.lengths[kept])
        self.errors.update({int(load.rows[i]): reason for i, reason in failures.items()})

    def rows(self, kept: Places) -> Rows:
        """Where everything lies at last, given where the directory has the samples."""
        own = ~self.hit
        slab = np.where(own, self.slab, kept["slab"])
        offset = np.where(own, self.offset, kept["offset"])
        good = np.ones(len(slab), dtype=np.bool_)
        good[list(self.errors)] = False
        slab_ids, index = np.unique(slab[good], return_inverse=True)
        column = np.full(len(slab), -1, dtype=np.int32)
        column[good] = index

        def amount(rows: NDArray[np.bool_]) -> Amount:
            """The samples of these rows, and the bytes of those that could be read."""
            return Amount(int(rows.sum()), int(self.lengths[good & rows].sum()))

        def fetched(origin: Origin) -> Amount:
            return amount(own & (self.origin == origin))

        return Rows(
            slab_ids=tuple(slab_ids.tolist()),
            slab=column,
            offset=np.where(good, offset, 0),
            length=np.where(good, self.lengths, 0),
            errors=dict(self.errors),
            counts=FetchCounts(
                local=amount(self.hit),
                remote=fetched(Origin.REMOTE),
                disk=fetched(Origin.DISK),
                storage=fetched(Origin.STORAGE),
            ),
        )

    def validate(self) -> None:
        """
        Raises:
            AssertionError: a row has no place, or two.
        """
        rows = np.concatenate([np.flatnonzero(self.hit), *(load.rows for load in self.loads)])
        assert sorted(rows.tolist()) == list(range(len(self.sample_ids))), f"rows of {self.request}"
        for load in self.loads:
            assert (self.slab[load.rows] == load.slab).all(), load
            assert load.nbytes == int(load.lengths.sum()), load
        assert not self.hit[list(self.errors)].any(), f"{self.request} inherited an error: {self.errors}"
