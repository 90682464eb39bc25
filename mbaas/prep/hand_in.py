"""Handing decoded samples in to a node's cache, while a part of a block is prepared."""

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
"""About how much is handed in at a time. Until the cache has copied it, it lies in the object store a second time."""

COPIED_S = 10.0
"""How long the cache may take to copy what was handed in before. After that nothing more is handed in of a part."""

SLACK = 2
"""Samples of a piece may take this many times the bytes that they take on average. Untouched memory costs nothing."""

_log = logging.getLogger(__name__)


class PartHandIn:
    """What a worker hands in of a part.

    Args:
        reader: of the node's cache; it may be missing where nothing is asked for.
        request: the part.
        asked_for: row of the part whose decoded sample the cache would keep -> id of the stored sample.
        nbytes: what these take on average, together.
        memory: for the samples, of nobody else.
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
        self._before: Any = None  # the call that is copied at the moment

    def pieces(self, rows: Sequence[int]) -> Iterator[tuple[slice, KeptRows | None]]:
        """Cut rows of the part into pieces, and hand in what was kept of each when the next one is asked for.

        Yields:
            A piece, and what keeps its decoded samples; None if none are wanted.
        """
        wanted = [index for index, row in enumerate(rows) if row in self._asked_for]
        if not wanted:
            yield slice(0, len(rows)), None
            if self._asked_for:  # of rows that are left out
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
        """Return whether the cache keeps pace."""
        if self._before is not None and not ray.wait([self._before], timeout=COPIED_S)[0]:
            waited = units.seconds(COPIED_S)
            _log.warning("the cache has not copied decoded samples within %s; it gets no more of this part", waited)
            return False
        assert self._reader is not None, "rows are asked for by nobody"
        ids, lengths, packed, unfit = _kept_of(asked, keep)
        self._before = self._reader.hand_in(self._request, ids, lengths, packed, unfit, is_last=is_last)
        return True


def _kept_of(
    asked: Mapping[int, int], keep: KeptRows | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.uint8], list[int]]:
    """Return the decoded samples of a piece: ids, lengths in bytes, all end to end; and the ids of those that are
    unfit.
    """
    if keep is None:
        none = np.zeros(0, np.int64)
        return none, none, np.zeros(0, np.uint8), []
    rows, lengths, packed = keep.taken()
    taken = {*rows.tolist()}
    # Those for which there was no room are asked for again, unless they need more than all the room that was left.
    had_room = len(packed) <= keep.most_bytes / 2
    unfit = [i for row, i in asked.items() if row not in taken and (had_room or not keep.wants(row))]
    return np.array([asked[row] for row in rows.tolist()], np.int64), lengths, packed, unfit
