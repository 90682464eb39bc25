"""Division of the threads of a machine between fetch and prep, and between queues.

The rule is Lobster's ("Load Balance-Aware I/O for Distributed DNN Training", ICPP 2022). Prep gets the smallest number
of threads that reaches its peak, fetch the others. Threads then move from prep to fetch one at a time while a minibatch
takes longer than the training step and prep is not the bottleneck.

For `mbaas plan` and `mbaas simulate`. A feed does not divide its threads: threads that read storage wait and take no
CPU from prep, so all threads read from the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from mbaas.base import units
from mbaas.model.curves import Floats, ThroughputCurve

Seconds = tuple[float, float]
"""Seconds of prep and of fetch for one minibatch."""


class TierBytes(Struct, frozen=True):
    """Bytes of a minibatch from one tier: local memory, another node's memory, or storage; or samples to prepare.

    ``curve`` is their total rate against the number of threads (alpha T(alpha) in the paper).
    """

    nbytes: float
    curve: ThroughputCurve

    def seconds(self, threads: Floats) -> Floats:
        """float64[n] threads -> float64[n] seconds for all of it; infinite at a rate of 0."""
        if not self.nbytes:
            return np.zeros_like(threads)
        with np.errstate(divide="ignore"):
            return self.nbytes / self.curve.rates(threads)


@dataclass(frozen=True)
class ThreadSplit:
    """Prep and fetch threads of a machine, at least one each, and their seconds per minibatch.

    ``idle`` threads would make both slower. ``reason`` is a sentence on why the split is not different.
    """

    prep: int
    fetch: int
    idle: int
    prep_s: float
    fetch_s: float
    reason: str


def split_threads(
    total: int, *, prep: ThroughputCurve, samples: float, tiers: Sequence[TierBytes], step_s: float
) -> ThreadSplit:
    """Split ``total`` threads, at least two, between prep and fetch.

    Prep is the bottleneck when it takes longer than both fetch and the step. Threads also stop moving when a move makes
    a minibatch no faster, for example when storage is saturated. ``prep`` are samples/s against threads, ``samples``
    those of a minibatch; the same fetch threads read one tier after the other; ``step_s`` is between two minibatches.
    """
    counts = np.arange(1.0, total + 1)
    prep_s, fetch_s = TierBytes(samples, prep).seconds(counts), sum((s.seconds(counts) for s in tiers), 0 * counts)
    # Storage slows down past its peak: threads that would only hinder fetch stay idle.
    best_fetch_s = np.minimum.accumulate(fetch_s)

    def made_s(preparing: int) -> Seconds:
        return float(prep_s[preparing - 1]), float(best_fetch_s[total - preparing - 1])

    # The smallest count at the peak: more threads make prep no faster and could fetch instead.
    preparing = min(prep.peak(most=total).count, total - 1)
    now = made_s(preparing)
    while not (why := _why_stay(now, made_s(preparing - 1) if preparing > 1 else None, step_s)):
        preparing -= 1
        now = made_s(preparing)
    fetching = int((fetch_s[: total - preparing] <= now[1]).argmax()) + 1  # the fewest that are as fast
    reason = (
        f"prep takes {units.seconds(now[0])} on {preparing} and fetch {units.seconds(now[1])} on {fetching} "
        f"of {total} threads: {why}"
    )
    return ThreadSplit(preparing, fetching, total - preparing - fetching, *now, reason)


def _why_stay(now: Seconds, then: Seconds | None, step_s: float) -> str:
    """Return why no thread moves from prep to fetch, from ``now`` to ``then``, or "" if one should."""
    if sum(now) <= step_s:
        return f"together within the step of {units.seconds(step_s)}"
    if now[0] > max(now[1], step_s):
        return "prep is the bottleneck"
    if then is None:
        return f"longer than the step of {units.seconds(step_s)}, but prep keeps one"
    if then[0] > max(then[1], step_s):
        return f"longer than the step of {units.seconds(step_s)}, but with one less prep would be the bottleneck"
    if not sum(then) < sum(now):
        return f"longer than the step of {units.seconds(step_s)}, but one more to fetch makes it no shorter"
    return ""


def divide_threads(total: int, *, lengths: Sequence[float]) -> list[int]:
    """Divide threads between queues in proportion to their lengths, in requests or seconds of work.

    An empty queue gets none, every other queue at least one; if there are too few, the longest queues get one each. The
    remainder goes to the largest fractions, and to the earlier queue in a tie. A longer queue never gets less than a
    shorter one.
    """
    waiting = [queue for queue, length in enumerate(lengths) if length > 0]
    counts = [0] * len(lengths)
    if total < len(waiting):
        for queue in sorted(waiting, key=lambda queue: -lengths[queue])[:total]:
            counts[queue] = 1
        return counts
    whole = sum(lengths)
    fair = [total * (length / whole) if length else 0.0 for length in lengths]  # this order avoids overflow
    for queue in waiting:
        # A queue without threads would never move.
        counts[queue] = max(1, math.floor(fair[queue]))
    while waiting and (left := total - sum(counts)):
        if left > 0:
            counts[max(waiting, key=lambda queue: (fair[queue] - counts[queue], -queue))] += 1
        else:
            above_one = [queue for queue in waiting if counts[queue] > 1]
            counts[max(above_one, key=lambda queue: (counts[queue] - fair[queue], queue))] -= 1
    return counts
