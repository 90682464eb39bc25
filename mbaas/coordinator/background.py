"""Background tasks of an actor, its handling of bugs, and its waits for answers of other actors."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import ray

from mbaas.coordinator.counters import Counters
from mbaas.core.story import InvariantError
from mbaas.ray_cluster import bugs

Actor = TypeVar("Actor")
Event = TypeVar("Event")
Handled = TypeVar("Handled", contravariant=True)
Instruction = TypeVar("Instruction")

VALIDATE = os.environ.get("MBAAS_VALIDATE") == "1"
"""Check every invariant of the core after every event (on in mbaas's own tests)."""

BROKEN = "inconsistent state, a bug in mbaas; restarting the coordinator"

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def crash_if_broken() -> Iterator[None]:
    """End this process if the core detects an inconsistent state, because continuing could lose a sample.

    Ray restarts the actor, which takes over as after any other crash: consumers, caches and workers have their
    positions.
    """
    try:
        yield
    except InvariantError:
        _log.critical(BROKEN, exc_info=True)
        logging.shutdown()
        os._exit(1)


class StateMachine(Protocol[Handled, Instruction]):
    """A pure decision core: `mbaas.core.staging.state.StagingState` or `mbaas.core.cluster.supervisor.Supervisor`."""

    @property
    def instructions(self) -> list[Instruction]:
        """Instructions so far for the newest event."""

    def handle(self, event: Handled, now: float) -> list[Instruction]:
        """Process an event, and return the instructions for it."""

    def validate(self) -> None:
        """Raise an `InvariantError` if the state is inconsistent."""


def decide(machine: StateMachine[Event, Instruction], event: Event, errors: InternalErrors) -> list[Instruction]:
    """Pass an event to a state machine, and return its instructions.

    After a bug, return the instructions issued so far, because the state already assumes them. If the state is
    consistent the machine continues, and later events repair the rest.
    """
    with crash_if_broken():
        try:
            instructions = machine.handle(event, time.monotonic())
        except InvariantError:
            raise
        except Exception as error:  # any bug of ours
            errors.report(error)
            machine.validate()
            return machine.instructions
        if VALIDATE:
            machine.validate()
        return instructions


class Driver(Generic[Event, Instruction]):
    """Passes events to a state machine, one after another, and has its instructions carried out."""

    def __init__(
        self,
        machine: StateMachine[Event, Instruction],
        carry_out: Callable[[Instruction], None],
        errors: InternalErrors,
    ) -> None:
        self._machine, self._carry_out, self._errors = machine, carry_out, errors
        self._events: deque[Event] = deque()
        self._is_busy = False

    def send(self, event: Event) -> list[Instruction]:
        """Pass an event to the machine, have its instructions carried out, and return them.

        An event that arises meanwhile is passed on after this one, and its call returns an empty list: the machine must
        be done with one event before it gets the next.
        """
        if self._is_busy:
            self._events.append(event)
            return []
        self._is_busy = True
        try:
            instructions = self._send(event)
            while self._events:
                self._send(self._events.popleft())
        finally:
            self._is_busy = False
        return instructions

    def _send(self, event: Event) -> list[Instruction]:
        instructions = decide(self._machine, event, self._errors)
        for instruction in instructions:
            # After a bug, carry out the remaining instructions: the machine assumes them, and treats a missing outcome
            # as a failure.
            with self._errors.reported():
                self._carry_out(instruction)
        return instructions


class InternalErrors:
    """Bugs that an actor survives. Each is counted, and logged with its traceback once per line of origin.

    Attributes:
        of_process: the errors of this process's coordinator, to which `answer_or_none` reports; None without one.
    """

    of_process: ClassVar[InternalErrors | None] = None

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._log = bugs.BugLog()

    def report(self, error: BaseException, where: str = "") -> None:
        """Count an error, and log it if its origin is new.

        ``where`` is its place if in another process, such as "in prep-1". The error carries its traceback there.
        """
        self._counters.internal_errors += 1
        if self._log.log(error, where):
            met = f" {where}" if where else ""
            more = f"the coordinator's log has more: {bugs.in_short(error)}"
            self._counters.note(f"an internal error{met}, of which {more}")

    def report_bug(self, error: BaseException, where: str = "") -> None:
        """Report an error only if it is a bug. For errors that the caller handles in any case."""
        if bugs.is_bug(error):
            self.report(error, where)

    @contextlib.contextmanager
    def reported(self) -> Iterator[None]:
        """Report an error of one iteration or step, and continue with the next. Without ticks a feed would stall."""
        try:
            yield
        except Exception as error:  # any bug of ours
            self.report(error)


def reports_errors_of_calls(actor: type[Actor]) -> type[Actor]:
    """Make a class report bugs in its calls; a decorator. The caller gets the error as well.

    Errors that mbaas raises on purpose are not reported. The class has its `InternalErrors` in ``_errors``. Apply the
    decorator below ``ray.remote``.
    """
    for name, method in inspect.getmembers(actor, inspect.iscoroutinefunction):
        if not name.startswith("_"):
            setattr(actor, name, _reporting(method))
    return actor


def _reporting(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await method(self, *args, **kwargs)
        except Exception as error:  # any error: it is raised in the caller, and the feed continues
            self._errors.report_bug(error, f"in the call {method.__name__!r}")
            raise

    return call


async def answer_or_none(ref: Any, within_s: float, *, is_reported: bool = False) -> Any:
    """Wait for an actor's answer; return None after a timeout or an error. A bug in the call is reported.

    ``is_reported`` is True if bugs in the call are reported elsewhere, so that they are not counted twice.
    """
    try:
        return await asyncio.wait_for(ref, within_s)
    except (asyncio.TimeoutError, ray.exceptions.RayError) as error:
        # A method's exception is both of its own class and a Ray error, so a timeout inside the method is not a late
        # answer.
        errors = InternalErrors.of_process
        if isinstance(error, ray.exceptions.RayError) and not is_reported and errors is not None:
            errors.report_bug(error, "in a worker or cache node")
        return None


class BackgroundTasks:
    """Coroutines that run in the background of an actor's calls.

    An error in one is a bug of ours. The actor continues: every wait for the coroutine's outcome has a timeout.
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
