"""Every bug is counted, noted and logged with its traceback, and no other error is. No Ray is started."""

from __future__ import annotations

import asyncio
import logging
import os

import pytest
import ray

from mbaas.coordinator.background import InternalErrors, answer_or_none, decide, reports_errors_of_calls
from mbaas.coordinator.counters import Counters
from mbaas.core.story import InvariantError
from mbaas.errors import BadSampleError, ConfigError, StateError
from mbaas.ray_cluster.bugs import in_short, is_bug, log_bug

DIED = ray.exceptions.ActorDiedError()


def from_afar(cause: Exception, line: int = 7) -> ray.exceptions.RayTaskError:
    """An error raised by a call in another process, as an ``await`` raises it here."""
    trace = f'Traceback (most recent call last):\n  File "/there/worker.py", line {line}, in prepare\n    images[9]\n'
    return ray.exceptions.RayTaskError(
        "prepare", f"{trace}{type(cause).__name__}: {cause}", cause
    ).as_instanceof_cause()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyError(9), True),
        (ConfigError("rank must be a whole number"), False),
        (BadSampleError("a.png", "empty"), False),
        (DIED, False),
        (ray.exceptions.GetTimeoutError("late"), False),
        (from_afar(KeyError(9)), True),
        (from_afar(from_afar(KeyError(9))), True),
        (from_afar(from_afar(StateError("it is restarting"))), False),
        (from_afar(StateError("it works for another feed")), False),
        (from_afar(DIED), False),
        (from_afar(ray.exceptions.RayError("an error that cannot be sent")), True),
    ],
)
def test_a_bug_is_neither_what_mbaas_says_on_purpose_nor_the_end_of_a_process(error, expected):
    assert is_bug(error) is expected


def test_an_error_in_short_is_its_kind_and_its_last_line():
    assert in_short(from_afar(KeyError("n9"))) == "KeyError: 'n9'"
    assert in_short(from_afar(from_afar(KeyError("n9")))) == "KeyError: 'n9'"
    assert in_short(RuntimeError("what Ray says\nof the stack\nit failed")) == "RuntimeError: it failed"
    assert in_short(RuntimeError()) == "RuntimeError"


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_each_error_is_counted_and_each_place_is_logged_and_noted_once(caplog):
    counters = Counters()
    errors = InternalErrors(counters)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            errors.report(raised(RuntimeError("here")))
        for line in (7, 7, 8):
            errors.report(from_afar(KeyError("there"), line), "in prep-0")
    assert counters.internal_errors == 6
    assert [note.partition(" ")[2] for note in counters.notes] == [
        "an internal error, of which the coordinator's log has more: RuntimeError: here",
        "an internal error in prep-0, of which the coordinator's log has more: KeyError: 'there'",
        "an internal error in prep-0, of which the coordinator's log has more: KeyError: 'there'",
    ]
    assert caplog.text.count("raise error\n") == 1, "with its traceback"
    assert [caplog.text.count(f'File "/there/worker.py", line {line}, in prepare') for line in (7, 8)] == [1, 1]


def test_a_process_without_a_counter_logs_bugs_only_and_each_once(caplog):
    with caplog.at_level(logging.ERROR):
        for error in (DIED, from_afar(StateError("it is restarting")), *[from_afar(KeyError("lent"), 11)] * 3):
            log_bug(error, "in the cache of node 8cda1351")
    assert [record.getMessage() for record in caplog.records] == [
        "an internal error; the feed goes on (in the cache of node 8cda1351)"
    ]
    assert caplog.text.count('File "/there/worker.py", line 11, in prepare') == 1


class Machine:
    """A state machine that may meet a bug and may be inconsistent."""

    def __init__(self, *, met: Exception | None = None, broken: bool = False) -> None:
        self._met, self._broken = met, broken
        self.instructions: list[str] = []

    def handle(self, event: str, now: float) -> list[str]:
        self.instructions = [f"prepare for {event}"]
        if self._met is not None:
            raise self._met
        return [*self.instructions, "deliver"]

    def validate(self) -> None:
        if self._broken:
            raise InvariantError("it contradicts itself")


def test_what_was_decided_before_a_bug_is_done_and_the_machine_goes_on(caplog):
    counters = Counters()
    errors = InternalErrors(counters)
    assert decide(Machine(), "an ask", errors) == ["prepare for an ask", "deliver"]
    assert counters.internal_errors == 0
    assert decide(Machine(met=KeyError("n9")), "an ask", errors) == ["prepare for an ask"]
    assert counters.internal_errors == 1
    assert "KeyError: 'n9'" in caplog.text


@pytest.mark.parametrize("met", [KeyError("n9"), InvariantError("a state that cannot be")])
def test_a_machine_that_contradicts_itself_after_a_bug_ends_its_process(monkeypatch, met):
    """Ray then restarts the actor, as for any inconsistent state."""

    def end(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", end)
    with pytest.raises(SystemExit, match="1"):
        decide(Machine(met=met, broken=True), "an ask", InternalErrors(Counters()))


class Base:
    async def inherited(self) -> None:
        raise KeyError("inherited")


@reports_errors_of_calls
class Actor(Base):
    def __init__(self) -> None:
        self.counters = Counters()
        self._errors = InternalErrors(self.counters)

    async def own(self, value: int, *, more: int) -> int:
        return value + more

    async def refuse(self) -> None:
        raise ConfigError("value must be 1, got 2")

    async def waits(self) -> None:
        await asyncio.Event().wait()


def test_what_calls_of_an_actor_meet_is_reported_and_their_caller_gets_it(caplog):
    actor = Actor()
    assert asyncio.run(actor.own(1, more=2)) == 3
    for call, error, count in (("refuse", ConfigError, 0), ("inherited", KeyError, 1)):
        with pytest.raises(error):
            asyncio.run(getattr(actor, call)())
        assert actor.counters.internal_errors == count
    assert 'raise KeyError("inherited")' in caplog.text
    assert [note.partition(" ")[2] for note in actor.counters.notes] == [
        "an internal error in the call 'inherited', of which the coordinator's log has more: KeyError: 'inherited'"
    ]


def test_a_call_that_is_given_up_is_no_error():
    async def give_up(actor: Actor) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(actor.waits(), 0.01)

    actor = Actor()
    asyncio.run(give_up(actor))
    assert actor.counters.internal_errors == 0


def test_the_next_life_of_a_class_is_not_changed():
    """`ray.remote` derives a class from a decorated one, and each call is still reported once."""
    actor = Actor()

    class Made(Actor):
        pass

    made = Made()
    for one in (actor, made):
        with pytest.raises(KeyError):
            asyncio.run(one.inherited())
        assert one.counters.internal_errors == 1
    with pytest.raises(KeyError):
        asyncio.run(Base().inherited())


# ---- a call that may go unanswered still reports a bug in the other process ----

WAIT_S = 10.0


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    """Counters of a process that has a coordinator."""
    counters = Counters()
    monkeypatch.setattr(InternalErrors, "of_process", InternalErrors(counters))
    return counters


async def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("cause", [KeyError("n9"), asyncio.TimeoutError("of a socket")])
def test_a_bug_of_who_is_asked_is_counted_and_told_once_and_there_is_no_answer(counters, cause):
    for count in (1, 2):
        assert asyncio.run(answer_or_none(fails(from_afar(cause)), WAIT_S)) is None
        assert counters.internal_errors == count
    (note,) = counters.notes
    assert "in a worker or cache node" in note
    assert type(cause).__name__ in note


@pytest.mark.parametrize("error", [ray.exceptions.ActorDiedError(), from_afar(StateError("it works for another feed"))])
def test_a_process_that_is_gone_and_a_refusal_are_no_bugs(counters, error):
    assert asyncio.run(answer_or_none(fails(error), WAIT_S)) is None
    assert counters.internal_errors == 0


def test_an_answer_that_comes_too_late_is_no_bug(counters):
    async def ask() -> None:
        assert await answer_or_none(asyncio.Event().wait(), 0.001) is None

    asyncio.run(ask())
    assert counters.internal_errors == 0


def test_a_bug_that_somebody_else_reports_is_not_counted_twice(counters):
    assert asyncio.run(answer_or_none(fails(from_afar(KeyError("n9"))), WAIT_S, is_reported=True)) is None
    assert counters.internal_errors == 0


def test_what_is_answered_comes_as_it_is(counters):
    async def answers() -> int:
        return 9

    assert asyncio.run(answer_or_none(answers(), WAIT_S)) == 9
