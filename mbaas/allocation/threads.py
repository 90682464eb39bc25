"""Division of a machine's threads between fetch and prep, and between the queues of ranks.

The source is "Lobster: Load Balance-Aware I/O for Distributed DNN Training" (ICPP 2022). Prep gets the smallest number
of threads that reaches its peak, fetch the others. Threads then move from prep to fetch one at a time while a minibatch
takes longer than the training step and prep is not the bottleneck. Between ranks, threads are divided by queue length,
and a rank predicted to straggle gets as many as it needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from mbaas import units
from mbaas.allocation.throughput import Floats, ThroughputCurve
from mbaas.errors import ConfigError

Seconds = tuple[float, float]
"""Seconds of prep and of fetch for one minibatch."""


class TierBytes(Struct, frozen=True):
    """Bytes of a minibatch from one tier: local memory, another node's memory, or storage.

    ``curve`` is the total bytes/s against the number of threads (alpha T(alpha) in the paper).
    """

    nbytes: float
    curve: ThroughputCurve

    def seconds(self, threads: Floats) -> Floats:
        """Return the seconds, float64[n], to read the bytes with ``threads`` threads; infinite at a rate of 0."""
        if not self.nbytes:
            return np.zeros_like(threads)
        with np.errstate(divide="ignore"):
            return self.nbytes / self.curve.rates(threads)


@dataclass(frozen=True)
class Split:
    """Prep and fetch threads of a machine, at least one each, and their seconds per minibatch.

    ``idle`` threads would make both slower. ``reason`` is a sentence on why the split is not different.
    """

    prep: int
    fetch: int
    idle: int
    prep_s: float
    fetch_s: float
    reason: str


def load_time_s(tiers: Sequence[TierBytes], *, threads: Sequence[int]) -> float:
    """Return the seconds to load a rank's minibatch from its tiers, one after the other.

    B_local / (alpha T_l(alpha)) + B_remote / (beta T_r(beta)) + B_storage / (gamma T_s(gamma)), with ``threads``
    (alpha, beta, gamma) in the order of the tiers.
    """
    if len(threads) != len(tiers):
        raise ConfigError(f"threads must be given for each of {len(tiers)} tiers, got {len(threads)}")
    each = zip(tiers, threads, strict=True)
    return float(sum(tier.seconds(np.array([count], dtype=np.float64))[0] for tier, count in each))


def split_threads(
    total: int, *, prep: ThroughputCurve, samples: float, tiers: Sequence[TierBytes], step_s: float, tau_s: float = 0.0
) -> Split:
    """Split ``total`` threads between prep and fetch.

    Prep is the bottleneck when it takes longer than both fetch and the step. Threads also stop moving when a move makes
    a minibatch no faster, for example when storage is saturated.

    Args:
        prep: samples/s against prep threads.
        samples: samples of a minibatch.
        tiers: sources of its bytes; the same fetch threads read one tier after the other.
        step_s: training time between two minibatches, in seconds.
        tau_s: how much longer than the step a minibatch may take, in seconds; each move must gain more than this.

    Raises:
        ConfigError: fewer than two threads.
    """
    if total < 2:
        raise ConfigError(f"total must be at least 2 threads, one to fetch and one to prepare, got {total}")
    counts = np.arange(1.0, total + 1)
    prep_s, fetch_s = _prep_seconds(prep, samples, counts), sum((s.seconds(counts) for s in tiers), 0 * counts)
    # Storage slows down past its peak: threads that would only hinder fetch stay idle.
    best_fetch_s = np.minimum.accumulate(fetch_s)

    def made_s(preparing: int) -> Seconds:
        return float(prep_s[preparing - 1]), float(best_fetch_s[total - preparing - 1])

    # The smallest count at the peak: more threads make prep no faster and could fetch instead.
    preparing = min(prep.peak(most=total).count, total - 1)
    now = made_s(preparing)
    while not (why := _why_stay(now, made_s(preparing - 1) if preparing > 1 else None, step_s, tau_s)):
        preparing -= 1
        now = made_s(preparing)
    fetching = int((fetch_s[: total - preparing] <= now[1]).argmax()) + 1  # the fewest that are as fast
    reason = (
        f"prep takes {units.seconds(now[0])} on {preparing} and fetch {units.seconds(now[1])} on {fetching} "
        f"of {total} threads: {why}"
    )
    return Split(preparing, fetching, total - preparing - fetching, *now, reason)


def _why_stay(now: Seconds, then: Seconds | None, step_s: float, tau_s: float) -> str:
    """Return why no thread moves from prep to fetch, or "" if one should; a move changes ``now`` to ``then``."""
    if sum(now) <= step_s + tau_s:
        return f"together within the step of {units.seconds(step_s)}"
    if now[0] > max(now[1], step_s):
        return "prep is the bottleneck"
    if then is None:
        return f"longer than the step of {units.seconds(step_s)}, but prep keeps one"
    if then[0] > max(then[1], step_s):
        return f"longer than the step of {units.seconds(step_s)}, but with one less prep would be the bottleneck"
    if not sum(then) < sum(now) - tau_s:
        return f"longer than the step of {units.seconds(step_s)}, but one more to fetch makes it no shorter"
    return ""


def _prep_seconds(prep: ThroughputCurve, samples: float, counts: Floats) -> Floats:
    with np.errstate(divide="ignore"):
        return samples / prep.rates(counts) if samples else np.zeros_like(counts)


PATIENCE = 2
"""Number of consecutive steps without improvement that ends a search."""


def divide_threads(total: int, *, lengths: Sequence[float]) -> list[int]:
    """Divide threads between queues in proportion to their lengths, in requests or seconds of work.

    All threads are assigned unless all queues are empty; an empty queue gets none. Every other queue gets at least one;
    if there are too few, the longest queues get one each. The remainder goes to the largest fractions, and to the
    earlier queue in a tie. A longer queue never gets less than a shorter one.

    Raises:
        ConfigError: ``total`` or a length is negative.
    """
    if total < 0 or min(lengths, default=0) < 0:
        raise ConfigError(f"threads and lengths must be 0 or more, got {total} and {list(lengths)}")
    waiting = [queue for queue, length in enumerate(lengths) if length > 0]
    counts = [0] * len(lengths)
    if total < len(waiting):
        for queue in sorted(waiting, key=lambda queue: -lengths[queue])[:total]:
            counts[queue] = 1
        return counts
    whole = sum(lengths)
    fair = [total * (length / whole) if length else 0.0 for length in lengths]  # this order avoids overflow
    for queue in waiting:
        # A queue without threads never moves, and its rank holds up all others.
        counts[queue] = max(1, math.floor(fair[queue]))
    while waiting and (left := total - sum(counts)):
        if left > 0:
            counts[max(waiting, key=lambda queue: (fair[queue] - counts[queue], -queue))] += 1
        else:
            above_one = [queue for queue in waiting if counts[queue] > 1]
            counts[max(above_one, key=lambda queue: (counts[queue] - fair[queue], queue))] -= 1
    return counts


def straggler_threads(gap_s: Callable[[int], float], *, least: int, most: int, tau_s: float) -> int:
    """Bisect the thread count in [least, most] of a rank that is predicted to straggle; return the best count tried.

    ``gap_s`` is fetch + prep - step in seconds for a number of threads, measured or predicted; it decreases with more
    threads. It is called at most log2(most - least + 1) + 1 times. The search ends when |gap| < ``tau_s``, when no
    count is left, or after `PATIENCE` steps without improvement.

    Raises:
        ConfigError: ``least`` is below 1 or above ``most``.
    """
    if not 1 <= least <= most:
        raise ConfigError(f"least must be in [1, most], most is {most} and least is {least}")
    best, best_gap_s, without_gain = 0, math.inf, 0
    while least <= most and without_gain < PATIENCE and not abs(best_gap_s) < tau_s:
        threads = (least + most) // 2
        gap = gap_s(threads)
        # Noisy gaps may mislead the search, so the best count seen wins, not the last.
        if not best or abs(gap) < abs(best_gap_s):
            best, best_gap_s, without_gain = threads, gap, 0
        else:
            without_gain += 1
        if gap > 0:
            least = threads + 1
        else:
            most = threads - 1
    return best
