"""Tells the service that a consumer lives while its trial computes."""

from __future__ import annotations

import logging
import threading
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
        arguments = (weakref.ref(owner), flush, period_s)
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        # wakes the thread when the owner is gone, so that it ends now and not a period later
        weakref.finalize(owner, self._wake.set)
        self._thread.start()

    def _run(self, owner_ref: weakref.ref[Owner], flush: Callable[[Owner], None], period_s: float) -> None:
        has_told, pause_s = False, min(FIRST_PAUSE_S, period_s)
        while True:
            self._wake.wait(pause_s)
            pause_s = min(2 * pause_s, period_s)
            self._wake.clear()
            owner = owner_ref()
            if owner is None or self._done or not ray.is_initialized():
                return
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

    def beat(self) -> None:
        """Say at once where the consumer stands: at an epoch's end its place there may be held for a successor."""
        self._wake.set()

    def end(self) -> None:
        """End the thread, and wait until it has ended."""
        self._done = True
        self._wake.set()
        # A thread cannot join itself; and a flush to a coordinator that does not answer may last longer than a trial
        # that closes its loader should have to wait.
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
