"""What an actor does in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Jobs:
    """Coroutines that run beside an actor's calls.

    Args:
        fail: told in one clause when one of them ends in an error.
    """

    def __init__(self, fail: Callable[[str], None]) -> None:
        self._fail = fail
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background."""
        job = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(job)
        job.add_done_callback(self._done)

    def _done(self, job: asyncio.Task[Any]) -> None:
        self._running.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None:
            self._fail(f"an internal error: {type(error).__name__}: {error}")
