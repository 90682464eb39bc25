"""Signs of life while a trial computes."""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Protocol

import ray

from mbaas.errors import MbaasError


class Alive(Protocol):
    """Who has a lease to keep."""

    def flush(self) -> None:
        """Tell the service that it lives."""


class Heartbeat:
    """A thread that keeps a consumer's lease alive, and ends with it.

    Args:
        consumer: who is kept alive as long as somebody else refers to it.
        period_s: longest pause between two signs of life.
        name: of the thread.
    """

    def __init__(self, consumer: Alive, *, period_s: float, name: str) -> None:
        self._consumer = weakref.ref(consumer)
        self._done = False
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(period_s,), name=name, daemon=True)
        weakref.finalize(consumer, self._wake.set)
        self._thread.start()

    def _run(self, period_s: float) -> None:
        while True:
            self._wake.wait(period_s)
            self._wake.clear()
            consumer = self._consumer()
            if consumer is None or self._done or not ray.is_initialized():
                return
            with contextlib.suppress(MbaasError):  # the trial's own next call raises it, where it can be seen
                consumer.flush()
            del consumer

    def beat(self) -> None:
        """Say at once where the consumer stands: at an epoch's end its place there may be held for a successor."""
        self._wake.set()

    def end(self) -> None:
        """End the thread, and wait until it has ended."""
        self._done = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5.0)
