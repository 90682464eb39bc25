"""Hands decoded samples in to a node's cache while a part of a block is being prepared."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from mbaas import units
from mbaas.cache.reader import CacheReader
from mbaas.placement import PartRequest
from mbaas.prep.decoded import KeptMemory, KeptRows

PIECE_BYTES = 64 << 20
"""Approximate bytes per hand-in. They occupy the object store a second time until the cache has copied them."""

COPIED_S = 10.0
"""Timeout for the cache to copy the previous piece. After that, no more samples of the part are handed in."""

SLACK = 2
"""Memory reserved for a piece, as a multiple of the expected bytes. Untouched memory costs nothing."""

_log = logging.getLogger(__name__)


class PartHandIn:
    """The decoded samples of one part that are handed in to the node's cache.

    Args:
        reader: reader of the node's cache; may be None if no sample is requested.
        request: the part.
        asked_for: row of the part whose decoded sample the cache requests -> id of the stored sample.
        nbytes: expected bytes of all requested samples.
        memory: buffer for exclusive use.
    """

    def __init__(
        self,
        reader: CacheReader | None,
        request: PartRequest,
        asked_for: Mapping[int, int],
        nbytes: int,
        memory: KeptMemory,
    ) -> None:
        self._reader, self._request, self._asked_for, self._memory = reader, request, asked_for, memory
        self._sample_bytes = nbytes / max(1, len(asked_for))
        self._before: Any = None  # the hand-in that the cache is copying

    def pieces(self, rows: Sequence[int]) -> Iterator[tuple[slice, KeptRows | None]]:
        """Yield slices of ``rows``, each with the `KeptRows` for its decoded samples, or None if none are wanted.

        A piece's decoded samples are handed in when the next piece is requested.
        """
        wanted = [index for index, row in enumerate(rows) if row in self._asked_for]
        if not wanted:
            yield slice(0, len(rows)), None
            if self._asked_for:  # the requested rows are left out as bad
                self._hand_in({}, None, is_last=True)
            return
        step = max(1, int(PIECE_BYTES // self._sample_bytes))
        starts = [0, *wanted[step::step]]
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            asked = {index - start: self._asked_for[rows[index]] for index in wanted if start <= index < end}
            keep = KeptRows(asked, int(SLACK * len(asked) * self._sample_bytes), self._memory)
            yield slice(start, end), keep
            if not self._hand_in(asked, keep, is_last=end == len(rows)):
                if end < len(rows):
                    yield slice(end, len(rows)), None
                return

    def _hand_in(self, asked: Mapping[int, int], keep: KeptRows | None, *, is_last: bool) -> bool:
        """Hand in one piece; return whether the cache keeps up."""
        if self._before is not None and not ray.wait([self._before], timeout=COPIED_S)[0]:
            waited = units.seconds(COPIED_S)
            _log.warning("the cache has not copied decoded samples within %s; it gets no more of this part", waited)
            return False
        assert self._reader is not None, "rows were not requested"
        ids, lengths, packed, unfit = _kept_of(asked, keep)
        self._before = self._reader.hand_in(self._request, ids, lengths, packed, unfit, is_last=is_last)
        return True


def _kept_of(
    asked: Mapping[int, int], keep: KeptRows | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], list[int]]:
    """Return the decoded samples of a piece: ids, lengths in bytes, packed bytes; and the ids of unfit samples."""
    if keep is None:
        none = np.zeros(0, np.int64)
        return none, none, np.zeros(0, np.uint8), []
    rows, lengths, packed = keep.taken()
    taken = {*rows.tolist()}
    # Samples that did not fit are requested again later, unless they need more than all the remaining memory.
    had_room = len(packed) <= keep.most_bytes / 2
    unfit = [i for row, i in asked.items() if row not in taken and (had_room or not keep.wants(row))]
    return np.array([asked[row] for row in rows.tolist()], np.int64), lengths, packed, unfit
