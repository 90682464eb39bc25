"""Tells the service that a consumer lives while its trial computes."""

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
"""The pause before the first sign of life. Each further one is twice as long, up to the longest. So the coordinator
soon learns how fast a trial goes, which decides with whom it shares its minibatches (`mbaas.core.pace`).
"""


LINGER_S = 0.25
"""How long the end of a short epoch is kept back: a trial that begins the next one meanwhile can tell of it later. On a
machine with too much to do that takes a while.
"""

GATHER_S = 2.0
"""Shortest pause between signs of life of a trial that goes on, however short its epochs are. One takes the trial, the
coordinator and Ray 6 to 7 ms of CPU time together (docs/scaling.md).
"""


class Pulse:
    """When the next sign of life is due; pure.

    Args:
        now: in seconds, as all times here.
        period_s: longest pause.

    Attributes:
        due: the time, which may have passed.
    """

    def __init__(self, now: float, period_s: float) -> None:
        self._period_s, self._pause_s = period_s, min(FIRST_PAUSE_S, period_s)
        self._sent, self._regular, self._news = now, now + self._pause_s, math.inf

    @property
    def due(self) -> float:
        return min(self._regular, self._news)

    def sent(self, now: float) -> None:
        """Note that one was given, which told all that there was."""
        self._pause_s = min(2 * self._pause_s, self._period_s)
        self._sent, self._regular, self._news = now, now + self._pause_s, math.inf

    def epoch_ends(self, now: float) -> None:
        """Note that an epoch ended."""
        self._news = min(self._news, now + LINGER_S, self._sent + GATHER_S)

    def goes_on(self) -> None:
        """Note that the next epoch has begun: who asks for blocks tells by that what it is done with."""
        self._news = max(self._news, self._sent + GATHER_S)


class Heartbeat:
    """A thread that keeps a consumer's lease alive, and ends with the consumer.

    Args:
        owner: the consumer. The thread holds no reference to it, so that a loader which was forgotten without `close`
            ends, and its lease with it.
        flush: tells the service that ``owner`` lives; called with it.
        period_s: longest pause between two signs of life.
        name: the thread's name.
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
                    continue  # what is due now may have changed meanwhile
            owner = owner_ref()
            if owner is None or self._done or not ray.is_initialized():
                return
            with self._lock:
                self._pulse.sent(time.monotonic())  # before it: an epoch may end meanwhile
            try:
                flush(owner)
            except MbaasError:
                pass  # the trial's own next call raises it, where it can be seen
            except Exception:
                # Whatever it is, an internal error of the service among others: without this thread a consumer that is
                # well would lose its session, and the next sign of life may be heard.
                if not has_told:
                    _log.exception("a sign of life was not heard; %s goes on, and says this once", self._thread.name)
                has_told = True
            del owner  # this frame waits next, and would keep it alive meanwhile

    def epoch_ends(self) -> None:
        """Say soon where the consumer stands: it may be its last epoch, and its place may be held for a successor."""
        with self._lock:
            self._pulse.epoch_ends(time.monotonic())
        self._wake.set()

    def goes_on(self) -> None:
        """Note that the next epoch has begun: what is to be said of the last one can wait."""
        with self._lock:
            self._pulse.goes_on()

    def end(self) -> None:
        """End the thread, and wait until it has ended."""
        self._done = True
        self._wake.set()
        # A thread cannot join itself; and a flush to a coordinator that does not answer may last longer than a trial
        # that closes its loader should have to wait.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
