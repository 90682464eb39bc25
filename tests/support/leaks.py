"""What a test must not leave behind: feeds, actors, threads, bytes in the object store, files in /dev/shm,
spills.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address, memory_summary

from mbaas.chaos.usage import shared_files
from support.trials import POOL

GRACE_S = 10.0
"""Dropped objects and killed actors are given so long to go."""

PERIOD_S = 0.1
"""Pause between two looks, each of which takes 20 ms of CPU and more: that of the tests beside."""


@dataclass(frozen=True)
class StoreUse:
    """Bytes of primary copies in the cluster's object stores, and bytes that were ever spilled."""

    primary_bytes: int
    spilled_bytes: int


def store_use() -> StoreUse:
    """How much of the object stores is in use now."""
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    stats = get_memory_info_reply(state).store_stats
    return StoreUse(stats.object_store_bytes_primary_copy, stats.spilled_bytes_total)


def alive_actors() -> set[str]:
    """Ids of all actors that are not dead, with their class names; without processes that wait for their next trial."""
    actors, idle = ray._private.state.actors().values(), POOL.ids()
    alive = [a for a in actors if a["State"] != "DEAD" and a["ActorID"] not in idle]
    return {f"{a['ActorClassName']} {a['ActorID']}" for a in alive}


@dataclass(frozen=True)
class Traces:
    """What exists at a moment outside of Python's heap."""

    actors: frozenset[str]
    threads: frozenset[str]
    shared_files: frozenset[str]
    store: StoreUse

    @classmethod
    def now(cls) -> Traces:
        ours = {f"{t.name} {t.ident}" for t in threading.enumerate() if t.name.startswith("mbaas")}
        running = ray.is_initialized()
        actors = alive_actors() if running else set()
        return cls(frozenset(actors), frozenset(ours), shared_files(), store_use() if running else StoreUse(0, 0))


def leaks(before: Traces) -> list[str]:
    """What is there now and was not before, in sentences; empty if nothing is left within `GRACE_S`."""
    deadline = time.monotonic() + GRACE_S
    while (found := _compare(before, Traces.now())) and time.monotonic() < deadline:
        time.sleep(PERIOD_S)
    if any("object store" in each for each in found):
        # Who refers to what: the core worker of each process says it, and an object nobody names is the raylet's.
        address = ray.get_runtime_context().gcs_address
        found.append(f"all objects that are referred to:\n{memory_summary(address, line_wrap=False)}")
    return found


def _compare(before: Traces, now: Traces) -> list[str]:
    found = [f"actor {a} is alive" for a in sorted(now.actors - before.actors)]
    found += [f"thread {t} is alive" for t in sorted(now.threads - before.threads)]
    found += [f"/dev/shm/{name} is left" for name in sorted(now.shared_files - before.shared_files)]
    kept = now.store.primary_bytes - before.store.primary_bytes
    if kept > 0:
        found.append(f"{kept} bytes are left in the object store")
    if now.store.spilled_bytes > before.store.spilled_bytes:
        found.append(f"{now.store.spilled_bytes - before.store.spilled_bytes} bytes were spilled")
    return found
