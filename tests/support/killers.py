"""Real blows for a running feed: its processes killed or stopped by process id, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import ray

from mbaas import runtime


def kill(pid: int) -> None:
    """End a process at once; it cannot clean up (kill -9)."""
    os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that stands still (SIGSTOP) inside of the block: alive, but it says and does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def cache_node_pids(feed: str) -> list[int]:
    """Process ids of a feed's cache nodes that are up."""
    return _pids(f"cache:{feed}:")


def prep_worker_pids(feed: str) -> list[int]:
    """Process ids of a feed's prep workers that are up, as Ray knows them."""
    return _pids(f"prep:{feed}:")


def coordinator_pid(feed: str) -> int:
    """Process id of a feed's coordinator."""
    return _pids(runtime.actor_name(feed))[0]


def lane_pids(feed: str) -> list[int]:
    """Process ids of the coordinators of a feed's further lanes that are up."""
    return _pids(f"lane:{feed}:")


def _pids(prefix: str) -> list[int]:
    """Process ids of the named actors that are up, as Ray knows them."""
    actors = ray._private.state.actors().values()
    return [a["Pid"] for a in actors if a["Name"].startswith(prefix) and a["State"] == "ALIVE"]
