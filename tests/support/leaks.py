"""Detects leftovers of a test: feeds, actors, threads, object store bytes, files in /dev/shm and spills."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

import ray
from ray._private.internal_api import get_memory_info_reply, get_state_from_address, memory_summary

from mbaas.tools.chaos.usage import shared_files
from support.trials import POOL

GRACE_S = 10.0
"""Time for dropped objects and killed actors to disappear."""

PERIOD_S = 0.1
"""Pause between two checks. A check takes at least 20 ms of CPU time from tests in other processes."""

LIVING = ("DEPENDENCIES_UNREADY", "PENDING_CREATION", "ALIVE", "RESTARTING")
"""Ray's states of actors but DEAD, in which it has a thousand at the end of a session. The order is that of a life, so
that an actor which starts meanwhile is found.
"""


@dataclass(frozen=True)
class StoreUse:
    """Bytes of primary copies in the cluster's object stores, and bytes ever spilled."""

    primary_bytes: int
    spilled_bytes: int


def store_use() -> StoreUse:
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    stats = get_memory_info_reply(state).store_stats
    return StoreUse(stats.object_store_bytes_primary_copy, stats.spilled_bytes_total)


def store_contents() -> str:
    """Ray's list of the references to objects, with their processes and sizes."""
    return str(memory_summary(ray.get_runtime_context().gcs_address, line_wrap=False, units="KB"))


def alive_actors() -> set[str]:
    """Ids and class names of all live actors, except for idle trial processes."""
    found = [ray._private.state.actors(actor_state_name=state) for state in LIVING]
    names = {key: actor["ActorClassName"] for actors in found for key, actor in actors.items()}
    return {f"{names[key]} {key}" for key in names.keys() - POOL.ids()}


@dataclass(frozen=True)
class Traces:
    """Resources outside the Python heap at one moment."""

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
    """Describe resources that did not exist before; empty if they disappear within `GRACE_S`."""
    deadline = time.monotonic() + GRACE_S
    while (found := _compare(before, Traces.now())) and time.monotonic() < deadline:
        time.sleep(PERIOD_S)
    if any("object store" in each for each in found):
        # Each process's core worker reports its references. An object without any belongs to the raylet.
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
