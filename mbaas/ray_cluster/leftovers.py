"""The end of a feed whose program or coordinator is gone."""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from typing import Any

import psutil
import ray

from mbaas.base.units import seconds
from mbaas.errors import ResourceError
from mbaas.ray_cluster.actor_names import CHILDREN, children, find_coordinator, id_of

WATCH_S = 3.0
"""Period at which a feed's actors check that the feed still has a coordinator. With `MISSES`, they end 3 to 6 s after
Ray has noticed that the feed's program is gone."""

MISSES = 2
"""Consecutive checks without a coordinator after which an actor ends itself. One miss may be a restart."""

LEFTOVERS_S = 60.0
"""Time limit for the remains of an earlier feed to end, in `serve`; after that its name is still taken."""

LOOK_S = 0.1
"""Pause between two checks of whether something has ended."""


def end_children(feed: str) -> None:
    """Kill the actors of a feed whose coordinator is gone."""
    for kind in CHILDREN:
        for actor in children(feed, kind).values():
            ray.kill(actor)


def clear_leftovers(feed: str) -> bool:
    """End the remains of a feed whose program died, and wait until its names are free; False if such a feed runs.

    Such a program could not end anything itself, and Ray and the feed's actors take seconds to notice. Raises
    `ResourceError` if an actor does not end in time.
    """
    end = time.monotonic() + LEFTOVERS_S
    while (coordinator := find_coordinator(feed)) is not None:
        program = _program_of(coordinator)
        if program is _Program.RUNS:
            return False
        if program is _Program.DEAD:  # only if Ray reports it: a process not found here may run elsewhere
            ray.kill(coordinator)
        if time.monotonic() > end:
            return False
        time.sleep(LOOK_S)
    while left := _leftovers(feed):
        if time.monotonic() > end:
            raise ResourceError(
                f"waited {seconds(LEFTOVERS_S)} for processes of an earlier feed {feed!r} to end: "
                f"{', '.join(left)}; serve it again later, or take another name"
            )
        end_children(feed)
        time.sleep(LOOK_S)
    return True


class _Program(enum.Enum):
    RUNS = "the feed goes on with it, or without it because it is detached"
    NOT_SEEN = "its process is not there any more, and Ray has not noticed"
    DEAD = "Ray has noticed that it ended"


def _program_of(coordinator: Any) -> _Program:
    # Ray tells neither in a public way that works without its dashboard.
    actor = ray._private.state.actors(id_of(coordinator))
    if not actor or actor["IsDetached"]:
        return _Program.RUNS if actor else _Program.NOT_SEEN
    job = next((job for job in ray._private.state.jobs() if job["JobID"] == actor["JobID"]), None)
    if job is None or job["IsDead"]:
        return _Program.DEAD
    here = job["DriverIPAddress"] == ray.util.get_node_ip_address()
    return _Program.NOT_SEEN if here and not _lives(job["DriverPid"]) else _Program.RUNS


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _leftovers(feed: str) -> list[str]:
    return [f"{kind}:{feed}:{name}" for kind in CHILDREN for name in children(feed, kind)]


def end_with(coordinator: str) -> None:
    """End the calling actor when the coordinator with this actor id is gone for good.

    A detached actor outlives its coordinator, so that a restarted one can adopt it. Without this, it would run forever
    if the coordinator never came back.
    """
    me = ray.get_runtime_context().current_actor

    def watch() -> None:
        missed = 0
        while missed < MISSES:
            time.sleep(WATCH_S)
            # If Ray does not answer, the coordinator may be alive: check again later.
            with contextlib.suppress(ray.exceptions.RayError, ConnectionError):
                # By id, through a private API. A look-up by name creates a handle, and Ray imports the
                # coordinator's modules: half a second for each actor of the feed.
                state = ray._private.state.actors(coordinator).get("State", "DEAD")
                missed = missed + 1 if state == "DEAD" else 0
        ray.kill(me)

    threading.Thread(target=watch, name="mbaas-end-with-coordinator", daemon=True).start()
