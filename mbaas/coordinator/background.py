"""What an actor does in the background, and what it does when it finds a bug in itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from mbaas.core.story import InvariantError

VALIDATE = os.environ.get("MBAAS_VALIDATE") == "1"
"""Check every invariant of the core after every event (on in mbaas's own tests)."""

INTERNAL_ERROR = "an internal error; the feed goes on"
BROKEN = "a bug in mbaas: this coordinator contradicts itself, and starts anew"

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def crash_if_broken() -> Iterator[None]:
    """End this process if the core finds that it contradicts itself.

    What it knows is not to be trusted then, and to go on could cost a sample. Ray starts the actor again, and it takes
    over what is left, as after any other crash: consumers, caches and workers know where they are.
    """
    try:
        yield
    except InvariantError:
        _log.critical(BROKEN, exc_info=True)
        logging.shutdown()
        os._exit(1)


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
        _log.error(INTERNAL_ERROR, exc_info=error)
        self._note(f"an internal error, of which the coordinator's log has more: {type(error).__name__}: {error}")
