"""What an actor does in the background."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

_log = logging.getLogger(__name__)


class BackgroundTasks:
    """Coroutines that run beside an actor's calls.

    One that ends in an error is a bug of ours. It goes to the actor's log with its traceback, and the actor goes on:
    whoever waits for what the coroutine would have reported has a deadline.

    Args:
        note: told of it in one sentence.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(error)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Report an error of one round of a loop, which goes on: a feed without ticks would stand still unnoticed."""
        try:
            yield
        except Exception as error:  # a bug of ours, whatever it is
            self._report(error)

    def _report(self, error: BaseException) -> None:
        _log.error("an internal error; the feed goes on", exc_info=error)
        self._note(f"an internal error, of which the coordinator's log has more: {type(error).__name__}: {error}")
