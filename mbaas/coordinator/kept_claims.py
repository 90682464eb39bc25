"""What each feed keeps of its cluster, in the cluster's key-value store, and the lock under which it is divided.

A program that serves a feed must know what those before it keep, and asks no coordinator for it: one may stand still,
or be restarting. Two programs that serve at the same moment come one after the other: whoever holds the lock reads what
others keep, decides, and registers its feed before the next one reads.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict

from ray.experimental import internal_kv

from mbaas import runtime
from mbaas.budgets import MemoryClaim
from mbaas.coordinator import store
from mbaas.messages import Claims

LEASE_S = 10.0
"""A program that holds the lock for so long has died, or stands still: the next one takes it over. It needs the lock
for some calls of the cluster's head.
"""

LOOK_S = 0.02
"""Pause between two looks whether the lock is free."""

_LOCK = b"mbaas:serving:"
_FREE = b""


def enter(feed: str, claims: Claims, number: int) -> None:
    """Keep what a feed that begins keeps of its cluster.

    Args:
        feed: its name; its coordinator is registered.
        claims: what it keeps.
        number: from `dividing`: says which feeds came before it.
    """
    store.put(feed, "claims", json.dumps({"number": number, **asdict(claims)}).encode())


def update(feed: str, claims: Claims) -> None:
    """Keep what a feed keeps now; nothing if it has ended."""
    if (found := _read(feed)) is not None:
        enter(feed, claims, found[0])


def forget(feed: str) -> None:
    """Delete what is kept of a feed."""
    store.delete(feed, "claims")


def claims_of(feed: str) -> Claims | None:
    """Return what a feed keeps; None if it has ended, or is just being registered."""
    found = _read(feed)
    return None if found is None else found[1]


def in_order() -> list[Claims]:
    """Return what each feed keeps that runs, stands still or is restarting, in the order in which they came."""
    # Of one whose program was killed nothing is deleted, but Ray forgets the name of its coordinator.
    found = [kept for name in runtime.feed_names() if (kept := _read(name)) is not None]
    return [claims for _, claims in sorted(found, key=lambda kept: kept[0])]


@contextlib.contextmanager
def dividing() -> Iterator[int]:
    """Hold the lock; yield a number that is higher than those of all who held it before."""
    number, mine = _acquire()
    try:
        yield number
    finally:
        if internal_kv._internal_kv_get(_lock(number)) == mine:  # else it was taken over, and is deleted
            internal_kv._internal_kv_put(_lock(number), _FREE, overwrite=True)


def _acquire() -> tuple[int, bytes]:
    # The store can do one thing at once with what is there: put a value if there is none. So each holder makes a key of
    # its own, with the next number, and the highest one counts. To delete and put again would let in two of those who
    # take over from one that died.
    mine = uuid.uuid4().hex.encode()
    last, since = -1, 0.0
    while True:
        numbers = _numbers()
        highest = max(numbers, default=0)
        if highest != last:
            last, since = highest, time.monotonic()
        if not highest or not internal_kv._internal_kv_get(_lock(highest)) or time.monotonic() - since > LEASE_S:
            own = highest + 1
            internal_kv._internal_kv_put(_lock(own), mine, overwrite=False)
            # The number may have been used and deleted since: a higher one tells. And whose it is tells its value.
            if internal_kv._internal_kv_get(_lock(own)) == mine and max(_numbers()) == own:
                for number in numbers:
                    internal_kv._internal_kv_del(_lock(number))
                return own, mine
        time.sleep(LOOK_S)


def _numbers() -> list[int]:
    found: list[bytes] = internal_kv._internal_kv_list(_LOCK)
    return [int(key.removeprefix(_LOCK)) for key in found]


def _lock(number: int) -> bytes:
    return _LOCK + str(number).encode()


def _read(feed: str) -> tuple[int, Claims] | None:
    found = store.get(feed, "claims")
    if not found:
        return None
    kept = json.loads(found)
    return kept["number"], Claims(memory=MemoryClaim(**kept["memory"]), cpus=kept["cpus"], gpus=kept["gpus"])
