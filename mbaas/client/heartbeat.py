"""Sends a consumer's heartbeats while its trial computes."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

import ray

from mbaas.errors import MbaasError

_log = logging.getLogger(__name__)

Owner = TypeVar("Owner")

FIRST_PAUSE_S = 0.25
"""Pause before the first heartbeat, in seconds. Each further pause is twice as long, up to the period.

So the coordinator soon measures a trial's pace, which decides on sharing minibatches (`mbaas.core.staging.pace`).
"""


LINGER_S = 0.25
"""Delay in seconds of the report after a short epoch. A trial that starts the next epoch meanwhile reports later.

On an overloaded machine starting an epoch takes this long.
"""

GATHER_S = 2.0
"""Shortest pause between heartbeats of a trial that continues, however short its epochs are, in seconds.

One heartbeat costs the trial, the coordinator and Ray 6 to 7 ms of CPU time together (docs/scaling.md).
"""


class Pulse:
    """Computes when the next heartbeat is due; no I/O. All times are in seconds."""

    def __init__(self, now: float, period_s: float) -> None:
        self._period_s, self._pause_s = period_s, min(FIRST_PAUSE_S, period_s)
        self._sent, self._regular, self._news = now, now + self._pause_s, math.inf

    @property
    def due(self) -> float:
        return min(self._regular, self._news)

    def sent(self, now: float) -> None:
        """Record a heartbeat, which reported everything so far."""
        self._pause_s = min(2 * self._pause_s, self._period_s)
        self._sent, self._regular, self._news = now, now + self._pause_s, math.inf

    def epoch_ends(self, now: float) -> None:
        """Record the end of an epoch."""
        self._news = min(self._news, now + LINGER_S, self._sent + GATHER_S)

    def goes_on(self) -> None:
        """Record the start of the next epoch: the consumer's requests for blocks report its progress."""
        self._news = max(self._news, self._sent + GATHER_S)


class Heartbeat:
    """A thread that keeps a consumer's lease alive, and ends with the consumer.

    It has only a weak reference to its owner, so a loader dropped without `close` loses its lease. ``flush`` sends a
    heartbeat of the owner, at least every ``period_s`` seconds.
    """

    def __init__(self, owner: Owner, flush: Callable[[Owner], None], *, period_s: float, name: str) -> None:
        self._done = False
        self._wake = threading.Event()
        self._pulse, self._lock = Pulse(time.monotonic(), period_s), threading.Lock()
        arguments = (weakref.ref(owner), flush)
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        # wakes the thread when the owner is gone, so that it ends now and not a period later
        weakref.finalize(owner, self._wake.set)
        self._thread.start()

    def _run(self, owner_ref: weakref.ref[Owner], flush: Callable[[Owner], None]) -> None:
        has_told = False
        while True:
            with self._lock:
                pause_s = self._pulse.due - time.monotonic()
            if pause_s > 0:
                self._wake.wait(pause_s)
                self._wake.clear()
                if owner_ref() is not None and not self._done:
                    continue  # the due time may have changed meanwhile
            owner = owner_ref()
            if owner is None or self._done or not ray.is_initialized():
                return
            with self._lock:
                self._pulse.sent(time.monotonic())  # before `flush`: an epoch may end meanwhile
            try:
                flush(owner)
            except MbaasError:
                pass  # the trial's next call raises the same error, visibly
            except Exception:
                # For example an internal error of the service. Without this thread a healthy consumer would lose its
                # session, and the next heartbeat may succeed.
                if not has_told:
                    _log.exception("a heartbeat failed; %s continues, and logs this once", self._thread.name)
                has_told = True
            del owner  # this frame waits next and would keep it alive

    def epoch_ends(self) -> None:
        """Report the position soon: the epoch may be the consumer's last, and its place may be held for a successor."""
        with self._lock:
            self._pulse.epoch_ends(time.monotonic())
        self._wake.set()

    def goes_on(self) -> None:
        """Record the start of the next epoch; the report of the last one can wait."""
        with self._lock:
            self._pulse.goes_on()

    def end(self) -> None:
        """End the thread, and wait until it has ended."""
        self._done = True
        self._wake.set()
        # A thread cannot join itself. And a flush to a silent coordinator may last longer than closing a loader should
        # take.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
