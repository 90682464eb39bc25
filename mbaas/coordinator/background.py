"""What an actor does in the background, and what it does when it meets a bug."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import time
from collections.abc import Callable, Container, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from mbaas import bugs
from mbaas.coordinator.counters import Counters
from mbaas.core.story import InvariantError

Actor = TypeVar("Actor")
Event = TypeVar("Event", contravariant=True)
Instruction = TypeVar("Instruction")

VALIDATE = os.environ.get("MBAAS_VALIDATE") == "1"
"""Check every invariant of the core after every event (on in mbaas's own tests)."""

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


class StateMachine(Protocol[Event, Instruction]):
    """What decides: `mbaas.core.state.StagingState`, or `mbaas.core.supervisor.Supervisor`."""

    @property
    def instructions(self) -> list[Instruction]:
        """What the newest event has led to so far."""

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take an event, and return what must be done about it."""

    def validate(self) -> None:
        """Raise an `InvariantError` if it contradicts itself."""


def decide(machine: StateMachine[Event, Instruction], event: Event, errors: InternalErrors) -> list[Instruction]:
    """Give an event to a state machine, and return what must be done about it.

    If the machine meets a bug, what it has decided by then is done: it counts on that. Unless it contradicts itself, it
    goes on, and what it did not come to is made good for by later events.
    """
    with crash_if_broken():
        try:
            instructions = machine.handle(event, time.monotonic())
        except InvariantError:
            raise
        except Exception as error:  # a bug of ours, whatever it is
            errors.report(error)
            machine.validate()
            return machine.instructions
        if VALIDATE:
            machine.validate()
        return instructions


class InternalErrors:
    """The bugs that an actor meets, and goes on.

    Each is counted, and goes to the actor's log with its traceback, once for each line that it comes from.

    Args:
        counters: where it is counted, and noted in one sentence.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._log = bugs.BugLog()

    def report(self, error: BaseException, where: str = "") -> None:
        """Count an error, and log it if that was not done yet.

        Args:
            error: that of another process brings its traceback there along.
            where: words that say where it was met, if that was not in this process: "in lane 1".
        """
        self._counters.internal_errors += 1
        if self._log.log(error, where):
            met = f" {where}" if where else ""
            more = f"the coordinator's log has more: {bugs.in_short(error)}"
            self._counters.note(f"an internal error{met}, of which {more}")

    def report_bug(self, error: BaseException, where: str = "") -> None:
        """Report an error if it is a bug; for one that whoever met it deals with in any case."""
        if bugs.is_bug(error):
            self.report(error, where)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Report an error of one round of a loop, or of one step of several, and go on with the next: a feed without
        ticks would stand still unnoticed.
        """
        try:
            yield
        except Exception as error:  # a bug of ours, whatever it is
            self.report(error)


def reports_errors_of_calls(*, but: Container[str] = ()) -> Callable[[type[Actor]], type[Actor]]:
    """Make an actor's class report the bugs that its calls meet; the caller gets the error as well.

    What mbaas raises on purpose is no bug, and is not reported.

    Args:
        but: calls whose caller reports what they meet.

    Returns:
        A decorator, for a class that keeps its `InternalErrors` as ``_errors``; it goes below ``ray.remote``.
    """

    def decorate(actor: type[Actor]) -> type[Actor]:
        for name, method in inspect.getmembers(actor, inspect.iscoroutinefunction):
            if not name.startswith("_") and name not in but:
                setattr(actor, name, _reporting(method))
        return actor

    return decorate


def _reporting(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:  # whatever it is, it is the caller's; the feed goes on
            self._errors.report_bug(error, f"in the call {method.__name__!r}")
            raise

    return call


class BackgroundTasks:
    """Coroutines that run beside an actor's calls.

    One that ends in an error is a bug of ours. The actor goes on: whoever waits for what the coroutine would have
    reported has a deadline.

    Args:
        errors: where it is reported.
    """

    def __init__(self, errors: InternalErrors) -> None:
        self._errors = errors
        self._running: set[asyncio.Task[Any]] = set()

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a coroutine in the background, and return its task."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.report(error)
