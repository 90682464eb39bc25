"""Only transient faults are retried, for a bounded time, with random pauses of growing length."""

from __future__ import annotations

import asyncio
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, S3FileSystem

from mbaas.base.units import seconds
from mbaas.dataset.storage.faults import may_pass, s3_attempts
from mbaas.dataset.storage.retry import retry_async, retrying
from mbaas.errors import BadSampleError, StorageError, WaitTimeoutError

START_S = 100.0


class World:
    """A clock that only sleeping and attempts move, seeded randomness, and an attempt that raises the given errors."""

    def __init__(self, *errors: Exception, attempt_s: float = 0.0) -> None:
        self.errors = list(errors)
        self.attempt_s = attempt_s
        self.now = START_S
        self.pauses: list[float] = []
        self.calls = 0

    def sleep(self, pause_s: float) -> None:
        self.pauses.append(pause_s)
        self.now += pause_s

    def attempt(self) -> str:
        self.calls += 1
        self.now += self.attempt_s
        if self.errors:
            raise self.errors.pop(0)
        return "bytes"

    def call(self, *, chances: Any = None, **policy: Any) -> str:
        with self.time_stands_still(chances or random.Random(1)):
            return retrying(**policy, sleep=self.sleep)(self.attempt)

    def ask_for(self, total_s: float, *, chances: Any = None) -> str:
        async def pause(pause_s: float) -> None:
            self.sleep(pause_s)

        async def attempt() -> str:
            return self.attempt()

        with self.time_stands_still(chances or random.Random(1)):
            return asyncio.run(retry_async(total_s, lambda: attempt(), sleep=pause))

    @contextmanager
    def time_stands_still(self, chances: Any) -> Iterator[None]:
        """Make tenacity use this clock and this random source."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tenacity, "time", SimpleNamespace(monotonic=lambda: self.now))
            patch.setattr(tenacity.wait, "random", chances)
            yield


class Always:
    """Random source that always draws the same fraction of a range."""

    def __init__(self, share: float) -> None:
        self.share = share

    def uniform(self, low: float, high: float) -> float:
        return low + self.share * (high - low)


def faults(count: int) -> list[Exception]:
    return [OSError(f"fault {i + 1}") for i in range(count)]


@pytest.mark.parametrize(
    ("error", "passes"),
    [
        (OSError("AWS Error SLOW_DOWN during GetObject operation: Please reduce your request rate."), True),
        (OSError("AWS Error INTERNAL_FAILURE during GetObject operation: "), True),
        (OSError("AWS Error UNKNOWN (HTTP status 503) during HeadObject operation: No response body."), True),
        (OSError("AWS Error UNKNOWN (HTTP status 429) during HeadObject operation: No response body."), True),
        (OSError("AWS Error UNKNOWN (HTTP status 400) during HeadObject operation: No response body."), False),
        (OSError("AWS Error NETWORK_CONNECTION during GetObject operation: curlCode: 56"), True),
        (OSError("AWS Error ACCESS_DENIED during HeadObject operation: No response body."), False),
        (OSError("AWS Error NO_SUCH_KEY during GetObject operation: The specified key does not exist."), False),
        (OSError("AWS Error INVALID_ACCESS_KEY_ID during GetObject operation: "), False),
        (ConnectionResetError(104, "reset"), True),
        (TimeoutError("slow"), True),
        (FileNotFoundError(2, "gone"), False),
        (PermissionError(13, "denied"), False),
        (IsADirectoryError(21, "folder"), False),
        (pa.ArrowInvalid("no such option"), False),
        (BadSampleError("s3://b/1.jpg", "the file has 3 bytes now"), False),
        (OSError(5, "Input/output error"), True),
        (OSError(116, "Stale file handle"), True),
        (OSError(40, "Too many levels of symbolic links"), False),
        (OSError(36, "File name too long"), False),
        (StorageError("s3://b/1.jpg", "slow down"), True),
        (StorageError("s3://b/1.jpg", "the file is gone", is_missing=True), False),
        (TypeError("a bug"), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: Exception, passes: bool) -> None:
    assert may_pass(error) is passes
    world = World(error)
    if passes:
        assert world.call() == "bytes"
        assert world.calls == 2
    else:
        with pytest.raises(type(error)) as caught:
            world.call()
        assert caught.value is error
        assert (world.calls, world.pauses) == (1, [])


def test_the_bound_of_the_pauses_doubles_up_to_its_limit() -> None:
    """From 0.2 s up to 5 s the bounds are 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5; drawing one half gives half of each."""
    world = World(*faults(7))
    world.call(chances=Always(0.5))
    assert world.pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 2.5, 2.5])
    world = World(*faults(2_000))
    world.call(chances=Always(1.0), attempts=3_000, total_s=1e6)
    assert world.pauses[-1] == 5.0


def test_pauses_are_drawn_from_the_whole_of_zero_to_the_bound() -> None:
    """Full jitter: over 1,000 runs the mean is (0.2 + 0.4 + 0.8) / 2 = 0.7 s; the extremes approach 0 and 1.4 s."""
    sums = []
    for seed in range(1_000):
        world = World(*faults(3))
        world.call(chances=random.Random(seed))
        assert all(0 <= pause < bound for pause, bound in zip(world.pauses, (0.2, 0.4, 0.8), strict=True))
        sums.append(sum(world.pauses))
    assert sum(sums) / 1_000 == pytest.approx(0.7, rel=0.05)
    assert min(sums) < 0.16
    assert max(sums) > 1.2


def test_two_readers_that_fail_together_do_not_come_back_together() -> None:
    """By default both use the random state of their process, which the operating system seeds."""
    worlds = [World(*faults(4)), World(*faults(4))]
    for world in worlds:
        world.call(chances=random)
    assert worlds[0].pauses != worlds[1].pauses


@pytest.mark.parametrize("seed", range(50))
def test_a_reader_is_patient_for_15_to_20_seconds_unless_told_otherwise(seed: int) -> None:
    """For any random draws, a store that recovers within 15 s is not given up, and no caller waits more than 20 s."""
    world = World(*faults(100))
    with pytest.raises(OSError, match="fault"):
        world.call(chances=random.Random(seed))
    assert 15 <= world.now - START_S <= 20


def test_attempts_are_bounded_and_the_last_answer_is_told() -> None:
    world = World(*(StorageError("a.jpg", f"fault {i + 1}") for i in range(9)), attempt_s=0.25)
    with pytest.raises(BadSampleError) as caught:
        world.call(attempts=4)
    assert (world.calls, len(world.pauses)) == (4, 3)
    assert world.now - START_S == pytest.approx(4 * 0.25 + sum(world.pauses))
    assert caught.value.reason == f"fault 4 (4 attempts in {seconds(world.now - START_S)})"


def test_no_pause_before_the_first_attempt_or_after_the_last() -> None:
    world = World(*faults(1))
    with pytest.raises(OSError, match="fault 1"):
        world.call(attempts=1)
    assert world.pauses == []


@given(seed=st.integers(0, 10**6), total_s=st.floats(0, 20), attempt_s=st.floats(0, 3))
def test_no_attempt_begins_after_the_total_time(seed: int, total_s: float, attempt_s: float) -> None:
    world = World(*faults(50), attempt_s=attempt_s)
    with pytest.raises(OSError, match="fault") as caught:
        world.call(chances=random.Random(seed), attempts=50, total_s=total_s)
    assert str(caught.value) == f"fault {world.calls}"
    assert world.now - START_S - attempt_s <= total_s + 1e-6
    assert world.calls == len(world.pauses) + 1


def test_an_s3_file_system_keeps_all_its_options_but_the_attempts() -> None:
    """Options include credentials. Other file systems are returned unchanged."""
    options = {
        "access_key": "key",
        "secret_key": "secret",
        "session_token": "token",
        "region": "eu-north-1",
        "endpoint_override": "127.0.0.1:9",
        "scheme": "http",
        "connect_timeout": 7.0,
        "force_virtual_addressing": True,
    }
    given = S3FileSystem(**options)
    made = s3_attempts(given, 1)
    assert made is not given
    kept = made.__reduce__()[1][0]
    assert {name: kept[name] for name in options} == options
    assert kept == given.__reduce__()[1][0]
    local = LocalFileSystem()
    assert s3_attempts(local, 1) is local


def away(count: int) -> list[Exception]:
    return [StorageError("s3://b/1.jpg", f"slow down {i + 1}") for i in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_storage_that_is_asked_for_a_time_is_asked_for_nearly_all_of_it_however_often_that_is(seed: int) -> None:
    """A pause (at most 5 s) does not start if it would end too late; 20 attempts would end after 45 s."""
    world = World(*away(10_000))
    with pytest.raises(BadSampleError) as caught:
        world.ask_for(120.0, chances=random.Random(seed))
    assert 115 <= sum(world.pauses) <= 120
    assert world.calls == len(world.pauses) + 1 > 20
    assert not isinstance(caught.value, StorageError)
    assert caught.value.uri == "s3://b/1.jpg"
    assert caught.value.reason == f"slow down {world.calls} ({world.calls} attempts in {seconds(sum(world.pauses))})"


def test_storage_that_is_back_after_30_s_has_its_sample_read() -> None:
    world = World(*away(10_000))
    world.errors = Outage(world, until=world.now + 30.0)  # type: ignore[assignment]
    assert world.ask_for(120.0) == "bytes"
    assert 30 <= sum(world.pauses) <= 35


class Outage:
    """Stands for a list of errors that becomes empty at a given time."""

    def __init__(self, world: World, until: float) -> None:
        self.world, self.until = world, until

    def __bool__(self) -> bool:
        return self.world.now < self.until

    def pop(self, _: int) -> Exception:
        return away(1)[0]


@pytest.mark.parametrize(
    "error",
    [
        BadSampleError("s3://b/1.jpg", "this process has no permission to read the file"),
        StorageError("s3://b/1.jpg", "the file is gone", is_missing=True),
        WaitTimeoutError("waited 2 s for prep-0"),
        OSError(5, "Input/output error"),
    ],
)
def test_what_is_no_verdict_of_storage_or_is_final_is_raised_at_once(error: Exception) -> None:
    world = World(error)
    with pytest.raises(type(error)) as caught:
        world.ask_for(120.0)
    assert caught.value is error
    assert (world.calls, world.pauses) == (1, [])


def test_without_time_storage_is_asked_once() -> None:
    world = World(*away(2))
    with pytest.raises(BadSampleError, match=r"slow down 1 \(1 attempt in 0 s\)"):
        world.ask_for(0.0)
    assert (world.calls, world.pauses) == (1, [])


@pytest.mark.parametrize("is_missing", [True, False])
def test_an_error_that_crosses_processes_still_says_whether_it_may_pass(is_missing: bool) -> None:
    error = pickle.loads(pickle.dumps(StorageError("s3://b/1.jpg", "the file is gone", is_missing=is_missing)))
    assert (error.uri, error.reason, error.is_missing) == ("s3://b/1.jpg", "the file is gone", is_missing)
    assert may_pass(error) is not is_missing
