"""Calls to a coordinator that dies, comes back, or does not: with an actor that stands for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from mbaas.chaos.participants import alive, kill
from mbaas.client.rpc import await_restart, call, call_patiently
from mbaas.errors import FeedGoneError, FeedRestartingError, WaitTimeoutError
from support.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers run where this folder is not on the path


@ray.remote(num_cpus=0, max_restarts=-1)
class Mortal:
    """Tells its process id, and can be told to take its time."""

    def pid(self, after_s: float = 0.0) -> int:
        time.sleep(after_s)
        return os.getpid()


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
    assert time.monotonic() - began < 5.0, "who answers is not waited for"


def test_whoever_waits_for_a_restart_gives_up_in_time(mortal: Any) -> None:
    pid = call(mortal.pid.remote(), 30.0, "the test")
    busy = mortal.pid.remote(60.0)
    began = time.monotonic()
    await_restart(mortal, began + 0.5)
    assert 0.4 < time.monotonic() - began < 5.0
    with pytest.raises(WaitTimeoutError, match=r"the test: the feed's coordinator did not answer within 0.2 s"):
        call(busy, 0.2, "the test")
    kill(pid)
    with pytest.raises(
        FeedRestartingError, match=r"the test: the feed's coordinator does not answer, it may be restart"
    ):
        call(busy, 30.0, "the test")


def test_one_that_is_gone_for_good_is_not_waited_for(mortal: Any) -> None:
    pid = call(mortal.pid.remote(), 30.0, "the test")
    ray.kill(mortal)
    wait_until(lambda: not alive(pid), "its process is gone, and no call reaches it any more")
    began = time.monotonic()
    with pytest.raises(FeedGoneError, match=r"the test: the feed's coordinator is gone; it was stopped or its driver"):
        call_patiently(mortal, mortal.pid.remote, 30.0, "the test")
    assert time.monotonic() - began < 20.0
