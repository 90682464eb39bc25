"""Messages between two local processes arrive whole and in order, and only from the same user."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from mbaas.calls import socket as local_socket
from support.ports import listen

LISTENER = """
import asyncio, sys
from mbaas.calls.socket import Listener

async def serve():
    listener = Listener(lambda *_: None)
    print(await listener.address(), flush=True)
    await asyncio.to_thread(sys.stdin.read)

asyncio.run(serve())
"""


@pytest.mark.parametrize("seed", range(20))
def test_messages_come_whole_and_in_order_however_they_are_cut_on_the_way(seed: int) -> None:
    chances = random.Random(seed)
    sent = [chances.randbytes(chances.choice((0, 1, 3, 4, 5, 1000))) for _ in range(50)]
    stream = b"".join(map(local_socket.framed, sent))
    messages, came = local_socket.Messages(), []
    while stream:
        cut = chances.randrange(1, chances.choice((2, 9, 3000)))
        came += messages.put(stream[:cut])
        stream = stream[cut:]
    assert came == sent


def test_what_is_left_of_several_messages_comes_when_it_is_asked_for() -> None:
    messages = local_socket.Messages()
    assert next(iter(messages.put(local_socket.framed(b"first") + local_socket.framed(b"second")))) == b"first"
    assert list(messages.put(b"")) == [b"second"]


def test_a_message_that_is_too_long_is_refused_before_it_is_here() -> None:
    with pytest.raises(local_socket.BrokenSocketError, match=str(local_socket.MOST_BYTES + 1)):
        list(local_socket.Messages().put((local_socket.MOST_BYTES + 1).to_bytes(4, "big")))


def test_each_side_speaks_to_the_other_only_if_it_is_of_the_same_user(monkeypatch: pytest.MonkeyPatch) -> None:
    listening, address = listen()
    with listening, local_socket.connect(address, 5.0) as connected:
        accepted, _ = listening.accept()
        with accepted:
            assert local_socket.is_own_user(accepted)
            assert local_socket.is_own_user(connected)
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
            assert not local_socket.is_own_user(accepted)
            with pytest.raises(PermissionError, match=address):
                local_socket.connect(address, 5.0)


def test_nothing_is_left_of_a_process_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        local_socket.connect(address, 5.0).close()
        process.kill()
    with pytest.raises(ConnectionRefusedError):
        local_socket.connect(address, 5.0)
