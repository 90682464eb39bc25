"""The processes of running feeds on this machine, and blows for them: killed, or stopped for a while."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ray

from mbaas import runtime
from mbaas.chaos.plan import Target

PREFIXES: dict[Target, str] = {
    "worker": "prep:",
    "cache": "cache:",
    "relay": "relay:",
    "coordinator": "feed:",
    "lane": "lane:",
}
"""What the names of a feed's actors begin with. An actor with another name, or none, is taken for a trial."""

STOPPED_S = 1.0
"""Longest time in which a process that is told to stand still does."""


@dataclass(frozen=True)
class Participant:
    """A process that takes part in a search.

    Attributes:
        target: what it is.
        name: of its actor; a trial may have none.
        pid: its process id.
        node: Ray's id of its node.
    """

    target: Target
    name: str
    pid: int
    node: str


def participants() -> list[Participant]:
    """Find who is up, as Ray knows it, on all feeds of the cluster; sorted by name."""
    found = []
    # Not public. Ray's state API would need its dashboard, which this cluster does not start.
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE" and actor["Pid"]:
            name = actor["Name"]
            target: Target = next((each for each, prefix in PREFIXES.items() if name.startswith(prefix)), "trial")
            found.append(Participant(target, name, actor["Pid"], actor["Address"]["NodeID"]))
    return sorted(found, key=lambda each: (each.name, each.pid))


def kill(pid: int) -> None:
    """End a process at once; it cannot clean up (kill -9)."""
    os.kill(pid, signal.SIGKILL)


def pause(pid: int) -> None:
    """Have a process stand still (SIGSTOP): alive, but it says and does nothing.

    Returns as soon as it does, or after `STOPPED_S`: one of the process's threads takes the signal, and until that has
    its turn on a busy machine the others go on.
    """
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + STOPPED_S
    while process_state(pid) not in "TtZX" and time.monotonic() < end:
        time.sleep(0.001)


def resume(pid: int) -> None:
    """Have a process go on that stands still, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def pause_all(pids: Sequence[int]) -> Callable[[], None]:
    """Have processes stand still, those that are still there; return what has them go on."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pause(pid)
    return lambda: resume_all(pids)


def resume_all(pids: Sequence[int]) -> None:
    """Have all of them go on that are still there."""
    for pid in pids:
        resume(pid)


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that stands still inside of the block."""
    pause(pid)
    try:
        yield
    finally:
        resume(pid)


def process_state(pid: int) -> str:
    """Return the letter by which Linux calls the state of a process: "T" is stopped, "Z" a zombie; "X" if none is."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def alive(pid: int) -> bool:
    """Tell whether the process exists and is not a zombie."""
    return process_state(pid) not in "ZX"


def cache_node_pids(feed: str) -> list[int]:
    """Return process ids of a feed's cache nodes that are up."""
    return _pids(f"cache:{feed}:")


def relay_pids(feed: str) -> list[int]:
    """Return process ids of a feed's actors that are up and only relay calls for blocks."""
    return _pids(f"relay:{feed}:")


def prep_worker_pids(feed: str) -> list[int]:
    """Return process ids of a feed's prep workers that are up, as Ray knows them."""
    return _pids(f"prep:{feed}:")


def coordinator_pid(feed: str) -> int:
    """Return the process id of a feed's coordinator."""
    return _pids(runtime.actor_name(feed))[0]


def lane_pids(feed: str) -> list[int]:
    """Return process ids of the coordinators of a feed's further lanes that are up."""
    return _pids(f"lane:{feed}:")


def _pids(prefix: str) -> list[int]:
    return [each.pid for each in participants() if each.name.startswith(prefix)]
