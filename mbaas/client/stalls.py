"""A consumer's waits: their causes, lengths and timeouts, and the bytes that it read. No I/O; times are arguments."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from mbaas.model.waits import CLASSES, WaitCounts, wait_class
from mbaas.wire.consumers import MOST_WANTED, ReadBytes, StepWait

REMEMBERED_BLOCKS = 16
"""Blocks whose fetch times are kept. Several blocks arrive together, and only the first is waited for.

The cost of fetching the others shows in the wait for the next call's blocks.
"""


class StallAttribution:
    """Divides waits between prep and fetch by the differential method (DS-Analyzer, VLDB 2021), block by block.

    While a consumer waits, all workers of its feed are busy: they prepare, or wait for bytes. Without the waits for
    bytes a block would have arrived sooner, by their share of the time since the previous block. The gain is at most
    the workers' wait for this block's bytes. The part of the consumer's wait explained by this gain is fetch stall.
    """

    def __init__(self) -> None:
        self._uncharged_s: deque[float] = deque(maxlen=REMEMBERED_BLOCKS)
        """For each recent block, the seconds that local bytes would have saved, less those charged already."""

    def fetch_stall_s(self, waited_s: float, *, elapsed_s: float, fetch_s: float, prep_s: float) -> float:
        """Return the fetch stall within the wait for a block, in seconds.

        ``elapsed_s`` is the time since the previous block was available, including this wait. ``fetch_s`` is the time
        that workers waited for the block's bytes, ``prep_s`` the time that they prepared it.
        """
        busy_s = fetch_s + prep_s
        # The workers' share of waiting, because many workers make the blocks that arrive in ``elapsed_s``.
        self._uncharged_s.append(min(fetch_s, elapsed_s * fetch_s / busy_s) if busy_s > 0 else 0.0)
        left_s = waited_s
        while left_s > 0 and self._uncharged_s:
            left_s -= self._uncharged_s.pop()
        if left_s < 0:  # the last one explains more than this wait; the rest may explain a later wait
            self._uncharged_s.append(-left_s)
        return waited_s - max(0.0, left_s)


@dataclass
class StreamStats:
    """The waits of a consumer and the bytes that it read, summed over its life."""

    wait_s: float = 0.0  # seconds without an available block
    # fetch_stall_s, peer_stall_s: the parts that are fetch stall (`StallAttribution`), or caused by prep that was idle
    # because of other trials (`mbaas.core.peer_idle`)
    fetch_stall_s: float = 0.0
    peer_stall_s: float = 0.0
    prepared: int = 0  # samples in blocks that no consumer had received before
    read_bytes: ReadBytes = field(default_factory=ReadBytes)
    _attribution: StallAttribution = field(default_factory=StallAttribution, repr=False)
    _had_block_at: float | None = field(default=None, repr=False)

    def block_came(
        self, began: float, ended: float, *, fetch_s: float, prep_s: float, peer_idle_s: float = 0.0
    ) -> None:
        """Count a wait for a block, from ``began`` to ``ended`` on one clock.

        ``fetch_s`` and ``prep_s`` are as in `StallAttribution.fetch_stall_s`, ``peer_idle_s`` as in `Delivery`.
        """
        last = began if self._had_block_at is None else self._had_block_at
        self.wait_s += ended - began
        peers_s = min(ended - began, peer_idle_s)
        self.peer_stall_s += peers_s
        # without that idle time the wait and the interval would be shorter by as much
        self.fetch_stall_s += self._attribution.fetch_stall_s(
            ended - began - peers_s, elapsed_s=ended - last - peers_s, fetch_s=fetch_s, prep_s=prep_s
        )
        self._had_block_at = ended


class MinibatchWaits:
    """The waits of a loader for its minibatches. The heartbeat thread reads them, too.

    A step ends when its minibatch is handed to the trial, and begins when the minibatch before it was. Only the steps
    of a rank are kept one by one, until they are acknowledged.
    """

    def __init__(self, *, now: float) -> None:
        self._counts = [0] * CLASSES
        self._handed_out = now
        self._wait_s = 0.0  # all waits up to then
        self._steps: deque[StepWait] = deque(maxlen=MOST_WANTED)
        self._made = 0  # number of the last one in ``_steps``, from 1
        self._lock = threading.Lock()

    def hand_out(self, wait_s: float, now: float, *, step: int | None) -> None:
        """Count a minibatch that is handed out.

        Args:
            wait_s: sum of all waits of the loader so far, in seconds.
            now: the time, on one clock.
            step: number of the step among all steps of the trial; None for a single consumer.
        """
        waited_s, lasted_s = wait_s - self._wait_s, now - self._handed_out
        self._counts[wait_class(waited_s)] += 1
        if step is not None:
            percent = min(100, round(100 * waited_s / lasted_s)) if lasted_s > 0 else 0
            with self._lock:
                self._steps.append((step, percent))
                self._made += 1
        self._wait_s, self._handed_out = wait_s, now

    @property
    def counts(self) -> WaitCounts:
        """Minibatches by the time waited for each."""
        return WaitCounts(tuple(self._counts))

    def unreported(self) -> tuple[int, tuple[StepWait, ...]]:
        """Return the steps that have not been acknowledged, and the number of steps before them."""
        with self._lock:
            return self._made - len(self._steps), tuple(self._steps)

    def acknowledge(self, steps: int) -> None:
        """Forget the loader's first ``steps`` steps."""
        with self._lock:
            while self._steps and self._made - len(self._steps) < steps:
                self._steps.popleft()


class Patience:
    """One wait of a consumer. It ends when the feed has made no progress for ``timeout_s``.

    It is logged after ``first_word_s`` seconds, and again each time it has doubled.
    """

    def __init__(self, timeout_s: float, now: float, *, first_word_s: float) -> None:
        self.timeout_s = timeout_s
        self._began = self._since = now  # start of the wait, and of the time without progress
        self._progress: int | None = None
        self._word_s = first_word_s  # duration of the wait at its next log entry

    def saw(self, progress: int, now: float) -> None:
        """Record the feed's progress number; only a change is progress."""
        if progress != self._progress:
            self._progress, self._since = progress, now

    def waited_s(self, now: float) -> float:
        """Return the duration of the wait so far, in seconds."""
        return now - self._began

    def left_s(self, now: float) -> float:
        """Return the seconds until the timeout, unless the feed makes progress; 0 if it has passed."""
        return max(0.0, self._since + self.timeout_s - now)

    def until_word_s(self, now: float) -> float:
        """Return the seconds until the next log entry."""
        return max(0.0, self._began + self._word_s - now)

    def is_to_be_told(self, now: float) -> bool:
        """Return whether the wait is due to be logged now. True once per log entry."""
        if self.waited_s(now) < self._word_s:
            return False
        while self._word_s <= self.waited_s(now):
            self._word_s *= 2
        return True
