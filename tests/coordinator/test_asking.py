"""A call that may go unanswered still reports a bug in the other process. No Ray is started."""

from __future__ import annotations

import asyncio

import pytest
import ray

from mbaas.coordinator import asking
from mbaas.coordinator.asking import answer_or_none
from mbaas.coordinator.background import InternalErrors
from mbaas.coordinator.counters import Counters
from mbaas.errors import StateError

WAIT_S = 10.0


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    """Counters of a process that has a coordinator."""
    monkeypatch.setattr(asking.BugReports, "errors", None)
    counters = Counters()
    asking.report_bugs_to(InternalErrors(counters))
    return counters


def met(cause: Exception) -> ray.exceptions.RayTaskError:
    """The error that a caller gets when a method of a cache node raised ``cause``."""
    trace = f'Traceback:\n  File "/there/node.py", line 7, in holdings\n{type(cause).__name__}: {cause}\n'
    return ray.exceptions.RayTaskError("holdings", trace, cause).as_instanceof_cause()


async def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize("cause", [KeyError("n9"), asyncio.TimeoutError("of a socket")])
def test_a_bug_of_who_is_asked_is_counted_and_told_once_and_there_is_no_answer(counters, cause):
    for count in (1, 2):
        assert asyncio.run(answer_or_none(fails(met(cause)), WAIT_S)) is None
        assert counters.internal_errors == count
    (note,) = counters.notes
    assert "in a worker or cache node" in note
    assert type(cause).__name__ in note


@pytest.mark.parametrize("error", [ray.exceptions.ActorDiedError(), met(StateError("it works for another feed"))])
def test_a_process_that_is_gone_and_a_refusal_are_no_bugs(counters, error):
    assert asyncio.run(answer_or_none(fails(error), WAIT_S)) is None
    assert counters.internal_errors == 0


def test_an_answer_that_comes_too_late_is_no_bug(counters):
    async def ask() -> None:
        assert await answer_or_none(asyncio.Event().wait(), 0.001) is None

    asyncio.run(ask())
    assert counters.internal_errors == 0


def test_a_bug_that_somebody_else_reports_is_not_counted_twice(counters):
    assert asyncio.run(answer_or_none(fails(met(KeyError("n9"))), WAIT_S, is_reported=True)) is None
    assert counters.internal_errors == 0


def test_what_is_answered_comes_as_it_is(counters):
    async def answers() -> int:
        return 9

    assert asyncio.run(answer_or_none(answers(), WAIT_S)) == 9
