"""Calls for blocks over a coordinator's or a relay's socket return the same as through Ray.

If the socket fails, the calls are repeated through Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterator
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import ray

from mbaas.calls import encoding
from mbaas.calls import socket as local_socket
from mbaas.calls.client import BlockCalls, NoAnswerYetError, await_restart, call
from mbaas.calls.relay import RelayNodeActor, Relays
from mbaas.calls.server import RELAYED_FROM, CallServer
from mbaas.errors import BadSampleError, FeedGoneError, FeedRestartingError
from mbaas.tools.chaos.participants import alive, kill, paused
from mbaas.wire.consumers import Ask, BlockCall, Delivery, SocketAnswer
from support.ports import listen
from support.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import from this folder

REFUSED, BUG = 1, 2
"""Cursors that make `Answers` raise an error."""


@ray.remote(num_cpus=0, max_restarts=-1)
class Answers:
    """Stand-in for a coordinator: answers after ``poll_s`` with the call's cursor as ``progress``."""

    def __init__(self) -> None:
        self._asked: list[int] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._calls = CallServer(self._deliver, self._spawn, self._find_relay)
        self._cache: Any = None
        self._exchanges, self._is_broken = 0, False

    async def _find_relay(self, node: str, may_start: bool) -> tuple[str, str] | None:
        assert node == "another"
        assert not may_start, "its calls are few"
        own = ray.get_runtime_context()
        return await self._cache.relay.remote(own.get_actor_id(), own.current_actor)

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._tasks.add(asyncio.get_running_loop().create_task(coroutine))

    async def address(self, cache: Any = None) -> str | None:
        """Return the coordinator's address, or the address of the relay in ``cache``."""
        if cache is None:
            return await self._calls.address()
        self._cache = cache
        while (address := self._calls.relay_address("another", RELAYED_FROM)) is None:
            await asyncio.sleep(0.01)
        return address

    async def exchange(self, relay: str, number: int, requests: dict[int, bytes]) -> dict[int, bytes]:
        self._exchanges += 1
        if self._is_broken:
            return None  # type: ignore[return-value]
        return await self._calls.exchange(relay, number, requests)

    async def break_exchanges(self) -> None:
        """Return invalid answers to all later exchanges."""
        self._is_broken = True

    async def exchanges(self) -> int:
        return self._exchanges

    async def pid(self) -> int:
        return os.getpid()

    async def asked(self) -> list[int]:
        return self._asked

    async def distrust(self) -> None:
        """Treat every process as another user's from now on."""
        patch.object(local_socket, "is_own_user", return_value=False).start()

    async def ask(self, call: bytes) -> Delivery:
        return await self._deliver(encoding.decoded(call, BlockCall))

    async def _deliver(self, asked: BlockCall) -> Delivery:
        cursor, poll_s = asked.ask.cursor, asked.poll_s
        self._asked.append(cursor)
        if cursor == REFUSED:
            raise BadSampleError("/data/7.jpg", "no image")
        if cursor == BUG:
            raise KeyError("a bug")
        await asyncio.sleep(poll_s)
        return Delivery(progress=cursor)


@ray.remote(num_cpus=0)
class RelaysOnly:
    """Stand-in for the cache node of another machine."""

    def __init__(self) -> None:
        self._relays = Relays()

    async def relay(self, coordinator_id: str, coordinator: Any) -> tuple[str, str] | None:
        return await self._relays.find(coordinator_id, coordinator)

    async def pid(self) -> int:
        return os.getpid()

    async def distrust(self) -> None:
        """Treat every process as another user's from now on."""
        patch.object(local_socket, "is_own_user", return_value=False).start()


def a_call(cursor: int, poll_s: float = 0.0) -> BlockCall:
    return BlockCall(Ask("me", 1, cursor, 0, 0, number=1), poll_s)


@pytest.fixture
def coordinator(ray_clean: None) -> Iterator[Any]:
    actor = Answers.remote()
    yield actor
    ray.kill(actor)


@pytest.fixture(params=["its own", "a relay's"])
def listener(request: pytest.FixtureRequest, coordinator: Any) -> Iterator[Any]:
    """The actor that listens on the socket."""
    if request.param == "its own":
        yield coordinator
        return
    relays = RelaysOnly.remote()
    yield relays
    ray.kill(relays)


def address_of(listener: Any, coordinator: Any) -> Any:
    asked = coordinator.address.remote(None if listener is coordinator else listener)
    return call(asked, 30.0, "the test")


@pytest.fixture
def calls(coordinator: Any, listener: Any) -> Iterator[BlockCalls]:
    """Calls that use the listener's socket."""
    made = BlockCalls(coordinator, "the test")
    made.offer(address_of(listener, coordinator))
    assert made.socket is not None
    yield made
    made.close()


def test_calls_are_answered_over_the_socket_and_raise_there_what_they_raise_through_ray(
    coordinator: Any, calls: BlockCalls
) -> None:
    through_ray = BlockCalls(coordinator, "the test")
    for each in (calls, through_ray):
        assert (each.socket is not None) is (each is calls)
        assert each.make(a_call(10)).result(30.0) == Delivery(progress=10)
        with pytest.raises(BadSampleError, match=r"cannot prepare /data/7.jpg: no image") as raised:
            each.make(a_call(REFUSED)).result(30.0)
        assert raised.value.uri == "/data/7.jpg"
    assert call(coordinator.asked.remote(), 30.0, "the test") == [10, REFUSED] * 2
    assert calls.socket is not None


def test_a_bug_is_told_in_full_as_ray_does(coordinator: Any, calls: BlockCalls) -> None:
    with pytest.raises(ray.exceptions.RayTaskError, match=r"raise KeyError\(\"a bug\"\)"):
        calls.make(a_call(BUG)).result(30.0)
    assert calls.make(a_call(10)).result(30.0).progress == 10
    assert calls.socket is not None
    assert call(coordinator.asked.remote(), 30.0, "the test") == [BUG, BUG, 10]


def test_an_answer_that_is_late_still_comes(calls: BlockCalls) -> None:
    pending = calls.make(a_call(10, poll_s=1.0))
    assert not pending.is_answered()
    began = time.monotonic()
    with pytest.raises(NoAnswerYetError):
        pending.result(0.1)
    assert 0.1 <= time.monotonic() - began < 0.9
    wait_until(pending.is_answered, "the answer is here")
    assert pending.result(0.0).progress == 10
    assert pending.result(0.0).progress == 10, "a second read gives the same"


def test_the_answer_to_a_call_that_was_forgotten_is_not_taken_for_another(calls: BlockCalls) -> None:
    calls.make(a_call(10, poll_s=0.2))
    assert calls.make(a_call(11, poll_s=0.4)).result(30.0).progress == 11, "its answer comes later"
    calls.make(a_call(12, poll_s=0.4))
    assert calls.make(a_call(13)).result(30.0).progress == 13, "its answer comes first"
    assert calls.make(a_call(14, poll_s=0.6)).result(30.0).progress == 14, "after the answer to call 12"


def test_a_call_to_a_coordinator_that_dies_ends_as_through_ray_and_goes_on_with_the_next_one(
    coordinator: Any, listener: Any, calls: BlockCalls
) -> None:
    pending = calls.make(a_call(10, poll_s=5.0))
    kill(call(coordinator.pid.remote(), 30.0, "the test"))
    if listener is coordinator:
        with pytest.raises(
            FeedRestartingError, match="the test: the feed's coordinator does not answer, it may be restart"
        ):
            pending.result(30.0)
    else:  # Ray may have restarted the coordinator before the relay notices
        with contextlib.suppress(FeedRestartingError):
            assert pending.result(30.0).progress == 10
    assert calls.socket is None
    await_restart(coordinator, time.monotonic() + 30.0)
    assert calls.make(a_call(11)).result(30.0).progress == 11, "through Ray"
    calls.offer(address_of(listener, coordinator))
    assert calls.socket is not None
    assert calls.make(a_call(12)).result(30.0).progress == 12
    pid = call(coordinator.pid.remote(), 30.0, "the test")
    ray.kill(coordinator)
    wait_until(lambda: not alive(pid), "it has ended")
    with pytest.raises(FeedGoneError, match="the feed's coordinator is gone"):
        calls.make(a_call(13)).result(30.0)


def test_who_listens_hangs_up_on_another_users_process_which_goes_on_through_ray(
    coordinator: Any, listener: Any
) -> None:
    calls = BlockCalls(coordinator, "the test")
    address = address_of(listener, coordinator)
    call(listener.distrust.remote(), 30.0, "the test")
    calls.offer(address)
    assert calls.make(a_call(10)).result(30.0).progress == 10
    assert calls.socket is None


def end_of(connected: socket.socket) -> bytes:
    """Read one byte; empty if the other side has hung up."""
    try:
        return connected.recv(1)
    except ConnectionResetError:
        return b""


def test_who_sends_no_calls_is_cut_off_and_nobody_else(coordinator: Any, listener: Any, calls: BlockCalls) -> None:
    address = address_of(listener, coordinator)
    deep = b"\x91" * 100_000
    for sent in (
        b"\xff" * 8,
        *map(local_socket.framed, (b"\xc1", b"\x07", b"\x91\x01", b"\x92\xa1a\x01", b"\x80", deep)),
    ):
        with local_socket.connect(address, 5.0) as stranger:
            stranger.sendall(sent)
            assert end_of(stranger) == b""
    assert calls.make(a_call(10)).result(30.0).progress == 10
    assert calls.socket is not None


@pytest.fixture
def impostor() -> Iterator[tuple[str, list[bytes]]]:
    """An address, and the answers that its listener sends to its next calls, after which it hangs up."""
    listening, address = listen()
    answers: list[bytes] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # the socket was closed
            while True:
                accepted, _ = listening.accept()
                with accepted:
                    accepted.recv(1 << 16)
                    accepted.sendall(b"".join(answers))

    thread = threading.Thread(target=serve)
    thread.start()
    yield address, answers
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join()


RIGHT = encoding.encode_answer(SocketAnswer(1, Delivery(progress=99)))


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (b"", "it hangs up"),
        (local_socket.framed(RIGHT)[:-1], "a part of an answer"),
        (local_socket.framed(RIGHT[:-1]), "an answer that ends early"),
        (local_socket.framed(b""), "an empty message"),
        (local_socket.framed(pickle.dumps(SocketAnswer(1, Delivery(progress=99)))), "a pickle"),
        (local_socket.framed(msgspec.msgpack.encode([1, [[], -1.0]])), "a negative time"),
        (local_socket.framed(msgspec.msgpack.encode(["1", None])), "a number that is text"),
        ((local_socket.MOST_BYTES + 1).to_bytes(4, "big"), "too many bytes"),
        (
            local_socket.framed(encoding.encode_answer(SocketAnswer(2, Delivery(progress=99)))),
            "the answer to another call",
        ),
    ],
)
def test_a_socket_that_sends_no_valid_answer_is_given_up_and_the_call_goes_through_ray(
    coordinator: Any, impostor: tuple[str, list[bytes]], sent: bytes, why: str
) -> None:
    address, answers = impostor
    calls = BlockCalls(coordinator, "the test")
    calls.offer(address)
    assert calls.socket == address
    answers.append(sent)
    assert calls.make(a_call(10)).result(30.0).progress == 10, why
    assert calls.socket is None
    calls.offer(address)
    assert calls.socket is None, "it is not used again"
    assert call(coordinator.asked.remote(), 30.0, "the test") == [10]


def test_the_impostor_can_answer(coordinator: Any, impostor: tuple[str, list[bytes]]) -> None:
    """Otherwise the test above would prove nothing."""
    address, answers = impostor
    calls = BlockCalls(coordinator, "the test")
    calls.offer(address)
    answers.append(local_socket.framed(RIGHT))
    assert calls.make(a_call(10)).result(30.0).progress == 99
    calls.close()


def test_where_nobody_listens_calls_go_through_ray(coordinator: Any) -> None:
    for address in ("mbaas-of-another-machine", None):
        calls = BlockCalls(coordinator, "the test")
        calls.offer(address)
        assert calls.socket is None
        assert calls.make(a_call(10)).result(30.0).progress == 10


def test_a_socket_from_which_no_answer_comes_is_given_up_and_not_used_again(
    coordinator: Any, listener: Any, calls: BlockCalls
) -> None:
    address, pending = address_of(listener, coordinator), calls.make(a_call(10))
    with paused(call(listener.pid.remote(), 30.0, "the test")):
        late = calls.make(a_call(11))
        with pytest.raises(NoAnswerYetError):
            late.result(0.5)
        late.lose_socket()
        if listener is not coordinator:
            assert late.result(30.0).progress == 11
    assert late.result(30.0).progress == 11
    assert pending.result(30.0).progress == 10, "retried, too"
    calls.offer(address)
    assert calls.socket is None


def test_calls_of_several_consumers_to_another_machine_go_together(coordinator: Any) -> None:
    """All 8 consumers call at once, 20 times. Their 160 calls need at most 80 exchanges."""
    relays = RelaysOnly.remote()
    made = [BlockCalls(coordinator, "the test") for _ in range(8)]
    for each in made:
        each.offer(address_of(relays, coordinator))
    assert all(each.socket for each in made)
    for cursor in range(100, 120):
        for pending in [each.make(a_call(cursor)) for each in made]:
            assert pending.result(30.0).progress == cursor
    exchanges = call(coordinator.exchanges.remote(), 30.0, "the test")
    assert 20 <= exchanges <= 80
    ray.kill(relays)
    for each in made:
        assert each.make(a_call(10)).result(30.0).progress == 10, "through Ray"
        assert each.socket is None


def test_a_relay_that_was_found_by_an_earlier_coordinator_hangs_up(coordinator: Any) -> None:
    relays = RelaysOnly.remote()
    calls = BlockCalls(coordinator, "the test")
    calls.offer(address_of(relays, coordinator))
    assert calls.make(a_call(10)).result(30.0).progress == 10
    kill(call(coordinator.pid.remote(), 30.0, "the test"))
    await_restart(coordinator, time.monotonic() + 30.0)
    assert calls.make(a_call(11)).result(30.0).progress == 11
    assert calls.socket is None
    ray.kill(relays)


@pytest.mark.meets_bugs
def test_a_relay_that_meets_a_bug_hangs_up(coordinator: Any) -> None:
    relays = RelaysOnly.remote()
    calls = BlockCalls(coordinator, "the test")
    calls.offer(address_of(relays, coordinator))
    assert calls.make(a_call(10)).result(30.0).progress == 10
    call(coordinator.break_exchanges.remote(), 30.0, "the test")
    assert calls.make(a_call(11)).result(30.0).progress == 11, "through Ray"
    assert calls.socket is None
    ray.kill(relays)


def test_an_actor_that_only_relays_ends_when_nobody_uses_it(coordinator: Any) -> None:
    unused_s = 1.0
    own_id = coordinator._actor_id.hex()
    relaying = RelayNodeActor.remote(own_id, unused_s=unused_s)
    calls = BlockCalls(coordinator, "the test")
    calls.offer(address_of(relaying, coordinator))
    assert calls.socket is not None
    used_until, number = time.monotonic() + 4 * unused_s, 10
    while time.monotonic() < used_until:
        assert calls.make(a_call(number, poll_s=0.1)).result(30.0).progress == number
        number += 1
    assert calls.socket is not None, "a relay in use does not end"
    calls.close()
    with pytest.raises(ray.exceptions.RayActorError):
        wait_until(lambda: ray.get(relaying.relay.remote(own_id, coordinator), timeout=30.0) is None, "it has ended")


def test_an_actor_that_only_relays_ends_with_its_coordinator(coordinator: Any) -> None:
    relaying = RelayNodeActor.remote(coordinator._actor_id.hex())
    assert address_of(relaying, coordinator)
    ray.kill(coordinator)
    with pytest.raises(ray.exceptions.RayActorError):
        wait_until(lambda: ray.get(relaying.relay.remote("", coordinator), timeout=30.0) is None, "it has ended")
