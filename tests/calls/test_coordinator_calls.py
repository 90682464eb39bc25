"""Calls to a coordinator survive its restart, and end in time if it does not return."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from mbaas.calls.client import await_restart, call, call_patiently
from mbaas.client.heartbeat import Heartbeat
from mbaas.errors import FeedGoneError, FeedRestartingError, WaitTimeoutError
from mbaas.ray_cluster import connection
from mbaas.tools.chaos.participants import alive, kill
from support.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import from this folder


@ray.remote(num_cpus=0, max_restarts=-1)
class Mortal:
    """Stand-in for a coordinator that can be slow, start late or fail."""

    def pid(self, after_s: float = 0.0) -> int:
        time.sleep(after_s)
        return os.getpid()

    def starts(self, calls: int) -> int:
        """Answer only after ``calls`` calls, like a coordinator that starts for longer than a call may wait."""
        self._calls = getattr(self, "_calls", 0) + 1
        if self._calls <= calls:
            raise FeedRestartingError("feed 'train' is still starting after 90 s")
        return self._calls

    def errs(self) -> None:
        raise KeyError("a bug")


@pytest.fixture
def mortal(ray_clean: None) -> Iterator[Any]:
    actor = Mortal.remote()
    yield actor
    ray.kill(actor)


def test_a_call_goes_on_with_who_comes_back(mortal: Any) -> None:
    before = call(mortal.pid.remote(), 30.0, "the test")
    kill(before)
    after = call_patiently(mortal, mortal.pid.remote, 30.0, "the test")
    assert after != before
    began = time.monotonic()
    await_restart(mortal, began + 30.0)
    assert time.monotonic() - began < 5.0, "no wait while the actor answers"


def test_whoever_waits_for_a_restart_gives_up_in_time(mortal: Any) -> None:
    pid = call(mortal.pid.remote(), 30.0, "the test")
    busy = mortal.pid.remote(60.0)
    began = time.monotonic()
    await_restart(mortal, began + 0.5)
    assert 0.4 < time.monotonic() - began < 5.0
    with pytest.raises(WaitTimeoutError, match=r"the test: the feed's coordinator did not answer within 200 ms"):
        call(busy, 0.2, "the test")
    kill(pid)
    with pytest.raises(
        FeedRestartingError, match=r"the test: the feed's coordinator does not answer, it may be restart"
    ):
        call(busy, 30.0, "the test")


def test_one_that_still_starts_is_asked_again_until_patience_ends(mortal: Any) -> None:
    assert call_patiently(mortal, lambda: mortal.starts.remote(3), 30.0, "the test") == 4
    began = time.monotonic()
    with pytest.raises(FeedRestartingError, match=r"^feed 'train' is still starting after 90 s; waited 500 ms for it$"):
        call_patiently(mortal, lambda: mortal.starts.remote(10**6), 0.5, "the test")
    assert 0.4 < time.monotonic() - began < 10.0


def test_when_patience_ends_it_is_said_if_the_cluster_has_ended(mortal: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not reported earlier, because the port of a restarting head node is closed too."""
    ended = "the Ray cluster at 10.0.0.1:6379, which this program joined and did not start, has ended"
    monkeypatch.setattr(connection, "lost_cluster", lambda: ended)
    busy = mortal.pid.remote(1.0)
    with pytest.raises(
        WaitTimeoutError, match=rf"^the test: the feed's coordinator did not answer within 200 ms: {ended}$"
    ):
        call(busy, 0.2, "the test")
    assert call_patiently(mortal, lambda: mortal.starts.remote(3), 30.0, "the test") >= 4
    with pytest.raises(FeedGoneError, match=rf"^the test: {ended}$"):
        call_patiently(mortal, lambda: mortal.starts.remote(10**6), 0.5, "the test")


def test_signs_of_life_go_on_after_an_internal_error_of_the_service_which_is_told_once(
    mortal: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Owner:
        pass

    beats, came = [0], threading.Event()

    def flush(_: Owner) -> None:
        beats[0] += 1
        if beats[0] <= 2:
            call(mortal.errs.remote(), 30.0, "the test")
        came.set()

    owner = Owner()
    with caplog.at_level(logging.ERROR):
        heart = Heartbeat(owner, flush, period_s=0.01, name="mbaas-heartbeat-test")
        try:
            assert came.wait(30.0), f"the thread has ended after {beats[0]} signs of life"
        finally:
            heart.end()
    (told,) = caplog.records
    assert told.getMessage().startswith("a heartbeat failed; mbaas-heartbeat-test continues")
    assert told.exc_text is not None
    assert "KeyError: 'a bug'" in told.exc_text
    caplog.clear()


def test_one_that_is_gone_for_good_is_not_waited_for(mortal: Any) -> None:
    pid = call(mortal.pid.remote(), 30.0, "the test")
    ray.kill(mortal)
    wait_until(lambda: not alive(pid), "its process is gone, and no call reaches it any more")
    began = time.monotonic()
    with pytest.raises(FeedGoneError, match=r"the test: the feed's coordinator is gone; it was stopped or its driver"):
        call_patiently(mortal, mortal.pid.remote, 30.0, "the test")
    assert time.monotonic() - began < 20.0
