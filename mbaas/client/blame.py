"""Which part of a consumer's waiting is fetch stall: what would not have been if prep had never waited for bytes."""

from __future__ import annotations

from collections import deque

RECENT = 16
"""Blocks of which it is remembered what fetching cost: several come at once, and the first of them is waited for."""


class StallAttribution:
    """Divides waiting between prep and fetch as the differential method does (DS-Analyzer, VLDB 2021), block by block.

    While a consumer waits, all workers of its feed are at work: they prepare, or wait for bytes. So without the latter
    a block would have come sooner by that share of the time since the one before, and by no more than the waiting for
    its own bytes. What that leaves unmasked is fetch stall, but never more than was waited.
    """

    def __init__(self) -> None:
        self._unmasked_s: deque[float] = deque(maxlen=RECENT)
        """Of the last blocks: seconds by which bytes at hand would have hastened them, less what is charged already."""

    def fetch_stall_s(self, waited_s: float, *, elapsed_s: float, fetch_s: float, prep_s: float) -> float:
        """The part of the waiting for a block that is fetch stall.

        Args:
            waited_s: for this block.
            elapsed_s: since the block before was there, this waiting included.
            fetch_s, prep_s: that workers waited for the block's bytes, and prepared them.
        """
        busy_s = fetch_s + prep_s
        self._unmasked_s.append(min(fetch_s, elapsed_s * fetch_s / busy_s) if busy_s > 0 else 0.0)
        left_s = waited_s
        while left_s > 0 and self._unmasked_s:
            newest_s = self._unmasked_s.pop()
            left_s -= newest_s
        if left_s < 0:
            self._unmasked_s.append(-left_s)
        return waited_s - max(0.0, left_s)
