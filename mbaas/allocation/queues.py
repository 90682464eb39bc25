"""Threads between the request queues of ranks, so that no rank becomes the straggler (Lobster, ICPP 2022)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mbaas.errors import ConfigError

PATIENCE = 2
"""Steps in a row without improvement after which a search ends."""


@dataclass(frozen=True)
class Search:
    """The best thread count that a search has seen.

    Attributes:
        threads: of the straggler.
        gap_s: fetch + prep - step with so many; positive where the rank still lags.
        tried: counts that were looked at, in order.
    """

    threads: int
    gap_s: float
    tried: tuple[int, ...]


def share_threads(total: int, *, lengths: Sequence[float]) -> list[int]:
    """Shares threads between queues in proportion to their length.

    All threads are given unless all queues are empty; an empty queue gets none. Every other queue gets at least one
    while there are enough, else the longest get one each. What does not divide goes to the largest fractions, to the
    earlier queue among equals; a longer queue never gets less than a shorter one.

    Args:
        lengths: requests waiting in each queue, or seconds of work.

    Raises:
        ConfigError: ``total`` or a length is negative.
    """
    if total < 0 or min(lengths, default=0) < 0:
        raise ConfigError(f"threads and lengths must be 0 or more, got {total} and {list(lengths)}")
    waiting = [queue for queue, length in enumerate(lengths) if length > 0]
    shares = [0] * len(lengths)
    if total < len(waiting):
        for queue in sorted(waiting, key=lambda queue: -lengths[queue])[:total]:
            shares[queue] = 1
        return shares
    whole = sum(lengths)
    fair = [total * (length / whole) if length else 0.0 for length in lengths]  # in this order nothing overflows
    for queue in waiting:
        # a queue that gets nothing never moves, and its rank holds up all others
        shares[queue] = max(1, math.floor(fair[queue]))
    while waiting and (left := total - sum(shares)):
        if left > 0:
            shares[max(waiting, key=lambda queue: (fair[queue] - shares[queue], -queue))] += 1
        else:
            above_one = [queue for queue in waiting if shares[queue] > 1]
            shares[max(above_one, key=lambda queue: (shares[queue] - fair[queue], queue))] -= 1
    return shares


def straggler_threads(gap_s: Callable[[int], float], *, least: int, most: int, tau_s: float) -> Search:
    """Searches the thread count of a rank that is predicted to straggle, by bisection.

    Ends when |gap| < ``tau_s``, when nothing is left to try, or after `PATIENCE` steps that were no better than the
    best.

    Args:
        gap_s: fetch + prep - step, in seconds, with so many threads: measured or predicted; falls as threads are
            added. Called at most log2(most - least + 1) + 1 times.
        least, most: counts to choose from, both included.

    Raises:
        ConfigError: ``least`` is below 1 or above ``most``.
    """
    if not 1 <= least <= most:
        raise ConfigError(f"least must be in [1, most], most is {most} and least is {least}")
    best, best_gap_s = 0, math.inf
    tried: list[int] = []
    without_gain = 0
    while least <= most and without_gain < PATIENCE and not abs(best_gap_s) < tau_s:
        threads = (least + most) // 2
        gap = gap_s(threads)
        tried.append(threads)
        # Measured gaps are noisy, so the search may be led astray: what counts is the best seen, not the last.
        if not best or abs(gap) < abs(best_gap_s):
            best, best_gap_s, without_gain = threads, gap, 0
        else:
            without_gain += 1
        if gap > 0:
            least = threads + 1
        else:
            most = threads - 1
    return Search(best, best_gap_s, tuple(tried))
