"""What an actor does in the background, and what it does when it finds a bug in itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import traceback
from collections.abc import Coroutine, Iterator
from typing import Any

from mbaas.coordinator.counters import Counters
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

    One that ends in an error is a bug of ours. It is counted, and goes to the actor's log with its traceback, once for
    each place that it comes from. The actor goes on: whoever waits for what the coroutine would have reported has a
    deadline.

    Args:
        counters: where it is counted, and noted in one sentence.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._running: set[asyncio.Task[Any]] = set()
        self._logged: set[tuple[str, str, int]] = set()  # error, file and line: a loop meets the same one every round

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
        self._counters.internal_errors += 1
        *_, last = traceback.extract_tb(error.__traceback__)
        place = type(error).__name__, last.filename, last.lineno or 0
        if place in self._logged:
            return
        self._logged.add(place)
        _log.error(INTERNAL_ERROR, exc_info=error)
        self._counters.note(f"an internal error, of which the coordinator's log has more: {place[0]}: {error}")
